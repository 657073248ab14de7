"""Aggregates over a window of readings, beside plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.windows import ReadingWindow, WindowSummary
from tests.readings import gpt_readings, without_optimizer

LAYER = "layer_forward_ms/a"


def layout(*tags: str) -> SpanLayout:
    """Spans that follow one another."""
    spans = tuple(Span(tag, "forward", ((i, i + 1),)) for i, tag in enumerate(tags))
    return SpanLayout(spans, len(tags) + 1)


def reading(of: SpanLayout, step: int, *durations_ms: float) -> Reading:
    return Reading(of, step, 1e9 + step, [0.0, *np.cumsum(durations_ms).tolist()])


def test_as_numpy_says() -> None:
    readings = gpt_readings(n=60, with_members=True)
    summary = WindowSummary(readings)
    durations = np.array([one.durations_ms for one in readings])
    total = durations[:, readings[0].layout.tags.index("step_ms/total")]
    assert summary.tags == readings[0].layout.tags
    assert summary.n_readings == 60
    assert (summary.first_step, summary.last_step) == (0, 59)
    for column, tag in enumerate(summary.tags):
        values = durations[:, column]
        times = summary[tag]
        assert times.count == 60
        assert times.mean_ms == pytest.approx(values.mean())
        assert times.p05_ms == pytest.approx(np.percentile(values, 5))
        assert times.p50_ms == pytest.approx(np.median(values))
        assert times.p95_ms == pytest.approx(np.percentile(values, 95))
        assert times.max_ms == values.max()
        whole = total
        if tag in ("step_ms/gap", "step_ms/copy"):
            lead = [summary.tags.index(f"step_ms/{part}") for part in ("gap", "copy")]
            whole = total + durations[:, lead].sum(axis=1)
        assert times.share == pytest.approx(np.median(values) / np.median(whole))


def test_layouts_that_change_are_joined_by_their_tags() -> None:
    both = layout("step_ms/forward", "step_ms/optimizer", LAYER)
    forward_only = layout(LAYER, "step_ms/forward")
    summary = WindowSummary(
        [
            reading(both, 0, 1.0, 2.0, 10.0),
            reading(forward_only, 1, 20.0, 3.0),
            reading(both, 2, 5.0, 4.0, 30.0),
        ]
    )
    assert summary.tags == both.tags
    assert summary[LAYER].count == 3
    assert summary[LAYER].p50_ms == pytest.approx(20.0)
    assert summary["step_ms/optimizer"].count == 2
    assert summary["step_ms/optimizer"].mean_ms == pytest.approx(3.0)
    # Shares are of the steps that have the span: 3 and 9 ms where the optimizer steps.
    assert summary["step_ms/optimizer"].share == pytest.approx(3 / 6)
    assert summary["step_ms/forward"].share == pytest.approx(3 / 3)
    assert np.isnan(summary.durations_ms[1, 1])
    assert summary.step is not None
    assert summary.step.mean_ms == pytest.approx(5.0)
    assert summary.times_of("step_ms/optimizer", LAYER).p50_ms == pytest.approx(20.0)  # type: ignore[union-attr]
    assert summary.times_of("nothing") is None
    typical = summary.typical()
    assert typical is not None
    assert typical.layout is both
    assert typical.offsets_ms == pytest.approx([0.0, 3.0, 6.0, 26.0])


def test_what_is_no_longer_timed_leaves_with_its_last_reading() -> None:
    old, new = layout("step_ms/total", LAYER), layout("step_ms/total")
    window = ReadingWindow(3)
    window.add(reading(old, 0, 1.0, 1.0))
    for step in range(1, 3):
        window.add(reading(new, step, 1.0))
    assert window.summary()[LAYER].count == 1
    window.add(reading(new, 3, 1.0))
    assert len(window) == 3
    assert LAYER not in window.summary()
    assert window.summary().get(LAYER) is None


def test_from_the_end_of_a_step_to_that_of_the_next() -> None:
    readings = gpt_readings(n=20)
    summary = WindowSummary(readings)
    parts = [summary[f"step_ms/{part}"].mean_ms for part in ("gap", "copy", "total")]
    assert summary.period is not None
    assert summary.period.mean_ms == pytest.approx(sum(parts))
    assert WindowSummary([reading(layout(LAYER), 0, 1.0)]).period is None


def test_of_steps_whose_optimizer_is_not_timed_the_gap_has_no_share() -> None:
    summary = WindowSummary([without_optimizer()])
    assert summary.period is None
    assert summary["step_ms/gap"].p50_ms == 1.0
    assert summary["step_ms/gap"].share == 0.0
    assert summary["step_ms/backward"].share == pytest.approx(2 / 3)


def test_nothing_was_timed() -> None:
    for summary in (ReadingWindow().summary(), WindowSummary([reading(layout(), 0)])):
        assert summary.times == {}
        assert summary.step is None
        assert summary.period is None
    assert ReadingWindow().summary().typical() is None


def test_the_typical_step_keeps_what_contains_what() -> None:
    readings = gpt_readings(n=30, with_members=True)
    typical = WindowSummary(readings).typical()
    assert typical is not None
    order = np.argsort(np.array(readings[0].offsets_ms), kind="stable")
    assert (np.diff(np.array(typical.offsets_ms)[order]) >= 0).all()
