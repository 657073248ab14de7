"""Faults that train wrong without a word in a graph that somebody has written by hand.

For each: how it is caught and what the message says; that the run then is the run without the callback,
bit for bit; and, with the guards off, that it does train wrong, so that the test proves something.
`tests/gpu/test_planted_faults.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.audit.step_audit import StepAudit
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.optim.host_arithmetic.staged_numbers import Stage
from lightning_cudagraph.optim.prepared_optimizer import PreparedOptimizer
from lightning_cudagraph.trainer.common import captured_run
from lightning_cudagraph.trainer.common.step_numbers import StepNumbers
from tests.harness import Net, assert_same, differences, make, train
from tests.optimizers import BranchesOnTheDevice

O = torch.optim  # noqa: E741


class Quiet(Net):
    """Logs nothing, so that a loss can be tampered with."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class ItemInForward(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + loss.item())


class _ItemInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float(gradient.abs().max() > 0)


class ItemInABackwardFunction(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return _ItemInBackward.apply(super().training_step(batch, batch_idx))


class ItemInABackwardHook(Quiet):
    def on_fit_start(self) -> None:
        self.head.weight.register_hook(lambda gradient: gradient * float(gradient.sum() != 0))


class Branches(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss > 1.3:
            loss = loss * 2
        return loss


class Masks(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return losses[losses > 0.5].sum()


class UsesBatchIdx(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class Counts(Quiet):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls = self.calls + 1
        return super().training_step(batch, batch_idx) / self.calls


SCALE = torch.ones(())


class ReassignsAGlobal(Quiet):
    """A global tensor is reassigned by host code, and the graph goes on reading the old one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global SCALE
        if self.global_step in (0, 12):
            SCALE = torch.tensor(1.0 + self.global_step, device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * SCALE


class FreesATensor(Quiet):
    """A tensor that the step reads is freed, and its memory is used for something else."""

    def on_fit_start(self) -> None:
        self.scale = torch.full((64,), 2.0, device=self.device)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 12:
            self.scale = self.scale + 1.0
            self.others = [torch.full((64,), 1e3, device=self.device) for _ in range(8)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale.mean()


class SetsTheLearningRate(Quiet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 1e-2 / (1 + self.global_step)


class SetsTheWeightDecay(Quiet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 20:
            for group in self.trainer.optimizers[0].param_groups:
                group["weight_decay"] = 0.9


class ReplacesAParameter(Quiet):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 12:
            old = self.head.bias
            self.head.bias = nn.Parameter(old.detach() + 1.0)
            optimizer = self.trainer.optimizers[0]
            for group in optimizer.param_groups:
                group["params"] = [self.head.bias if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)
            old.grad = None


class TogglesRequiresGrad(Quiet):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.features[0].weight.requires_grad_(not 10 <= self.global_step < 16)
        if self.global_step == 10:
            self.features[0].weight.grad = None


class FirstGradientInTheCapture(Quiet):
    """The head's bias gets its first gradient, and SGD its momentum, in the very step of the capture."""

    late = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.late = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.features(x)
        bias = self.head.bias if self.late else self.head.bias.detach()
        return nn.functional.cross_entropy(nn.functional.linear(hidden, self.head.weight, bias), y)


@dataclass
class Fault:
    """A fault, and how it is caught.

    Attributes:
        build: makes the module.
        message: of the error, or None where the graph is captured anew.
        recapture: why it is captured anew.
        captures: how often, at the end.
        control: what is switched off for the negative control; none where a graph cannot be made.
    """

    build: Callable[[], Net]
    message: str | None = None
    recapture: str = ""
    captures: int = 2
    control: str = ""


def sgd(parameters: Any) -> O.Optimizer:
    return O.SGD(parameters, lr=0.1, momentum=0.9)


FAULTS: dict[str, Fault] = {
    "item in forward": Fault(
        ItemInForward, r"`float\(tensor\)`.*`return loss \* \(1.0 \+ loss.item\(\)\)`"
    ),
    "item in a backward function": Fault(
        ItemInABackwardFunction, r"test_planted_faults.py:\d+ \(`return gradient \* float"
    ),
    "item in a backward hook": Fault(
        ItemInABackwardHook, r"test_planted_faults.py:\d+ \(`self.head.weight.register_hook\(lambda"
    ),
    "a branch on the loss": Fault(Branches, r"Python branch on a tensor.*\(`if loss > 1.3:`\)"),
    "a boolean mask": Fault(Masks, r"boolean mask.*\(`return losses\[losses > 0.5\].sum\(\)`\)"),
    "batch_idx in the loss": Fault(
        UsesBatchIdx, r"`batch_idx`.*test_planted_faults.py:\d+.*1 \+ batch_idx", control="index"
    ),
    "a counter on self": Fault(Counts, r"`calls` of the `Counts`", control="audit"),
    "a global tensor reassigned": Fault(
        ReassignsAGlobal, recapture="`SCALE` of `tests.test_planted_faults`", control="guards"
    ),
    "a tensor freed after the capture": Fault(
        FreesATensor, recapture="`scale` of the `FreesATensor`", control="guards"
    ),
    "the learning rate set by hand": Fault(SetsTheLearningRate, captures=1, control="mirror"),
    "the weight decay changed": Fault(
        SetsTheWeightDecay, recapture="`weight_decay` of param group 0 changed", control="guards"
    ),
    "a parameter replaced": Fault(
        ReplacesAParameter, recapture="the parameter `head.bias` changed", control="guards"
    ),
    "requires_grad toggled": Fault(
        TogglesRequiresGrad,
        recapture="`requires_grad` of parameter `features.0.weight` changed",
        captures=3,
        control="guards",
    ),
    "SGD captured on its first step": Fault(
        lambda: FirstGradientInTheCapture(sgd), r"makes state in this step", control="state"
    ),
}


@contextmanager
def _no_audit(*args: Any, **kwargs: Any) -> Iterator[StepAudit]:
    yield StepAudit(nn.Module(), torch.device("cpu"), HostRules())


def _switch_off(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "guards":
        monkeypatch.setattr(Guards, "changed", lambda self: None)
    elif what == "audit":
        monkeypatch.setattr(captured_run, "step_audit", _no_audit)
        monkeypatch.setattr(Effects, "refused", lambda *args: nullcontext())
    elif what == "index":
        monkeypatch.setattr(StepNumbers, "noted", lambda self, reads, batch_idx: 3)
    elif what == "mirror":
        fill, filled = Stage.fill, []

        def for_a_while(self: Stage, rows: list[tuple[float, float, float]]) -> None:
            if len(filled) < 3:
                fill(self, rows)
            filled.append(True)

        monkeypatch.setattr(Stage, "fill", for_a_while)
    else:
        monkeypatch.setattr(PreparedOptimizer, "addresses", lambda self: {})
        monkeypatch.setattr(captured_run, "step_audit", _no_audit)


KWARGS: dict[str, Any] = {"logger": False, "max_epochs": 4}


@pytest.mark.spread
@pytest.mark.parametrize("name", FAULTS)
def test_caught(tmp_path: Path, accelerator: str, name: str) -> None:
    fault = FAULTS[name]
    kwargs = {**KWARGS, "accelerator": accelerator}
    plain = train(make(fault.build), tmp_path / "plain", **kwargs)
    if fault.message is None:
        callback = CUDAGraphCallback()
        graph = train(make(fault.build), tmp_path / "graph", callback, **kwargs)
        assert graph.counts.captures == fault.captures
        if fault.recapture:
            assert fault.recapture in graph.counts.recaptures[0]
            assert fault.recapture in str(callback.summary)
    else:
        insists = CUDAGraphCallback(scope="step")
        with pytest.raises(UnsupportedError, match=f"(?s){fault.message}") as caught:
            train(make(fault.build), tmp_path / "raise", insists, **kwargs)
        assert 'on_unsupported="eager"' in str(caught.value)
        callback = CUDAGraphCallback(scope="step", on_unsupported="eager")
        graph = train(make(fault.build), tmp_path / "graph", callback, **kwargs)
        assert graph.counts.captures == 0
    plain.csv = graph.csv = "nothing is logged"
    assert_same(plain, graph)


# By the control: one fault of each is short.
_CONTROLLED = {fault.control: name for name, fault in reversed(FAULTS.items()) if fault.control}


@pytest.mark.spread
@pytest.mark.usefixtures("only_numbers_are_checked")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _CONTROLLED.values() else pytest.mark.long)
        for name, fault in FAULTS.items()
        if fault.control
    ],
)
def test_without_the_guard_it_trains_wrong(
    tmp_path: Path, accelerator: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    kwargs = {**KWARGS, "accelerator": accelerator}
    plain = train(make(fault.build), tmp_path / "plain", **kwargs)
    _switch_off(fault.control, monkeypatch)
    # Trials of streams would make the state that the capture must not find missing.
    callback = CUDAGraphCallback(scope="step", verify=None, streams=1)
    graph = train(make(fault.build), tmp_path / "graph", callback, **kwargs)
    assert graph.counts.captures == 1
    assert graph.counts.replayed >= 10
    assert differences(plain.final["weights"], graph.final["weights"])


def test_item_in_an_optimizer(tmp_path: Path, accelerator: str) -> None:
    def build() -> Net:
        return Quiet(BranchesOnTheDevice)

    callback = CUDAGraphCallback(scope="step")
    with pytest.raises(
        UnsupportedError, match=r"(?s)reads from the device.*optimizers.py:\d+ \(`if p.grad"
    ):
        train(make(build), tmp_path, callback, accelerator=accelerator, **KWARGS)
