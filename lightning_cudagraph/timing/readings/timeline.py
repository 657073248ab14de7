"""Timeline of a reading: slices in rows; two slices of one row are nested or disjoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_cudagraph.timing.readings.spans import (
    BACKWARD_TAG,
    EXPOSED_TAG,
    FORWARD_TAG,
    STEP_TAG,
    TOTAL_TAG,
    Reading,
    Track,
)

# From top to bottom.
TRACKS: tuple[Track, ...] = ("host", "copy", "forward", "backward", "optimizer", "communication")

# Whole ticks, so that a slice that ends at a mark and one that begins there have equal times in every
# format. A tick is 125 ns, finer than events are, and an eighth of a microsecond, the unit of trace
# files, which floating point holds exactly.
TICKS_PER_MS = 8000

_PREFIXES = (FORWARD_TAG, BACKWARD_TAG, STEP_TAG)
# Sums of other spans.
_NOT_SHOWN = (TOTAL_TAG, EXPOSED_TAG)


@dataclass(frozen=True)
class Slice:
    """One call of a layer, or of another part of the step, in ticks after the step's first mark.

    `row` is that of the track: 0, or more for a slice that overlaps another without nesting. `depth` is
    the number of slices in the row that contain it.
    """

    tag: str
    name: str
    track: Track
    row: int
    depth: int
    begin: int
    end: int


def slices_of(reading: Reading) -> list[Slice]:
    """The slices of a step, track by track, without the whole step and its waits for all-reduces."""
    ticks = [round(offset_ms * TICKS_PER_MS) for offset_ms in reading.offsets_ms]
    by_track: dict[Track, list[tuple[int, int, str]]] = {track: [] for track in TRACKS}
    for span in reading.layout.spans:
        if span.tag not in _NOT_SHOWN:
            by_track[span.track] += [
                (ticks[begin], max(ticks[begin], ticks[end]), span.tag) for begin, end in span.calls
            ]
    return [one for track, calls in by_track.items() for one in _stacked(track, calls)]


def _stacked(track: Track, calls: Iterable[tuple[int, int, str]]) -> list[Slice]:
    def outermost_first(call: tuple[int, int, str]) -> tuple[int, int, bool, int]:
        begin, end, tag = call
        # Of two with equal times, the container has the shorter path.
        return begin, -end, not tag.startswith(STEP_TAG), tag.count(".")

    rows: list[list[int]] = []  # the ends of the open slices of each row
    slices = []
    for begin, end, tag in sorted(calls, key=outermost_first):
        for row, open_ends in enumerate(rows):  # noqa: B007
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                break
        else:
            row, open_ends = len(rows), []
            rows.append(open_ends)
        prefix = next((prefix for prefix in _PREFIXES if tag.startswith(prefix)), "")
        name = tag.removeprefix(prefix)
        slices.append(Slice(tag, name, track, row, len(open_ends), begin, end))
        open_ends.append(end)
    return slices


def step_end(reading: Reading) -> int:
    """The time of the last mark of a step, in ticks after its first."""
    return max((round(offset_ms * TICKS_PER_MS) for offset_ms in reading.offsets_ms), default=0)
