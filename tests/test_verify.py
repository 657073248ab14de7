"""Replays are held against eager steps, and what was baked in without anybody noticing is caught."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cudagraph import (
    ConfigurationError,
    CUDAGraphCallback,
    GraphedStep,
    Verification,
    VerificationError,
)
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.checks.verify import verifier as verifier_module
from lightning_cudagraph.checks.verify.compare import distance, names_that_differ, rounding
from lightning_cudagraph.checks.verify.tape import TapeDifference
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.errors import Location, StaleGraphError
from lightning_cudagraph.optim.host_arithmetic.staged_numbers import Stage
from lightning_cudagraph.tensors.batch import OF_THE_HOST
from tests.harness import Net, assert_same, differences, fused_adamw, make, train

# As it was before tests/conftest.py replaces it.
_IS_AFFORDABLE = Verifier._is_affordable

# What the numbers of a check say by themselves; names come from elsewhere (tests/test_walker.py).
pytestmark = pytest.mark.usefixtures("only_numbers_are_checked")

EPSILON = torch.finfo(torch.float32).eps


SCALE = "SCALE_OF_A_TEST"  # a variable of the environment: no guard looks there


@pytest.fixture(autouse=True)
def scale_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCALE, "1.0")


def _scale() -> float:
    return float(os.environ[SCALE])


class ReadsAGlobal(Net):
    """The scale changes before step `changes_at`."""

    changes_at = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * _scale()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        os.environ[SCALE] = "1.0" if self.global_step < self.changes_at else "3.0"


class ReadsAGlobalLate(ReadsAGlobal):
    changes_at = 12


def test_a_frozen_global_is_caught(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(VerificationError, match=r"(?s)first in the loss, expected .*, found") as caught:
        train(make(ReadsAGlobal), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    assert 'on_unsupported="eager"' in str(caught.value)
    plain = train(make(ReadsAGlobal), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(ReadsAGlobal), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert eager.counts.replayed == 1
    assert "comes to other numbers than the eager step" in next(iter(eager.counts.eager))


class CountsItsCalls(Net):
    """Each capture of the step bakes in another number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.calls += 1
        result["loss"] = result["loss"] * self.calls
        return result


@pytest.mark.long
def test_captures_that_take_turns_are_not_taken_for_unsteady_kernels(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check replays one capture twice, and not two of them with numbers of their own."""
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", CudaBackend.graphs_per_step)
    callback = CUDAGraphCallback(harmless=["calls"])
    train(make(CountsItsCalls), tmp_path, callback, accelerator=accelerator, raises=VerificationError)


def test_the_state_is_that_before_the_step(tmp_path: Path, accelerator: str) -> None:
    module = make(ReadsAGlobal)
    with pytest.raises(VerificationError):
        train(module, tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = make(ReadsAGlobal)
    train(plain, tmp_path / "plain", accelerator=accelerator, max_steps=4, max_epochs=-1)
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), module.state_dict()[name].cpu()), name


@pytest.mark.long
def test_without_verification_it_would_train_wrong(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(ReadsAGlobal), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(verify=None)
    graph = train(make(ReadsAGlobal), tmp_path / "graph", callback, accelerator=accelerator)
    assert differences(plain.final["weights"], graph.final["weights"])


@pytest.mark.long
def test_a_late_change_is_caught_by_the_cautious(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "pause", lambda self: None)
    plain = train(make(ReadsAGlobalLate), tmp_path / "plain", accelerator=accelerator)
    missed = train(make(ReadsAGlobalLate), tmp_path / "b", CUDAGraphCallback(), accelerator=accelerator)
    assert differences(plain.final["weights"], missed.final["weights"])
    cautious = CUDAGraphCallback(verify=Verification(every_n_steps=1))
    with pytest.raises(VerificationError):
        train(make(ReadsAGlobalLate), tmp_path / "caught", cautious, accelerator=accelerator)


def test_checks_change_nothing(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(verify=Verification(every_n_steps=2))
    graph = train(make(Net), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert "11 replay(s) verified against eager steps" in str(callback.summary)


@pytest.mark.long
def test_a_single_check_is_on_another_batch_than_the_capture(tmp_path: Path, accelerator: str) -> None:
    """The scale changes before the first replay that has a new batch."""
    caught = CUDAGraphCallback(verify=Verification(replays=1))
    with pytest.raises(VerificationError):
        train(make(ReadsAGlobal), tmp_path / "caught", caught, accelerator=accelerator)
    callback = CUDAGraphCallback(verify=Verification(replays=1))
    train(make(Net), tmp_path / "fine", callback, accelerator=accelerator)
    # Before the first replay and at the starts of epochs there are pauses.
    assert "5 replay(s) verified against eager steps" in str(callback.summary)
    verifier = Verifier(EmulatorBackend(), Verification(replays=1, every_n_steps=4))
    graph = _Graph()
    assert [verifier.due(graph, replay_idx) for replay_idx in range(9)] == [
        replay_idx in (0, 1, 4, 8) for replay_idx in range(9)
    ]


class PerEpoch(Net):
    """The learning rate moves at the end of each epoch, long after the first two replays."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


def _freeze_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of this package: the learning rate is brought to the graph in the first epoch only."""
    original = Stage.fill

    def fill(self: Stage, rows: list[tuple[float, float, float]]) -> None:
        if abs(rows[0][0]) > 5e-3:
            original(self, rows)

    monkeypatch.setattr(Stage, "fill", fill)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


@pytest.mark.spread(2)
@pytest.mark.parametrize("make_optimizer", [fused_adamw, _sgd])
def test_a_learning_rate_that_moves_late_gets_a_check(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    make_optimizer: Any,
) -> None:
    def build() -> PerEpoch:
        return PerEpoch(make_optimizer)

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    graph = train(make(build), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert "5 replay(s) verified against eager steps" in str(callback.summary)
    _freeze_rate(monkeypatch)
    with pytest.raises(VerificationError, match="first in parameter `") as caught:
        train(make(build), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    assert 'scope="forward_backward"' in str(caught.value)
    wrong = train(
        make(build), tmp_path / "wrong", CUDAGraphCallback(verify=None), accelerator=accelerator
    )
    assert differences(plain.final["weights"], wrong.final["weights"])


@pytest.mark.long
def test_a_learning_rate_that_moves_at_once_needs_no_check_more(
    tmp_path: Path, accelerator: str
) -> None:
    callback = CUDAGraphCallback()
    train(make(Net), tmp_path, callback, accelerator=accelerator)
    # The first two, and one after each of three pauses.
    assert "5 replay(s) verified against eager steps" in str(callback.summary)


class _Scaled(torch.autograd.Function):
    """Scales the gradient by what an object says at that time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * _scale()


class ReadsInBackward(ReadsAGlobal):
    """The scale is that of the gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return _Scaled.apply(Net.training_step(self, batch, batch_idx)["loss"])


class ReadsForABuffer(ReadsAGlobal):
    """The scale goes into a running mean that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = Net.training_step(self, batch, batch_idx)
        self.running.add_(outputs["logits"].mean(0), alpha=_scale())
        return outputs


class ReadsForAnOutput(ReadsAGlobal):
    """The scale is in a tensor that is returned beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = Net.training_step(self, batch, batch_idx)
        return {"loss": outputs["loss"], "seen": [outputs["logits"].detach() * _scale()]}


class ReturnsANumber(ReadsAGlobal):
    """The scale is returned beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": Net.training_step(self, batch, batch_idx)["loss"], "scale": _scale()}


@pytest.mark.spread
@pytest.mark.parametrize(
    ("module", "scope", "message"),
    [
        (ReadsAGlobal, "auto", r"first in the loss, .*The step, a hook or the optimizer reads"),
        (ReadsForAnOutput, "auto", r"first in the output of `training_step`\['seen'\]\[0\], "),
        (
            ReturnsANumber,
            "auto",
            r"first in the output of `training_step`\['scale'\], a number, expected 3, found 1",
        ),
        (ReadsInBackward, "auto", "first in `exp_avg` "),
        (ReadsInBackward, "forward_backward", "first in the gradient of `"),
        (ReadsForABuffer, "auto", r"first in buffer `running`.*\(1 of "),
    ],
)
def test_the_first_tensor_that_differs(
    tmp_path: Path, accelerator: str, module: Any, scope: Any, message: str
) -> None:
    with pytest.raises(VerificationError, match=f"(?s){message}"):
        train(make(module), tmp_path, CUDAGraphCallback(scope=scope), accelerator=accelerator)


def _small_device(monkeypatch: pytest.MonkeyPatch, device_bytes: int, host_bytes: int) -> list[str]:
    """Let device and host have so much memory; returns where copies of tensors are made."""
    for backend in (EmulatorBackend, CudaBackend):
        monkeypatch.setattr(backend, "free_bytes", lambda self: device_bytes)
        monkeypatch.setattr(backend, "largest_graph_bytes", lambda self: 1000)
    monkeypatch.setattr(verifier_module, "host_free_bytes", lambda: host_bytes)
    parked: list[str] = []
    on_host = verifier_module.on_host

    def spy(tensor: Tensor) -> Tensor:
        parked.append("cpu")
        return on_host(tensor)

    monkeypatch.setattr(verifier_module, "on_host", spy)
    return parked


@pytest.mark.long
def test_copies_are_parked_on_the_host(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    parked = _small_device(monkeypatch, device_bytes=10_000, host_bytes=10**9)
    callback = CUDAGraphCallback()
    graph = train(make(Net), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert "5 replay(s) verified against eager steps" in str(callback.summary)
    assert "not verified" not in str(callback.summary)
    assert set(parked) == {"cpu"}
    with pytest.raises(VerificationError, match="first in the loss"):
        train(make(ReadsAGlobal), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)


@pytest.mark.parametrize(("device_bytes", "host_bytes"), [(10_000, 0), (1000, 10**9)])
def test_without_memory_nothing_is_verified(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    device_bytes: int,
    host_bytes: int,
) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    parked = _small_device(monkeypatch, device_bytes, host_bytes)
    callback = CUDAGraphCallback()
    graph = train(make(Net), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert "0 replay(s) verified against eager steps" in str(callback.summary)
    assert str(callback.summary).count("not verified: a check needs") == 1
    assert not parked


def test_a_check_that_runs_out_of_memory_lets_training_go_on(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    run_eagerly = CapturedStep.run_eagerly
    tried: list[bool] = []

    def runs_out(self: Any, step: Any) -> Any:
        tried.append(True)
        run_eagerly(self, step)  # the state has moved
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")

    monkeypatch.setattr(CapturedStep, "run_eagerly", runs_out)
    callback = CUDAGraphCallback()
    graph = train(make(Net), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert len(tried) == 1
    assert graph.counts.replayed == 18
    assert (
        "not verified: a check ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)"
        in str(callback.summary)
    )


class _Graph:
    """Stands for a captured step."""


def test_what_is_checked_after_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always after the first three, later and at growing distances within the budget."""
    monkeypatch.setattr(Verifier, "_is_affordable", _IS_AFFORDABLE)
    verifier = Verifier(EmulatorBackend(), Verification(budget=0.5))
    graph = _Graph()
    value = {"x": torch.zeros(1)}

    def check() -> None:
        verifier.check(graph, {}, lambda: value, lambda: (None, value))

    assert not verifier.due(graph, 10)
    for _ in range(3):
        verifier.pause()
        assert verifier.due(graph, 10)
        check()
        assert not verifier.due(graph, 10)
    verifier._spent_s = 1e9
    verifier.pause()
    assert not verifier.due(graph, 10)
    assert not verifier.due(graph, 64)
    verifier._spent_s, verifier._longest_s = 0.0, 0.0
    assert verifier.due(graph, 64)
    check()
    verifier._spent_s, verifier._longest_s = 0.0, 0.0
    assert [n for n in (65, 255, 256) if verifier.due(graph, n)] == [256]
    silent = Verifier(EmulatorBackend(), Verification(replays=0, budget=0.5))
    silent.pause()
    assert not silent.due(graph, 64)


class _Jittering:
    """A step that differs from run to run, eagerly and in replays."""

    def __init__(self, jitter: float, of_replays: float | None = None) -> None:
        self.weight = torch.ones(4)
        self.jitter = jitter
        self.of_replays = jitter if of_replays is None else of_replays
        self.runs = 0

    def state(self) -> dict[str, Tensor]:
        return {"parameter `weight`": self.weight}

    def eagerly(self) -> dict[str, Tensor]:
        self.runs += 1
        self.weight.add_(1.0 + self.jitter * self.runs)
        return {"the loss": self.weight.sum()}

    def replay(self, by: float) -> tuple[str, dict[str, Tensor]]:
        self.runs += 1
        self.weight.add_(by + self.of_replays * self.runs)
        return "outputs", {"the loss": self.weight.sum()}


def _verifier(step: Any) -> Verifier:
    return Verifier(EmulatorBackend(), Verification(replays=1))


def test_kernels_that_are_not_deterministic_are_told_from_faults() -> None:
    step = _Jittering(1e-5)
    verifier, graph = _verifier(step), _Graph()
    assert verifier.check(graph, step.state(), step.eagerly, lambda: step.replay(1.0)) == "outputs"
    after = step.weight.clone()
    torch.testing.assert_close(after, torch.full((4,), 2.0 + 3e-5), rtol=0, atol=1e-6)  # the last replay
    assert "two replays from one state differ (first in the loss)" in verifier.notes[0]
    for wrong in (2.0, float("nan"), float("inf")):
        with pytest.raises(VerificationError, match="first in the loss"):
            verifier.check(graph, step.state(), step.eagerly, lambda by=wrong: step.replay(by))  # type: ignore[misc]
        assert torch.equal(step.weight, after)  # as before the step


def test_host_code_that_counts_is_not_taken_for_kernels_that_are_not_deterministic() -> None:
    """Two eager steps differ as well where host code moves on at each of them."""
    step = _Jittering(0.1, of_replays=0.0)
    with pytest.raises(VerificationError, match="first in the loss"):
        _verifier(step).check(_Graph(), step.state(), step.eagerly, lambda: step.replay(1.0))
    assert torch.equal(step.weight, torch.ones(4))


class _Rounding:
    """A step that is deterministic, and whose replay is off by some units in the last place of 1."""

    def __init__(self, update: float = 0.5) -> None:
        self.weight = torch.ones(4)
        self.update = update

    def state(self) -> dict[str, Tensor]:
        return {"parameter `weight`": self.weight}

    def eagerly(self) -> dict[str, Tensor]:
        self.weight.add_(self.update)
        return {"the loss": torch.tensor(1.0)}

    def replay(self, loss_units: float = 0.0, update_by: float = 0.0) -> Any:
        self.weight.add_(self.update + update_by)
        return None, {"the loss": torch.tensor(1.0 + loss_units * EPSILON)}


def test_other_kernels_are_told_from_faults() -> None:
    """Differences in the last place are rounding only if the first check of the graph has them."""
    step = _Rounding()
    verifier, graph = _verifier(step), _Graph()
    verifier.check(graph, step.state(), step.eagerly, lambda: step.replay(loss_units=3.0))
    note = "replays differ from eager steps in the last places, first in the loss: another kernel"
    assert [text.startswith(note) for text in verifier.notes] == [True]
    verifier.check(graph, step.state(), step.eagerly, lambda: step.replay(loss_units=5.0))
    assert verifier.checked == 2
    with pytest.raises(VerificationError, match=r"30 times the precision of torch\.float32 apart"):
        verifier.check(graph, step.state(), step.eagerly, lambda: step.replay(loss_units=30.0))


@pytest.mark.parametrize("output", [lambda loss: loss > 1.0, lambda loss: (loss > 1.0).sum()])
def test_what_the_last_place_decides(output: Any) -> None:
    """A mask or a count may differ with the number that decides it; not so a number of the host's."""

    def check(name: str, replayed_units: float) -> None:
        def with_output(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**outputs, name: output(outputs["the loss"])}

        step = _Rounding()
        _verifier(step).check(
            _Graph(),
            step.state(),
            lambda: with_output(step.eagerly()),
            lambda: (None, with_output(step.replay(loss_units=replayed_units)[1])),
        )

    check("decided", 3.0)
    with pytest.raises(VerificationError):
        check(f"decided{OF_THE_HOST}", 3.0)
    with pytest.raises(VerificationError):
        check("decided", 30.0)


def test_what_is_decided_does_not_differ_by_itself() -> None:
    step = _Rounding()
    masks = iter([torch.tensor(True), *[torch.tensor(False)] * 9])
    with pytest.raises(VerificationError, match="first in a mask, expected True, found False"):
        _verifier(step).check(
            _Graph(),
            step.state(),
            lambda: {**step.eagerly(), "a mask": next(masks)},
            lambda: (None, {**step.replay()[1], "a mask": next(masks)}),
        )


class _Key:
    """Has another name each time it is made."""


class _OddOutputs(Net):
    """What cannot be compared, or has a name of one step, beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return {
            **outputs,
            _Key(): outputs["logits"].mean(),
            "meta": torch.empty(3, device="meta"),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        }


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_outputs_that_cannot_be_compared(tmp_path: Path) -> None:
    callback = CUDAGraphCallback(verify=Verification(every_n_steps=1))
    train(make(_OddOutputs), tmp_path, callback, watched=False)
    assert callback.summary.fit.replayed > 0


class _Replayed:
    """A step whose replays are off by some units in the last place, each by its own.

    Args:
        loss: the units of its loss, replay by replay; the last of them for all that follow.
        other: of another output.
    """

    def __init__(self, loss: list[float], other: float = 0.0) -> None:
        self.step = _Rounding()
        self.loss = loss
        self.other = other
        self.replays = 0

    def eagerly(self) -> dict[str, Tensor]:
        return {**self.step.eagerly(), "other": torch.tensor(1.0)}

    def replay(self) -> Any:
        units = self.loss[min(self.replays, len(self.loss) - 1)]
        self.replays += 1
        _, outputs = self.step.replay(loss_units=units)
        return None, {**outputs, "other": torch.tensor(1.0 + self.other * EPSILON)}

    def checked_by(self, verifier: Verifier, graph: _Graph) -> int:
        """How many replays a check takes."""
        before = self.replays
        verifier.check(graph, self.step.state(), self.eagerly, self.replay)
        return self.replays - before


@pytest.mark.parametrize("seldom", [2, 3, 9, 15])
def test_kernels_that_seldom_differ_are_told_from_faults(seldom: int) -> None:
    """Atomics that seldom meet: the eager step is off in the last place, and one replay of many."""
    verifier, graph = _verifier(None), _Graph()
    assert _Replayed([0.0]).checked_by(verifier, graph) == 1
    seldom_off = _Replayed([1.0] * seldom + [0.0, 1.0])
    # The one that comes to the eager step's numbers is the last: what it leaves behind is right as well.
    assert seldom_off.checked_by(verifier, graph) == seldom + 1
    assert torch.equal(seldom_off.step.weight, torch.full((4,), 1.5))
    assert "two replays from one state differ (first in the loss)" in verifier.notes[0]


def test_sixteen_replays_are_enough() -> None:
    verifier, graph = _verifier(None), _Graph()
    _Replayed([0.0]).checked_by(verifier, graph)
    never_seen = _Replayed([1.0] * 16 + [0.0])
    with pytest.raises(VerificationError, match="as little as other kernels could explain"):
        never_seen.checked_by(verifier, graph)
    assert never_seen.replays == 16


class _EagerOnTape(_Replayed):
    """Eager steps off by other units each, and the ops that the tape sees of those after the first.

    Args:
        eager: the units of the loss, step by step; the last of them for all that follow.
        differs_at: index of the step on the tape that has another op; None for none.
        replays: the units of the replays.
    """

    def __init__(
        self, eager: list[float], differs_at: int | None = None, replays: tuple[float, ...] = (0.0,)
    ) -> None:
        super().__init__([*replays])
        self.units = eager
        self.differs_at = differs_at
        self.traced = self.eager_steps = 0

    def eagerly(self) -> dict[str, Tensor]:
        units = self.units[min(self.eager_steps, len(self.units) - 1)]
        self.eager_steps += 1
        return {**self.step.replay(loss_units=units)[1], "other": torch.tensor(1.0)}

    def trace(self) -> tuple[TapeDifference | None, dict[str, Tensor]]:
        self.traced += 1
        where = Location("step.py", 7, "loss = loss * self.turn")
        other = TapeDifference("`aten.mul` had 1.0", "has 2.0", where, is_value=True)
        return (other if self.traced - 1 == self.differs_at else None), self.eagerly()

    def check(self, checks_before: int = 1) -> list[str]:
        verifier, graph = _verifier(None), _Graph()
        for _ in range(checks_before):
            _Replayed([0.0]).checked_by(verifier, graph)
        verifier.check(graph, self.step.state(), self.eagerly, self.replay, trace=self.trace)
        return verifier.notes


def test_eager_steps_that_take_turns_are_no_excuse_for_replays_that_are_equal() -> None:
    """The tape does not show it: a table of numbers that is another one in every second call."""
    with pytest.raises(VerificationError, match="first in the loss"):
        _EagerOnTape([100.0, 0.0]).check()


def test_eager_steps_that_take_turns_are_no_excuse_for_replays_with_noise() -> None:
    step = _EagerOnTape([1e6, 1.0, 1e6], replays=(0.0, 1.0, 0.0, 2.0))
    with pytest.raises(VerificationError, match="first in the loss"):
        step.check()


@pytest.mark.parametrize("history", [0, 1])
def test_a_step_that_atomics_move_further_than_others(history: int) -> None:
    """The replays differ from each other too, by less than the first eager step from them."""
    step = _EagerOnTape([100.0, 2.0], replays=(0.0, 1.0, 0.0, 2.0))
    assert "two eager steps from one state differ (first in the loss)" in step.check(history)[0]
    assert step.replays == 3
    far = _EagerOnTape([0.0], replays=(100.0, 1.0))
    assert "two replays from one state differ (first in the loss)" in far.check(history)[0]
    with pytest.raises(VerificationError, match="first in the loss"):
        _EagerOnTape([100.0], replays=(0.0, 1.0, 0.0, 2.0)).check(history)


@pytest.mark.parametrize("at", [0, 1, 6])
def test_host_code_that_takes_turns_is_not_taken_for_atomics(at: int) -> None:
    """Some of its eager steps have the numbers of the replay; the tape shows why others do not."""
    with pytest.raises(
        StaleGraphError, match=r"had 1.0 in the captured step, has 2.0 now at .*step.py:7"
    ):
        _EagerOnTape([100.0, 1.0], differs_at=at, replays=(0.0, 1.0)).check()


@pytest.mark.parametrize("seldom", [1, 5, 14])
def test_a_drift_does_not_hide_in_what_differs_elsewhere(seldom: int) -> None:
    verifier, graph = _verifier(None), _Graph()
    _Replayed([0.0]).checked_by(verifier, graph)
    with pytest.raises(VerificationError, match=r"first in (the loss|other)"):
        _Replayed([0.0] * seldom + [1.0, 0.0], other=3.0).checked_by(verifier, graph)


def test_other_kernels_take_no_more_replays_than_before() -> None:
    """Also where they differ from one another in a few of the replays."""
    verifier, graph = _verifier(None), _Graph()
    other_kernel = _Replayed([1.0] * 8 + [2.0, 1.0])
    assert [other_kernel.checked_by(verifier, graph) for _ in range(6)] == [2] * 6


class _OfAll:
    """An agreement of threads in the place of processes."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.told: list[Any] = [None] * size

    def of(self, rank: int) -> Any:
        def tell(mine: Any) -> list[Any]:
            self.told[rank] = mine
            self.barrier.wait()
            told = list(self.told)
            self.barrier.wait()
            return told

        return SimpleNamespace(gather=tell)


class _ByThreads(EmulatorBackend):
    """Threads share their random numbers, processes do not."""

    def rng_state(self) -> Tensor:
        return torch.zeros(1)

    def set_rng_state(self, state: Tensor) -> None:
        pass


@pytest.mark.parametrize("early", [0.0, 2.0], ids=["as eagerly", "in another way"])
def test_processes_wait_for_one_another_and_keep_what_they_have_seen(early: float) -> None:
    """The replays of one differ at once, those of the other seldom."""
    together = _OfAll(2)
    units = [[1.0, early, 1.0], [1.0] * 8 + [0.0, 1.0]]
    found: list[Any] = [None, None]

    def check(rank: int) -> None:
        verifier, graph = _verifier(None), _Graph()
        verifier.backend, verifier.agreement = _ByThreads(), together.of(rank)
        try:
            _Replayed([0.0]).checked_by(verifier, graph)
            found[rank] = _Replayed(units[rank]).checked_by(verifier, graph)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=check, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [9, 9]


def test_what_is_far_off_is_not_replayed_over_and_over() -> None:
    step = _Rounding()
    verifier, graph = _verifier(step), _Graph()
    verifier.check(graph, step.state(), step.eagerly, step.replay)
    replays = 0

    def replay() -> Any:
        nonlocal replays
        replays += 1
        return step.replay(loss_units=100.0)

    with pytest.raises(VerificationError, match="first in the loss"):
        verifier.check(graph, step.state(), step.eagerly, replay)
    assert replays == 2


def test_a_value_that_drifts_is_no_rounding() -> None:
    step = _Rounding()
    verifier, graph = _verifier(step), _Graph()
    verifier.check(graph, step.state(), step.eagerly, step.replay)
    before = step.weight.clone()
    with pytest.raises(VerificationError, match="as little as other kernels could explain"):
        verifier.check(graph, step.state(), step.eagerly, lambda: step.replay(loss_units=1.0))
    assert torch.equal(step.weight, before)
    # A graph captured anew starts anew.
    verifier.check(_Graph(), step.state(), step.eagerly, lambda: step.replay(loss_units=1.0))


def test_a_wrong_update_does_not_hide_in_the_rounding_of_the_weights() -> None:
    """Ten percent of an update of 1e-5 is less than rounding may do to a weight of 1."""
    step = _Rounding(update=1e-5)
    with pytest.raises(VerificationError, match="first in parameter `weight`"):
        _verifier(step).check(_Graph(), step.state(), step.eagerly, lambda: step.replay(update_by=1e-6))


def test_a_difference_in_random_state_is_a_fault() -> None:
    step = _Jittering(0.0)

    def draws() -> Any:
        torch.rand(1)
        return step.replay(1.0)

    rng = torch.get_rng_state()
    with pytest.raises(VerificationError, match=r"(?s)All values are the same, .*other random numbers"):
        _verifier(step).check(_Graph(), step.state(), step.eagerly, draws)
    assert torch.equal(torch.get_rng_state(), rng)


class _TwoGenerators(EmulatorBackend):
    """Has a state that is not that of one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.zeros(2, 3, dtype=torch.int64)

    def rng_state(self) -> Tensor:
        return self.states.clone()

    def set_rng_state(self, state: Tensor) -> None:
        self.states.copy_(state)


def test_random_state_is_the_backends_own_affair() -> None:
    step, backend = _Jittering(0.0), _TwoGenerators()
    verifier = Verifier(backend, Verification())

    def eagerly() -> dict[str, Tensor]:
        backend.states[1].add_(1)
        return step.eagerly()

    def replay(by: int) -> Any:
        backend.states[1].add_(by)
        return step.replay(1.0)

    verifier.check(_Graph(), step.state(), eagerly, lambda: replay(1))
    assert backend.states.tolist() == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(VerificationError, match="other random numbers"):
        verifier.check(_Graph(), step.state(), eagerly, lambda: replay(2))
    assert backend.states.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_other_logged_names_are_a_fault() -> None:
    step = _Jittering(0.0)

    def replay() -> Any:
        result, outputs = step.replay(1.0)
        return result, {**outputs, "a log": torch.zeros(())}

    with pytest.raises(VerificationError, match=r"only in the captured step a log"):
        _verifier(step).check(_Graph(), step.state(), step.eagerly, replay)
    assert torch.equal(step.weight, torch.ones(4))


def test_a_check_that_fails_halfway_leaves_no_trace() -> None:
    step = _Jittering(0.0)

    def fails() -> dict[str, Tensor]:
        step.eagerly()
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        _verifier(step).check(_Graph(), step.state(), fails, lambda: step.replay(1.0))
    assert torch.equal(step.weight, torch.ones(4))


@pytest.mark.parametrize("when", ["the first copies", "the eager step"])
def test_memory_may_run_out_anywhere(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    step = _Jittering(0.0)
    verifier, graph = _verifier(step), _Graph()
    verifier.asked = Verification(replays=5)

    def eagerly() -> dict[str, Tensor]:
        outputs = step.eagerly()
        if when == "the eager step":
            raise torch.OutOfMemoryError("no more")
        return outputs

    def no_copies(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    if when == "the first copies":
        monkeypatch.setattr(verifier_module, "_copied", no_copies)
    assert verifier.due(graph, 0)
    assert verifier.check(graph, step.state(), eagerly, lambda: step.replay(1.0)) == "outputs"
    assert torch.equal(step.weight, torch.full((4,), 2.0))
    assert verifier.notes == ["not verified: a check ran out of memory (no more)"]
    assert verifier.checked == 0
    assert not verifier.due(graph, 1)


def _values() -> dict[str, Tensor]:
    return {
        "float": torch.tensor([1.0, float("nan"), float("inf"), 0.0]),
        "long": torch.tensor([1, 2, 3]),
        "half": torch.tensor([1.0, 2.0], dtype=torch.float16),
        "brain": torch.tensor([1.0, float("-inf")], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor(True),
        "complex": torch.tensor([1 + 2j]),
        "half complex": torch.tensor([1 + 2j], dtype=torch.complex32),
        "tiny": torch.tensor([1e-45, 0.0]),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "strided": torch.ones(4, 4)[:, ::2],
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_differs_is_found_whatever_it_is() -> None:
    assert names_that_differ(_values(), _values()) == []
    changes: dict[str, Any] = {
        "float": torch.tensor([1.0, 1.0, float("inf"), 0.0]),
        "long": torch.tensor([1, 2, 4]),
        "half": torch.tensor([1.0, 2.001], dtype=torch.float16),
        "brain": torch.tensor([1.0, float("inf")], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor(False),
        "complex": torch.tensor([1 + 3j]),
        "half complex": torch.tensor([1 + 3j], dtype=torch.complex32),
        "tiny": torch.tensor([2.8e-45, 0.0]),
        "scalar": torch.tensor(2.0, dtype=torch.float32),
        "strided": torch.full((4, 2), 1.0 + EPSILON),
    }
    for name, changed in changes.items():
        assert names_that_differ(_values(), {**_values(), name: changed}) == [name]
    assert names_that_differ(_values(), changes) == list(changes)


def test_distance_and_rounding() -> None:
    inf, nan = float("inf"), float("nan")
    assert distance(torch.tensor([1.0, nan, inf]), torch.tensor([1.5, nan, inf])) == 0.5
    assert distance(torch.tensor([1.0, nan]), torch.tensor([1.0, 1.0])) != 0.0
    assert distance(torch.tensor([inf]), torch.tensor([1.0])) == inf
    assert distance(torch.tensor([2**62 + 1]), torch.tensor([2**62])) == 1.0
    assert distance(torch.tensor([True]), torch.tensor([True])) == 0.0
    assert rounding(torch.tensor([3, 4])) == 0.0
    assert rounding(torch.tensor([-2.0, 1.0])) == 32 * EPSILON
    assert rounding(torch.tensor([1.0], dtype=torch.bfloat16)) == 0.01
    assert rounding(torch.tensor([1.0]), torch.tensor([1.0])) == EPSILON


@pytest.mark.parametrize(
    "kwargs",
    [
        {"replays": -1},
        {"replays": "2"},
        {"replays": True},
        {"every_n_steps": 0},
        {"every_n_steps": 1.0},
    ],
)
def test_bad_arguments(kwargs: dict[str, Any]) -> None:
    ((name, value),) = kwargs.items()
    with pytest.raises(
        ConfigurationError, match=rf"`Verification\({name}={value!r}\)`: expected an int"
    ):
        Verification(**kwargs)


@pytest.mark.parametrize("value", [0, True, {"replays": 2}])
def test_what_is_no_verification(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`CUDAGraphCallback\(verify=.*a `Verification`"):
        CUDAGraphCallback(verify=value)
    with pytest.raises(ConfigurationError, match=r"`GraphedStep\(verify=.*a `Verification`"):
        GraphedStep(torch.sin, verify=value)


@pytest.mark.parametrize("budget", [2, -0.1, True, "1 %", None])
def test_bad_budgets(budget: Any) -> None:
    with pytest.raises(ConfigurationError, match="a number from 0 to 1"):
        Verification(budget=budget)


@pytest.mark.parametrize(("budget", "checks"), [(0.0, 2), (1.0, 4)])
def test_the_budget_bounds_later_checks(
    budget: float, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "_is_affordable", _IS_AFFORDABLE)
    net = torch.nn.Linear(4, 4)
    with GraphedStep(net.forward, net, verify=Verification(budget=budget)) as graphed:
        for _ in range(300):  # replays 64 and 256 are checked, without a pause
            graphed(torch.ones(2, 4))
        assert f"{checks} replay(s) verified" in str(graphed.summary)
