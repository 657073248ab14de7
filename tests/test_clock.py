"""Which steps are timed, what lies between them, and that a run is the same with and without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from lightning_cudagraph.capture.graph import CaptureInstance
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph, HostEvent
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter
from lightning_cudagraph.trainer.training.times import timing_rate
from tests.harness import Net, Trace, assert_same, loader, make, train

INNER = ("step_ms/forward", "layer_forward_ms/head", "layer_backward_ms/features")
# On a GPU two graphs with events take turns; the emulator has the same, if asked.
both_turns = pytest.mark.parametrize("takes", [1, 2])


def events(folder: Path) -> EventAccumulator:
    file = next(folder.rglob("events.out.tfevents*"))
    accumulator = EventAccumulator(str(file.parent), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def steps(accumulator: EventAccumulator, tag: str) -> list[int]:
    return [scalar.step for scalar in accumulator.Scalars(f"~{tag}")]


def graph(n: int, **kwargs: Any) -> CUDAGraphCallback:
    return CUDAGraphCallback(timings=LayerTimings(every_n_steps=n), **kwargs)


def run(folder: Path, accelerator: str, callback: CUDAGraphCallback | None, **kwargs: Any) -> Trace:
    return train(
        make(Net),
        folder,
        callback,
        accelerator=accelerator,
        train_loader=loader(ragged=False, batches=8),
        logger=TensorBoardLogger(folder),
        **kwargs,
    )


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """What the sinks were given."""
    found: list[Reading] = []
    add = TensorBoardWriter.add

    def noting(self: TensorBoardWriter, reading: Reading) -> None:
        found.append(reading)
        add(self, reading)

    monkeypatch.setattr(TensorBoardWriter, "add", noting)
    return found


@pytest.mark.spread(3, first=1)
@both_turns
@pytest.mark.parametrize("n", [1, 3, 50])
def test_just_the_steps_that_are_due(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, n: int, takes: int
) -> None:
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", takes)
    trace = run(tmp_path, accelerator, graph(n), max_epochs=7)
    assert trace.counts.captures == 1
    assert trace.counts.replayed == 53
    accumulator = events(tmp_path)
    for tag in (*INNER, "step_ms/total"):
        assert steps(accumulator, tag) == [step for step in range(3, 56) if step % n == n - 1]


@pytest.mark.long
@both_turns
@pytest.mark.parametrize("n", [1, 2])
def test_all_batches_of_a_step_that_is_due(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, n: int, takes: int
) -> None:
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", takes)
    run(tmp_path, accelerator, graph(n), max_epochs=8, accumulate_grad_batches=4)
    accumulator = events(tmp_path)
    # Two steps an epoch, of four batches each. The places of a window are warmed up one by one: those in
    # the middle in its first two steps, the others in its first three.
    expected = [step for step in range(16) if step % n == n - 1]
    totals = steps(accumulator, "step_ms/total")
    assert totals == [step for step in expected if step >= 3]
    for tag in INNER:
        found = steps(accumulator, tag)
        assert [found.count(step) for step in expected if step > 3] == [4] * len(
            [step for step in expected if step > 3]
        )
        assert set(found) <= set(expected)


@pytest.mark.spread
@both_turns
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("n", [1, 3, 50])
def test_the_same_run(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    accumulate: int,
    takes: int,
) -> None:
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", takes)
    arguments: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": accumulate,
        "max_epochs": 3 if accumulate == 1 else 8,
        "val_check_interval": 3,
    }
    plain = train(make(Net), tmp_path / "plain", **arguments)
    graphed = train(make(Net), tmp_path / "graph", graph(n), **arguments)
    assert graphed.counts.replayed > 10
    assert_same(plain, graphed)


def test_an_untimed_step_replays_a_graph_without_events(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator != "cpu":
        pytest.skip("looks into the emulator's graphs")
    replayed: list[int] = []
    replay = EmulatedGraph.replay

    def noting(self: EmulatedGraph, *args: Any) -> None:
        replayed.append(sum(isinstance(op, HostEvent) for part in self._parts for op in part))
        replay(self, *args)

    monkeypatch.setattr(EmulatedGraph, "replay", noting)
    trace = run(tmp_path, accelerator, graph(4, verify=None, streams=1))  # no trials of streams
    assert len(replayed) == trace.counts.replayed == 21
    timed = [step for step in range(3, 24) if replayed[step - 3]]
    assert timed == [3, 7, 11, 15, 19, 23]


@pytest.mark.spread
@both_turns
def test_each_capture_is_verified(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    readings: list[Reading],
    takes: int,
) -> None:
    """One with events and one without, in the first replays, and not when a step is first timed."""
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", takes)
    verified: list[tuple[int, bool]] = []
    replay, check = CaptureInstance.replay, Verifier.check

    def noting_replay(self: Any, *args: Any) -> Any:
        verified.append((-1, self.outputs.marks is not None))
        return replay(self, *args)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(verified)
        done = check(self, *args, **kwargs)
        verified[before] = (self.checked, verified[before][1])
        return done

    monkeypatch.setattr(CaptureInstance, "replay", noting_replay)
    monkeypatch.setattr(Verifier, "check", noting)
    callback = graph(8)
    run(tmp_path, accelerator, callback)
    # Steps 3 and 4 are verified, and one after each of three pauses; of those that are timed, 7, 15
    # and 23, none has to be.
    checked = [(number, is_timed) for number, is_timed in verified if number > 0]
    assert checked == [(1, False), (2, True), (3, False), (4, False), (5, False)]
    assert [reading.step for reading in readings] == [7, 15, 23]


@pytest.mark.spread
@pytest.mark.parametrize("n", [1, 3])
def test_gap_and_copy(tmp_path: Path, accelerator: str, readings: list[Reading], n: int) -> None:
    trace = run(tmp_path, accelerator, graph(n), checkpoint_every=0)
    assert trace.counts.replayed == 21
    due = [step for step in range(3, 24) if step % n == n - 1]
    assert [reading.step for reading in readings] == due
    # The first two replays, the first of the timed graph and the first of an epoch are verified: an
    # eager step comes before.
    verified = {3, 4} if n == 1 else {3}
    first_of_epoch = {8, 16}
    for reading in readings:
        times_ms = dict(zip(reading.layout.tags, reading.durations_ms.tolist(), strict=True))
        assert all(math.isfinite(value_ms) and value_ms >= 0 for value_ms in times_ms.values())
        assert ("step_ms/copy" in times_ms) == (reading.step not in verified | first_of_epoch)
        assert ("step_ms/gap" in times_ms) == (reading.step not in verified | first_of_epoch)
        if "step_ms/gap" in times_ms:
            span = next(span for span in reading.layout.spans if span.tag == "step_ms/copy")
            before = reading.offsets_ms[-1 - 2 * len(span.calls) :]
            assert before == sorted(before)
            assert before[-1] <= 0
            assert times_ms["step_ms/gap"] + times_ms["step_ms/copy"] == pytest.approx(-before[0])
    assert len({id(reading.layout) for reading in readings}) <= 6
    accumulator = events(tmp_path)
    expected = [step for step in due if step not in verified | first_of_epoch]
    assert steps(accumulator, "step_ms/gap") == expected


@pytest.mark.long
def test_gap_when_hooks_see_the_batches(
    tmp_path: Path, accelerator: str, readings: list[Reading]
) -> None:
    """The batch is moved by Lightning, and copied from there: both are the copy."""

    class Seen(Callback):
        def on_train_batch_start(self, *args: Any) -> None: ...

        def on_train_batch_end(self, *args: Any) -> None: ...

    run(tmp_path, accelerator, graph(1), callbacks=(Seen(),), checkpoint_every=0)
    last = readings[-1]
    assert last.step == 23
    span = next(span for span in last.layout.spans if span.tag == "step_ms/copy")
    assert len(span.calls) == 2
    assert "step_ms/gap" in last.layout.tags


def test_scope_behind(tmp_path: Path, accelerator: str, readings: list[Reading]) -> None:
    """With the optimizer behind the graph, the gap begins where the optimizer has ended."""
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    graphed = train(
        make(Net),
        tmp_path / "graph",
        graph(2, scope="forward_backward"),
        accelerator=accelerator,
    )
    assert_same(plain, graphed)
    assert graphed.counts.replayed > 10
    assert {reading.step % 2 for reading in readings} == {1}
    assert any("step_ms/gap" in reading.layout.tags for reading in readings)


def test_the_last_step_is_read(tmp_path: Path, accelerator: str, readings: list[Reading]) -> None:
    run(tmp_path, accelerator, graph(1), limit_train_batches=7, max_epochs=2)
    assert [reading.step for reading in readings] == list(range(3, 14))


def test_an_exception_loses_nothing_that_was_read(
    tmp_path: Path, accelerator: str, readings: list[Reading]
) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                raise ArithmeticError

    run(tmp_path, accelerator, graph(1), callbacks=(Fails(),), raises=ArithmeticError)
    assert [reading.step for reading in readings] == list(range(3, 3 + len(readings)))
    assert len(readings) >= 7
    assert steps(events(tmp_path), "step_ms/total") == [reading.step for reading in readings]


@pytest.mark.long
def test_the_report_says_that_the_host_is_the_bottleneck(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.randn(300, 300).matmul(torch.randn(300, 300)).sum().item()

    def report(every_n_steps: int) -> str:
        callback = graph(every_n_steps)
        run(tmp_path, accelerator, callback, callbacks=(Slow(),), checkpoint_every=0)
        return str(callback.summary)

    for backend in (CudaBackend, EmulatorBackend):
        monkeypatch.setattr(backend, "event_host_us", 1e5)
    told = "events of a timed step take the host about"
    every, sampled = report(1), report(2)
    is_emulated = accelerator == "cpu"
    assert ("the device waits for loggers, hooks or the dataloader" not in every) == is_emulated
    assert (told not in every) == is_emulated
    assert told not in sampled
    assert not (is_emulated and "to know what is gained" in every)


@pytest.fixture
def slow_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that take the host much longer than a step, and a decision after ten steps."""
    for backend in (CudaBackend, EmulatorBackend):
        monkeypatch.setattr(backend, "event_host_us", 1e5)
    monkeypatch.setattr(timing_rate, "_READINGS", 10)
    monkeypatch.setattr(timing_rate, "_SELDOM", 5)


@pytest.mark.long
@both_turns
@pytest.mark.parametrize("accumulate", [1, 4])
def test_fewer_steps_are_timed_where_the_host_bounds_the_run(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    slow_events: None,
    accumulate: int,
    takes: int,
) -> None:
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", takes)
    arguments: dict[str, Any] = {
        "max_epochs": 5 * accumulate,
        "accumulate_grad_batches": accumulate,
    }
    plain = run(tmp_path / "plain", accelerator, None, **arguments)
    graphed = run(tmp_path / "graph", accelerator, CUDAGraphCallback(), **arguments)
    assert_same(plain, graphed)
    counts = graphed.counts
    assert counts.captures == 2 * (1 if accumulate == 1 else 3)  # first, middle and last of a window
    assert counts.replayed == 40 * accumulate - counts.warmed_up
    assert not counts.recaptures
    # As in the plain run otherwise: the first, middle and last of a window are warmed up one by one.
    timed = steps(events(tmp_path / "graph"), "step_ms/total")
    change = next(index for index, step in enumerate(timed) if timed[index + 1] != step + 1)
    assert change >= 9
    assert timed[change + 1 :] == [step for step in range(timed[change] + 1, 40) if step % 5 == 4]
    report = str(graphed.summary)
    assert "one step of the optimizer in 5 is timed; each of the first 10 was" in report


def test_a_rate_that_is_asked_for_stays(tmp_path: Path, accelerator: str, slow_events: None) -> None:
    trace = run(tmp_path, accelerator, graph(1), max_epochs=5)
    assert trace.counts.captures == 1
    assert steps(events(tmp_path), "step_ms/total") == [*range(3, 40)]


def test_steps_that_the_device_bounds_are_all_timed(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, slow_events: None
) -> None:
    monkeypatch.setattr(timing_rate, "_MOST", 1.0)  # no gap is as long as that
    trace = run(tmp_path, accelerator, CUDAGraphCallback(), max_epochs=5)
    assert trace.counts.captures == 1
    assert steps(events(tmp_path), "step_ms/total") == [*range(3, 40)]
