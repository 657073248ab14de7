"""Plain steps before the capture, which are measured and change no number of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_cudagraph import CUDAGraphCallback, RunSummary
from lightning_cudagraph.capture.steps import Phase, StepCounts
from lightning_cudagraph.timing.readings import step_time as step_time_module
from lightning_cudagraph.timing.readings.step_time import Plain, StepTime
from lightning_cudagraph.trainer.training.captured_step.compiled_step import is_step_compiled
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from lightning_cudagraph.trainer.training.times import baseline
from tests.harness import Net, Trace, assert_same, loader, make, train

BATCHES = 40
LONG = 1700  # steps, of which 3 are plain


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator is taken for a GPU."""
    monkeypatch.setattr(baseline, "has_speed", lambda backend: True)


class Stops(Callback):
    """Ends a fit that was to be long, and notes the plain steps until then."""

    def __init__(self, steps: int = 30) -> None:
        self.steps = steps
        self.summaries: list[RunSummary] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, CUDAGraphCallback):
                self.summaries.append(callback.summary)
        trainer.should_stop = trainer.global_step >= self.steps


def fit(folder: Path, accelerator: str, callback: CUDAGraphCallback | None, **kwargs: Any) -> Trace:
    given = {"train_loader": loader(ragged=False, batches=BATCHES), "max_epochs": LONG // BATCHES + 1}
    build = kwargs.pop("build", Net)
    return train(
        make(build),
        folder,
        callback,
        accelerator=accelerator,
        callbacks=(kwargs.pop("stops", None) or Stops(),),
        checkpoint_every=0,  # a pause in the middle of the plain steps
        **{**given, **kwargs},
    )


@pytest.mark.spread
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_plain_steps_change_no_number(tmp_path: Path, accelerator: str, precision: str) -> None:
    if precision == "16-mixed" and accelerator == "cpu":
        pytest.skip("Lightning has no gradient scaler for CPUs")
    callback, stops = CUDAGraphCallback(), Stops()
    plain = fit(tmp_path / "plain", accelerator, None, precision=precision)
    graph = fit(tmp_path / "graph", accelerator, callback, precision=precision, stops=stops)
    assert_same(plain, graph)
    stage = callback.summary.fit
    assert stage.warmed_up == 3 + 3
    assert stage.replayed == 30 - 6
    assert stage.captures == 1
    assert stage.plain_steps == 3
    assert stage.speedup == pytest.approx(stage.plain_ms / stage.replay_ms)  # type: ignore[operator]
    assert callback.summary.verdict.partition("x your plain step")[1]
    # Live from the first step on, and each stays what it was.
    assert [each.fit.warmed_up for each in stops.summaries[:6]] == [*range(1, 7)]
    assert [each.fit.replayed for each in stops.summaries[-2:]] == [23, 24]
    assert [each.fit.plain_steps for each in stops.summaries[:6]] == [0, 0, 0, 0, 3, 3]


@pytest.mark.usefixtures("fast")
def test_they_are_a_line_beside_the_replays(tmp_path: Path, accelerator: str) -> None:
    callback, logger = CUDAGraphCallback(), TensorBoardLogger(tmp_path)
    fit(tmp_path, accelerator, callback, logger=logger, stops=Stops(120))
    found = EventAccumulator(logger.log_dir).Reload()
    lines = {name: found.Scalars(f"~step_time_ms/{name}") for name in ("eager", "replayed")}
    eager, replayed = ([point.step for point in line] for line in lines.values())
    assert eager == replayed == [6 + 9, 6 + 29, 6 + 69, 119]
    stage = callback.summary.fit
    assert [point.value for point in lines["eager"]] == pytest.approx([stage.plain_ms] * 4)
    values_ms = [point.value for point in lines["replayed"]]
    assert min(values_ms) <= stage.replay_ms <= max(values_ms)  # type: ignore[operator]


@pytest.mark.spread
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("window", [2, 5])
def test_plain_steps_are_whole_windows(tmp_path: Path, accelerator: str, window: int) -> None:
    callback = CUDAGraphCallback(timings=None)
    kwargs: dict[str, Any] = {
        "accumulate_grad_batches": window,
        "max_epochs": LONG * window // BATCHES + 1,
    }
    plain = fit(tmp_path / "plain", accelerator, None, stops=Stops(15), **kwargs)
    graph = fit(tmp_path / "graph", accelerator, callback, stops=Stops(15), **kwargs)
    assert_same(plain, graph)
    stage = callback.summary.fit
    assert (stage.warmed_up, stage.plain_steps) == ((3 + 3) * window, 3)
    assert stage.speedup is not None


@pytest.mark.long
@pytest.mark.usefixtures("fast")
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.*deprecated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Dynamo does not know how to trace the builtin",
)
def test_plain_steps_are_not_compiled_for_this_run(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bool] = []
    plainly = TrainingSteps._plainly

    def noting(self: Any, plain: Plain, eagerly: Any) -> Any:
        def looking() -> Any:
            compiled.append(is_step_compiled(self._run.module))
            return eagerly()

        return plainly(self, plain, looking)

    monkeypatch.setattr(TrainingSteps, "_plainly", noting)
    callback = CUDAGraphCallback(compile=True, timings=None)
    plain = fit(tmp_path / "plain", accelerator, None)
    with torch.compiler.set_stance("default", force_backend="eager"):
        graph = fit(tmp_path / "graph", accelerator, callback)
    torch.compiler.reset()
    assert_same(plain, graph)
    assert compiled == [False] * 3
    assert callback.summary.fit.plain_steps == 3


@pytest.mark.spread
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_epochs": 3},
        {"max_epochs": None, "max_steps": LONG // 2},
        {"train_loader": loader(ragged=False, batches=6), "max_epochs": LONG},
        {"given": {"warmup_steps": 3}},
    ],
    ids=["few epochs", "few steps", "short epochs", "a number is given"],
)
def test_no_measure_where_it_would_be_none(
    tmp_path: Path, accelerator: str, kwargs: dict[str, Any]
) -> None:
    given = {"timings": None, **kwargs.get("given", {})}
    rest = {name: value for name, value in kwargs.items() if name != "given"}
    callback = CUDAGraphCallback(**given)
    fit(tmp_path, accelerator, callback, **rest)
    assert callback.summary.fit.replayed > 0
    assert callback.summary.fit.plain_steps == 0
    assert callback.summary.fit.speedup is None
    assert "your plain step" not in str(callback.summary)
    assert callback.summary.fit.warmed_up == 3


LONG_RUN: dict[str, Any] = {
    "accumulate_grad_batches": 1,
    "num_training_batches": 100,
    "max_epochs": 100,
    "current_epoch": 0,
    "max_steps": -1,
    "global_step": 0,
}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, 10),
        ({"num_training_batches": float("inf")}, 0),
        ({"num_training_batches": float("inf"), "max_steps": 2000}, 4),
        ({"max_epochs": -1}, 10),
        ({"max_epochs": None, "max_steps": 2000}, 4),
        ({"max_epochs": 20}, 4),
        ({"max_epochs": 20, "current_epoch": 6}, 0),
        ({"max_epochs": 20, "current_epoch": 20, "num_training_batches": float("inf")}, 0),
        ({"max_steps": 1500}, 3),
        ({"max_steps": 1500, "global_step": 1}, 0),
        ({"num_training_batches": 13, "max_epochs": 1000}, 0),
        ({"accumulate_grad_batches": 4}, 5),
        ({"measures_plain_steps": False}, 0),
    ],
)
@pytest.mark.usefixtures("fast")
def test_how_many(run: dict[str, Any], expected: int) -> None:
    asked = {"warmup_steps": 3, "measures_plain_steps": True}
    settings: Any = SimpleNamespace(**{name: run.get(name, value) for name, value in asked.items()})
    trainer: Any = SimpleNamespace(**{name: run.get(name, value) for name, value in LONG_RUN.items()})
    backend: Any = None
    steps = baseline.PlainSteps(trainer, backend, settings)
    counts = StepCounts(warmed_up=8)
    taken = 0
    while steps.next(counts, [torch.zeros(3)]) is not Plain.NOT:
        taken += 1
        counts.warmed_up += 1
    assert taken == expected


def test_the_emulator_has_no_speed(tmp_path: Path) -> None:
    callback = CUDAGraphCallback(timings=None)
    fit(tmp_path, "cpu", callback)
    assert callback.summary.fit.warmed_up == 3
    assert callback.summary.fit.speedup is None
    assert callback.summary.fit.replay_ms is not None


class Ragged(Net):
    """Batches of two shapes by turns."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        n = 8 if self.trainer.global_step % 2 else 6
        return x[:n], y[:n]


@pytest.mark.long
@pytest.mark.usefixtures("fast")
def test_steps_of_another_shape_are_no_measure(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(timings=None)
    plain = fit(tmp_path / "plain", accelerator, None, build=Ragged)
    graph = fit(tmp_path / "graph", accelerator, callback, build=Ragged)
    assert_same(plain, graph)
    assert callback.summary.fit.replayed > 0
    assert callback.summary.fit.plain_steps == 0


@pytest.mark.usefixtures("fast")
def test_a_step_that_no_graph_can_hold(tmp_path: Path, accelerator: str) -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            result = super().training_step(batch, batch_idx)
            self.seen = result["loss"].detach().item()
            return result

    callback = CUDAGraphCallback(timings=None, on_unsupported="eager")
    plain = fit(tmp_path / "plain", accelerator, None, build=Reads)
    graph = fit(tmp_path / "graph", accelerator, callback, build=Reads)
    assert_same(plain, graph)
    assert callback.summary.fit.replayed == 0
    assert callback.summary.fit.steps == 30
    assert callback.summary.fit.speedup is None


class Clock:
    """Seconds that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(step_time_module, "perf_counter", lambda: self.now_s)

    def tick(self, pace: StepTime, after_ms: float, *args: Any) -> None:
        self.now_s += after_ms / 1e3
        pace.tick(*args)


def measured(monkeypatch: pytest.MonkeyPatch) -> tuple[StepTime, Clock]:
    """A pace behind a row of three plain steps of 1, 2 and 6 ms, but for the last of them."""
    pace, clock = StepTime(), Clock(monkeypatch)
    clock.tick(pace, 50.0, Phase.WARMING)
    clock.tick(pace, 1.0, Phase.WARMING, Plain.ONE)
    clock.tick(pace, 2.0, Phase.WARMING, Plain.ONE)
    return pace, clock


def test_the_pace_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, clock = measured(monkeypatch)
    assert (pace.plain_ms, pace.plain_steps) == (None, 0)
    clock.tick(pace, 6.0, Phase.WARMING, Plain.LAST)
    clock.tick(pace, 40.0, Phase.WARMING)
    clock.tick(pace, 70.0, Phase.CAPTURED)
    for after_ms in (1.0, 2.0):
        clock.tick(pace, after_ms, Phase.CAPTURED)
    pace.pause()
    clock.tick(pace, 30.0, Phase.CAPTURED)
    assert pace.plain_ms == pytest.approx(3.0)
    assert pace.plain_steps == 3
    assert pace.replayed_ms == pytest.approx(1.5)


@pytest.mark.parametrize("between", ["pause", "another step"])
def test_a_row_that_is_broken_is_no_measure(monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    pace, clock = measured(monkeypatch)
    if between == "pause":
        pace.pause()
    else:
        clock.tick(pace, 3.0, Phase.EAGER)
    clock.tick(pace, 6.0, Phase.WARMING, Plain.LAST)
    assert (pace.plain_ms, pace.plain_steps) == (None, 0)


def test_one_wait_for_the_device_in_a_row(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    """Waits in each step would make plain steps slower than they are."""
    waits: list[Plain] = []
    plainly = TrainingSteps._plainly

    def noting(self: Any, plain: Plain, *args: Any) -> Any:
        backend = self._run.backend
        with pytest.MonkeyPatch.context() as patch:
            synchronize = backend.synchronize
            patch.setattr(backend, "synchronize", lambda: (waits.append(plain), synchronize()))
            return plainly(self, plain, *args)

    monkeypatch.setattr(TrainingSteps, "_plainly", noting)
    fit(tmp_path, accelerator, CUDAGraphCallback(timings=None))
    assert waits == [Plain.LAST]
