"""The note on the size of DDP's buckets."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, TOTAL_TAG, Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.windows import WindowSummary
from lightning_cudagraph.trainer.training.times.bucket_size import bucket_notes


def step_that_waits(waits_ms: float | None) -> WindowSummary:
    """Two steps of 10 ms each, which wait so long for their all-reduces; None: they have none."""
    spans = [Span(TOTAL_TAG, "step", ((0, 1),))]
    offsets_ms = [0.0, 10.0]
    if waits_ms is not None:
        spans.append(Span(EXPOSED_TAG, "communication", ((2, 3),)))
        offsets_ms += [8.0, 8.0 + waits_ms]
    layout = SpanLayout(tuple(spans), len(offsets_ms))
    return WindowSummary([Reading(layout, step, 0.0, offsets_ms) for step in range(2)])


def test_a_step_that_waits_is_told_of_smaller_buckets() -> None:
    (note,) = bucket_notes(DDPStrategy(), step_that_waits(1.5))
    assert note.startswith("15% of a step is the wait for all-reduces")
    assert "`DDPStrategy(bucket_cap_mb=5, gradient_as_bucket_view=True)`" in note


@pytest.mark.parametrize(
    ("strategy", "waits_ms"),
    [
        pytest.param(DDPStrategy(), 0.4, id="it waits little"),
        pytest.param(DDPStrategy(), None, id="no all-reduces"),
        pytest.param(DDPStrategy(bucket_cap_mb=25), 1.5, id="the user has chosen"),
        pytest.param(SingleDeviceStrategy(), 1.5, id="another strategy"),
    ],
)
def test_no_note(strategy: Strategy, waits_ms: float | None) -> None:
    assert bucket_notes(strategy, step_that_waits(waits_ms)) == []
