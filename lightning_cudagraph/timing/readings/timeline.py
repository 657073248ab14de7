"""Timeline of a reading: calls of spans in rows; two calls in one row are nested or disjoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_cudagraph.timing.readings.spans import (
    EXPOSED_TAG,
    STEP_TAG,
    TOTAL_TAG,
    Reading,
    Span,
    Track,
)

# From top to bottom.
TRACKS: tuple[Track, ...] = ("host", "copy", "forward", "backward", "optimizer", "communication")

# Whole ticks, so that a call that ends at a mark and one that begins there have equal times in every
# format. A tick is 125 ns, finer than events are, and an eighth of a microsecond, the unit of trace
# files, which floating point holds exactly.
TICKS_PER_MS = 8000

# Sums of other spans.
_NOT_SHOWN = (TOTAL_TAG, EXPOSED_TAG)


@dataclass(frozen=True)
class PlacedCall:
    """One call of a span, in ticks after the step's first mark, and its place in the span's track.

    `row` is 0, or more for a call that overlaps another without nesting. `depth` is the number of calls
    in the row that contain it.
    """

    span: Span
    row: int
    depth: int
    begin: int
    end: int


def calls_of(reading: Reading) -> list[PlacedCall]:
    """The calls in a step, track by track, without the whole step and its waits for all-reduces."""
    ticks = [round(offset_ms * TICKS_PER_MS) for offset_ms in reading.offsets_ms]
    by_track: dict[Track, list[tuple[int, int, Span]]] = {track: [] for track in TRACKS}
    for span in reading.layout.spans:
        if span.tag not in _NOT_SHOWN:
            by_track[span.track] += [
                (ticks[begin], max(ticks[begin], ticks[end]), span) for begin, end in span.calls
            ]
    return [one for calls in by_track.values() for one in _stacked(calls)]


def _stacked(calls: Iterable[tuple[int, int, Span]]) -> list[PlacedCall]:
    def outermost_first(call: tuple[int, int, Span]) -> tuple[int, int, bool, int]:
        begin, end, span = call
        # Of two with equal times, the container has the shorter path.
        return begin, -end, not span.tag.startswith(STEP_TAG), span.tag.count(".")

    rows: list[list[int]] = []  # the ends of the open calls of each row
    placed = []
    for begin, end, span in sorted(calls, key=outermost_first):
        for row, open_ends in enumerate(rows):  # noqa: B007
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                break
        else:
            row, open_ends = len(rows), []
            rows.append(open_ends)
        placed.append(PlacedCall(span, row, len(open_ends), begin, end))
        open_ends.append(end)
    return placed


def step_end(reading: Reading) -> int:
    """The time of the last mark of a step, in ticks after its first."""
    return max((round(offset_ms * TICKS_PER_MS) for offset_ms in reading.offsets_ms), default=0)
