"""Accumulation windows as one reading each: the readings of their micro-batches are joined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from lightning_cudagraph.timing.readings.sink import Sink, Sinks
from lightning_cudagraph.timing.readings.spans import (
    MAX_LAYOUTS,
    STAGE_TAGS,
    TOTAL_TAG,
    Reading,
    Span,
    SpanLayout,
)
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG


class WholeSteps(Sinks):
    """Sinks that receive one reading for each optimizer step, and not for each micro-batch.

    The readings of an accumulation window are joined, as if its micro-batches were one long step. So the
    time of a layer is the sum over all micro-batches, and the optimizer's share is of the whole window.
    A window without a reading of each, because a micro-batch was eager, is skipped.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        super().__init__(sinks)
        self._batches: list[Reading] = []
        self._layout_of = lru_cache(MAX_LAYOUTS)(_joined_layout)

    def add(self, reading: Reading) -> None:
        step = self.joined(reading)
        if step is not None:
            super().add(step)

    def joined(self, reading: Reading) -> Reading | None:
        """Add the reading of a micro-batch; return that of the window that it completes."""
        if reading.batch == 0 and reading.is_last:
            return reading
        if reading.batch == 0:
            self._batches = [reading]
            return None
        batches = self._batches
        if not batches or batches[-1].batch != reading.batch - 1:
            self._batches = []
            return None
        batches.append(reading)
        if not reading.is_last:
            return None
        self._batches = []
        return self._join(batches)

    def _join(self, batches: list[Reading]) -> Reading:
        layout = self._layout_of(tuple(batch.layout for batch in batches))
        offsets_ms = list(batches[0].offsets_ms)
        origin_ms = 0.0
        for before, batch in pairwise(batches):
            # Gap and copy before a micro-batch begin at the end of the one before it.
            origin_ms += max(before.offsets_ms) - min(batch.offsets_ms)
            offsets_ms += [origin_ms + offset_ms for offset_ms in batch.offsets_ms]
        last = batches[-1]
        waited_ms = sum(batch.waited_ms for batch in batches)
        return Reading(layout, last.step, last.walltime_s, offsets_ms, waited_ms=waited_ms)


def _joined_layout(layouts: tuple[SpanLayout, ...]) -> SpanLayout:
    """The layout of consecutive micro-batches."""
    calls: dict[str, list[tuple[int, int]]] = {}
    spans: dict[str, Span] = {}
    # The last has the optimizer, and so the most spans: the order is taken from it.
    for layout in (layouts[-1], *layouts):
        for span in layout.spans:
            spans.setdefault(span.tag, span)
    if GAP_TAG not in layouts[0].tags:
        spans.pop(GAP_TAG, None)  # gaps between its micro-batches alone are no gap before a step
    first = 0
    for layout in layouts:
        by_tag = {span.tag: span.calls for span in layout.spans}
        if TOTAL_TAG in spans and TOTAL_TAG not in by_tag:
            by_tag[TOTAL_TAG] = tuple(call for tag in STAGE_TAGS for call in by_tag.get(tag, ()))
        for tag, of_batch in by_tag.items():
            calls.setdefault(tag, []).extend((first + begin, first + end) for begin, end in of_batch)
        first += layout.n_marks
    return SpanLayout(
        tuple(Span(tag, span.track, tuple(calls[tag])) for tag, span in spans.items()), first
    )
