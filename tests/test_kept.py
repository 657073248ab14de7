"""What is prepared for steps does not grow with a run whose steps are all different."""

from __future__ import annotations

from lightning_cudagraph.timing.kept import kept
from lightning_cudagraph.timing.lead_in import Layouts, LeadIn
from lightning_cudagraph.timing.records import ReadingRecords
from lightning_cudagraph.timing.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.tensorboard.charts import StepBand
from lightning_cudagraph.timing.whole_steps import StepJoiner


def test_made_once() -> None:
    made: list[int] = []
    found: dict[int, int] = {}
    for key in (1, 2, 1, 2, 1):
        assert kept(found, key, lambda key=key: made.append(key) or -key) == -key  # type: ignore[misc]
    assert made == [1, 2]


def test_no_more_than_some() -> None:
    found: dict[int, int] = {}
    for key in range(1000):
        assert kept(found, key, lambda: key) == key  # noqa: B023
        assert len(found) <= 64


def test_steps_that_are_all_different() -> None:
    layouts, records, band, joiner = Layouts(), ReadingRecords(), StepBand(10), StepJoiner()
    for step in range(300):
        layout = SpanLayout((Span(f"step_ms/{step}", "forward", ((0, 1),)),), 2)
        layout = layouts.of(layout, LeadIn(lambda: None, None))  # type: ignore[arg-type, return-value]
        reading = Reading(layout, step, 0.0, [0.0, 1.0])
        assert len(records.of([reading])[0]) == records.n_bytes([reading]) > 0
        band.add([reading])
        joiner.add(Reading(layout, step, 0.0, [0.0, 1.0, -1.0], 0, False))
        assert joiner.add(Reading(layout, step, 0.0, [0.0, 1.0, -1.0], 1, True)) is not None
    for by_layout in (layouts._made, records._by_tags, records._n_bytes, band._calls, joiner._layouts):
        assert len(by_layout) <= 64
