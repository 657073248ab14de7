"""Steps of the optimizer over several batches, each as one reading."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_cudagraph import CUDAGraphCallback, LayerTimings, LayerTimingsMonitor
from lightning_cudagraph.timing.output.tables import parts_table
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.timeline import calls_of
from lightning_cudagraph.timing.readings.whole_steps import WholeSteps
from lightning_cudagraph.timing.readings.windows import ReadingWindow
from tests.harness import Net, loader, make, train
from tests.perfetto import import_trace

BATCH = SpanLayout(
    (
        Span("step_ms/forward", "forward", ((0, 1),)),
        Span("step_ms/backward", "backward", ((1, 2),)),
        Span("layer_forward_ms/a", "forward", ((0, 1),)),
        Span("step_ms/gap", "host", ((3, 0),)),
    ),
    4,
)
LAST = SpanLayout(
    (
        Span("step_ms/forward", "forward", ((0, 1),)),
        Span("step_ms/backward", "backward", ((1, 2),)),
        Span("step_ms/optimizer", "optimizer", ((2, 3),)),
        Span("step_ms/total", "host", ((0, 3),)),
        Span("layer_forward_ms/a", "forward", ((0, 1),)),
        Span("step_ms/gap", "host", ((4, 0),)),
    ),
    5,
)


def batches(step: int, n: int) -> list[Reading]:
    """Batches of 1 ms forward and 2 ms backward, half a millisecond apart; 3 ms for the optimizer."""
    found = [Reading(BATCH, step, 1e9 + step, [0, 1, 3, -0.5], k, False) for k in range(n - 1)]
    return [*found, Reading(LAST, step, 1e9 + step, [0, 1, 3, 6, -0.5], n - 1, True)]


def joined(readings: list[Reading]) -> list[Reading]:
    steps = WholeSteps([])
    return [step for reading in readings if (step := steps.joined(reading)) is not None]


def test_a_step_has_the_sum_of_its_batches() -> None:
    first, second = joined([*batches(7, 4), *batches(8, 4)])
    assert (first.step, second.step) == (7, 8)
    assert first.layout is second.layout
    times_ms = dict(zip(first.layout.tags, first.durations_ms.tolist(), strict=True))
    assert times_ms == pytest.approx(
        {
            "step_ms/forward": 4.0,
            "step_ms/backward": 8.0,
            "step_ms/optimizer": 3.0,
            "step_ms/total": 15.0,  # without the gaps in it
            "layer_forward_ms/a": 4.0,
            "step_ms/gap": 2.0,
        }
    )
    # One batch after another, with the gaps between them: those of 3 ms at 0, 3.5, 7 and 10.5.
    forwards = [one.begin / 8000 for one in calls_of(first) if one.span.tag == "layer_forward_ms/a"]
    assert forwards == pytest.approx([0.0, 3.5, 7.0, 10.5])


def test_a_step_behind_a_pause_has_no_gap() -> None:
    """Those between its batches are not all that lies before it."""
    first, *others = batches(7, 4)
    spans = tuple(span for span in first.layout.spans if span.tag != "step_ms/gap")
    (step,) = joined([Reading(SpanLayout(spans, 3), 7, 1e9, [0, 1, 3], 0, False), *others])
    assert "step_ms/gap" not in step.layout.tags
    assert "step_ms/total" in step.layout.tags


def test_shares_are_of_the_whole_step() -> None:
    window = ReadingWindow(5)
    steps = WholeSteps([window])
    for step in range(7):
        for reading in batches(step, 4):
            steps.add(reading)
    summary = window.summary()
    assert summary.n_readings == 5
    parts = ("forward", "backward", "optimizer")
    assert sum(summary[f"step_ms/{part}"].share for part in parts) == pytest.approx(1.0)
    assert summary["step_ms/optimizer"].share == pytest.approx(3 / 15)
    assert summary.step is not None
    assert summary.step.p50_ms == pytest.approx(15.0)
    assert summary.period is not None
    assert summary.period.p50_ms == pytest.approx(17.0)
    assert any(line.split()[:2] == ["optimizer", "3.000"] for line in parts_table(summary))


def test_of_a_step_that_lacks_a_batch_nothing_is_made() -> None:
    one, two, three = (batches(step, 4) for step in range(3))
    assert [step.step for step in joined([*one[1:], *two[:1], *two[2:], *three])] == [2]
    assert [step.step for step in joined([*one[:2], *two])] == [1]


def test_a_batch_that_is_a_step_stays_as_it_is() -> None:
    [reading] = batches(0, 1)
    assert joined([reading])[0] is reading


def test_without_the_optimizer_a_step_is_its_passes() -> None:
    parts = [Reading(BATCH, 0, 1e9, [0, 1, 3, -0.5], k, k == 1) for k in range(2)]
    window = ReadingWindow()
    for step in joined(parts):
        window.add(step)
    assert window.summary().step.p50_ms == pytest.approx(6.0)  # type: ignore[union-attr]


@pytest.mark.spread(2, first=1)
@pytest.mark.parametrize("eager", [False, True])
def test_a_run_that_accumulates(accelerator: str, tmp_path: Path, eager: bool) -> None:
    timings = LayerTimings(window_steps=4, trace_steps=3)
    callback = None if eager else CUDAGraphCallback(timings=timings)
    trace = train(
        make(Net),
        tmp_path,
        callback,
        accelerator=accelerator,
        callbacks=(LayerTimingsMonitor(timings),) if eager else (),
        train_loader=loader(ragged=False, batches=20),
        logger=TensorBoardLogger(tmp_path),
        accumulate_grad_batches=4,
        checkpoint_every=0,
    )
    if not eager:
        assert trace.counts.replayed == 48
    # The table of the last window: its parts add up to its steps, of four batches each.
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    text = found.Tensors("~cudagraph/layers/text_summary")[-1].tensor_proto.string_val[0].decode()
    rows: dict[str, list[str]] = {}
    for line in filter(str.strip, text.splitlines()):
        rows.setdefault(line.split()[0], line.split())
    for part in ("forward", "backward", "optimizer"):
        share = float(rows[part][6].rstrip("%")) / 100
        assert share == pytest.approx(float(rows[part][2]) / float(rows["whole"][2]), abs=0.02)
    assert "4 timed steps, 11 to 14" in text
    # Each batch has a point; the last four make one step of the trace.
    forwards = found.Scalars("~layer_forward_ms/head")
    assert [scalar.step for scalar in forwards[-4:]] == [14] * 4
    written = import_trace(next(tmp_path.rglob("layer_trace.json")).read_text())
    calls = [one for one in written.named("head") if one.args["step"] == 14]
    assert len(calls) == 8
    assert len(written.named("step 14")) == 1
    in_trace_ms = sum(one.end_ns - one.begin_ns for one in calls) / 1e6
    points = [*forwards[-4:], *found.Scalars("~layer_backward_ms/head")[-4:]]
    assert in_trace_ms == pytest.approx(sum(scalar.value for scalar in points), rel=0.05, abs=0.01)
