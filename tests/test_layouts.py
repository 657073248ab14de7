"""Prepared data does not grow in a run in which all steps are different."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_cudagraph.timing.events.clock import FitClock
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.whole_steps import WholeSteps
from lightning_cudagraph.timing.sinks.tensorboard.records import ReadingRecords, curves_of


def test_steps_that_are_all_different() -> None:
    backend: Any = SimpleNamespace(event_times=list)
    curves = curves_of()
    clock, records = FitClock(backend, [], 1), ReadingRecords(curves)
    steps = WholeSteps([])
    for step in range(300):
        layout = SpanLayout((Span(f"step_ms/{step}", "forward", ((0, 1),)),), 2)
        layout = clock._layout_of(layout, False, 0)
        reading = Reading(layout, step, 0.0, [0.0, 1.0])
        for _ in range(2):
            assert records.of([reading])[0]
        steps.add(Reading(layout, step, 0.0, [0.0, 1.0, -1.0], 0, False))
        assert steps.joined(Reading(layout, step, 0.0, [0.0, 1.0, -1.0], 1, True)) is not None
    prepared = (clock._layout_of, records._of_tags, steps._layout_of, curves)
    for by_layout in prepared:
        info = by_layout.cache_info()
        assert info.misses == 300  # once for each
        assert info.currsize <= 64
