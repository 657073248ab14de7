"""Gradients that user code gives other memory between two steps (`p.grad.data = ...`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_cudagraph import CUDAGraphCallback, CUDAGraphError, GraphedStep
from lightning_cudagraph.capture.gradients import external_references
from lightning_cudagraph.capture.gradients.external_references import ExternalReferences, gradients_of
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.tensors.layouts import Layouts
from tests.harness import Net, assert_same, make, train
from tests.loops import device_of


class Halves(Net):
    """Halves a gradient by hand, late enough to be in replays."""

    def halve(self) -> None:
        if self.trainer.global_step > 4:
            gradient = self.head.bias.grad
            gradient.data = gradient.data * 0.5


class HalvesAfterTheStep(Halves):
    def on_train_batch_end(self, *args: Any) -> None:
        self.halve()


class HalvesBeforeTheOptimizer(Halves):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.halve()


class HalvesAndKeeps(Halves):
    def halve(self) -> None:
        if self.trainer.global_step > 4:
            self.__dict__["raw"] = [parameter.grad.data for parameter in self.parameters()]
        super().halve()


class HalvesAndKeepsAfterTheStep(HalvesAndKeeps):
    def on_train_batch_end(self, *args: Any) -> None:
        self.halve()


class HalvesAndKeepsBeforeTheOptimizer(HalvesAndKeeps):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.halve()


class ZeroesInPlace(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Flat(ZeroesInPlace):
    """The gradients are parts of one tensor, which hooks in the step read and write."""

    def flatten(self) -> None:
        parameters = [*self.parameters()]
        flat = torch.zeros(sum(map(torch.numel, parameters)), device=self.device)
        self.__dict__["flat"] = flat
        for parameter, part in zip(parameters, flat.split([*map(torch.numel, parameters)]), strict=True):
            parameter.grad = part.view_as(parameter)

    def on_train_start(self) -> None:
        self.flatten()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.flat.clamp_(-0.01, 0.01)


class FlatLater(Flat):
    def on_train_start(self) -> None:
        self.__dict__["flat"] = torch.zeros((), device=self.device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 6:
            self.flatten()


class Replaces(ZeroesInPlace):
    """Gives parameters gradients of its own, into which steps write from then on, and reads them."""

    at: tuple[int, ...] = (6,)

    def on_train_start(self) -> None:
        self.__dict__.update(own=[], seen=[])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step in self.at:
            self.own = []
            for parameter in self.parameters():
                parameter.grad = torch.zeros_like(parameter)
                self.own.append(parameter.grad)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(sum(own.sum() for own in self.own))


class ReplacesAgain(Replaces):
    at = (6, 14, 20)


class Swaps(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        first, second = self.features[0].bias, self.features[1].bias
        if self.trainer.global_step > 2 and first.shape == second.shape:
            first.grad, second.grad = second.grad, first.grad


class Shares(Net):
    """A gradient is a part of another one: both are added to."""

    def on_train_batch_end(self, *args: Any) -> None:
        of = self.features[0].bias.grad
        if self.trainer.global_step > 2 and of is not None and self.head.bias.grad is not None:
            self.head.bias.grad = of[: self.head.bias.numel()]


class LaysOut(Net):
    """Gives gradients other strides in every second step, by which their norm has other last bits."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            if (gradient := parameter.grad) is not None and batch_idx % 2 == 0:
                parameter.grad = self.laid_out(gradient)

    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flatten().contiguous() if gradient.ndim < 2 else gradient.mT.contiguous().mT


class LaysOutSome(LaysOut):
    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        is_odd = self.trainer.global_step % 2
        return super().laid_out(gradient) if is_odd else gradient.clone()


class Shifts(LaysOut):
    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(gradient.numel() + 3, device=gradient.device)
        return flat[3:].view_as(gradient).copy_(gradient)


class MainGradients(Net):
    """Running means, which are the gradients too."""

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                if not hasattr(parameter, "main_grad"):
                    parameter.main_grad = parameter.grad.clone()
                parameter.main_grad.lerp_(parameter.grad, 0.1)
                parameter.grad = parameter.main_grad


class HalvesInTheStep(Net):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5


class Keeps(Net):
    """Reads a gradient after the next step, which user code kept for that."""

    def on_train_start(self) -> None:
        self.__dict__.update(was=None, seen=[])

    def on_train_batch_end(self, *args: Any) -> None:
        gradient = self.head.weight.grad
        if self.was is not None:
            self.seen.append(self.read(self.was).clone())
        self.__dict__["was"] = None if gradient is None else self.kept(gradient)


class KeepsSaved(Keeps):
    """Autograd keeps it for a backward pass."""

    def kept(self, gradient: torch.Tensor) -> Any:
        scale = torch.ones((), device=self.device, requires_grad=True)
        return (gradient * scale).sum(), scale

    def read(self, kept: Any) -> torch.Tensor:
        return torch.autograd.grad(*kept)[0]


class KeepsDLPack(Keeps):
    def kept(self, gradient: torch.Tensor) -> Any:
        return torch.from_dlpack(gradient)

    def read(self, kept: Any) -> torch.Tensor:
        return kept.sum()


class KeepsStorage(Keeps):
    def kept(self, gradient: torch.Tensor) -> Any:
        return gradient.untyped_storage()

    def read(self, kept: Any) -> torch.Tensor:
        return torch.empty(0, device=self.device).set_(kept).sum()


ACCUMULATED = {"accumulate_grad_batches": 4, "max_epochs": 6}

RUNS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "accumulated": (HalvesAfterTheStep, ACCUMULATED, {}),
    "eager optimizer": (HalvesBeforeTheOptimizer, {}, {"scope": "forward_backward"}),
    "in the step": (HalvesBeforeTheOptimizer, {}, {}),
    "accumulated, old memory kept": (HalvesAndKeepsAfterTheStep, ACCUMULATED, {}),
    "eager optimizer, old memory kept": (
        HalvesAndKeepsBeforeTheOptimizer,
        {},
        {"scope": "forward_backward"},
    ),
    "parts of one tensor": (Flat, {}, {}),
    "parts of one tensor, accumulated": (Flat, ACCUMULATED, {}),
    "parts of one tensor, later": (FlatLater, {"max_epochs": 3}, {}),
    "replaced": (Replaces, {"max_epochs": 4}, {}),
    "replaced again": (ReplacesAgain, {"max_epochs": 4}, {}),
    "swapped": (Swaps, ACCUMULATED, {}),
    "a part of another": (Shares, ACCUMULATED, {}),
    "other strides": (LaysOut, {**ACCUMULATED, "gradient_clip_val": 0.01}, {}),
    "other strides in some steps": (LaysOutSome, {**ACCUMULATED, "gradient_clip_val": 0.01}, {}),
    "at odd addresses": (Shifts, {**ACCUMULATED, "gradient_clip_val": 0.01}, {}),
    "kept, and the gradient too": (MainGradients, ACCUMULATED, {}),
    "other memory in each step": (HalvesInTheStep, {}, {}),
    "other memory in each step, accumulated": (
        HalvesInTheStep,
        ACCUMULATED,
        {"on_unsupported": "eager"},
    ),
    "kept by autograd": (KeepsSaved, {"max_epochs": 2}, {}),
    "kept by DLPack": (KeepsDLPack, {"max_epochs": 2}, {}),
    "kept by its storage": (KeepsStorage, {"max_epochs": 2}, {}),
}
_EAGER = ("a part of another", "other memory in each step, accumulated")


# Of torch, about gradients with other strides than their parameters.
_LAYOUT_CONTRACT = "ignore:grad and param do not obey:UserWarning"


@pytest.mark.long
@pytest.mark.filterwarnings(_LAYOUT_CONTRACT)
@pytest.mark.parametrize("name", RUNS)
def test_training(tmp_path: Path, accelerator: str, name: str) -> None:
    cls, kwargs, options = RUNS[name]
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator, **kwargs)
    graph = train(
        make(cls), tmp_path / "graph", CUDAGraphCallback(**options), accelerator=accelerator, **kwargs
    )
    assert_same(plain, graph)
    seen = ([*map(float, getattr(run.module, "seen", ()))] for run in (plain, graph))
    assert next(seen) == next(seen)
    assert graph.counts.replayed > 4 or name in _EAGER


@pytest.mark.spread
@pytest.mark.filterwarnings(_LAYOUT_CONTRACT)
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Shares, "gradients that share memory, or have other strides"),
        (LaysOutSome, "or have other strides or alignments than in the capture"),
        (HalvesInTheStep, r"a gradient that it adds to other memory.*_memory\.py:\d+ \(`.*data = "),
    ],
)
def test_reasons(tmp_path: Path, accelerator: str, cls: type[Net], reason: str) -> None:
    callback = CUDAGraphCallback(on_unsupported="eager")
    train(make(cls), tmp_path, callback, accelerator=accelerator, **ACCUMULATED)
    assert re.search(reason, str(callback.summary)), callback.summary


@pytest.mark.long
def test_replaced_gradients_have_a_remedy(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    train(make(Replaces), tmp_path, callback, accelerator=accelerator, max_epochs=4)
    (change,) = callback.summary.fit.recaptures
    assert change == "user code gives a parameter a gradient of its own"
    assert "p.grad.copy_" in change.remedy


class _Hook(Callback):
    """Halves a gradient between forward and backward pass, where those of other micro-batches are."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        gradient = pl_module.head.bias.grad
        if trainer.global_step > 4 and gradient is not None:
            gradient.data = gradient.data * 0.5


def test_in_the_middle_of_a_step(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(HookError, match=r"on_before_backward.* gives a gradient other memory"):
        train(
            make(Net),
            tmp_path,
            CUDAGraphCallback(),
            callbacks=[_Hook()],
            accelerator=accelerator,
            accumulate_grad_batches=4,
            max_epochs=6,
        )


Kept = list[torch.Tensor]


def _clamped(net: nn.Module, kept: Kept) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.clamp(-0.02, 0.02)


def _clamped_and_kept(net: nn.Module, kept: Kept) -> None:
    kept[:] = [parameter.grad.data for parameter in net.parameters() if parameter.grad is not None]
    _clamped(net, kept)


def _swapped(net: nn.Module, kept: Kept) -> None:
    first, second = (parameter.grad for parameter in net.parameters() if parameter.dim() == 2)
    assert first is not None
    assert second is not None
    first.data, second.data = second.data, first.data


def _transposed(net: nn.Module, kept: Kept) -> None:
    for parameter in net.parameters():
        if parameter.dim() == 2:
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.t()


def _flat(net: nn.Module, kept: Kept) -> None:
    """The gradients become parts of one tensor once, which is halved after each step."""
    if not kept:
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        kept.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for gradient, part in zip(gradients, kept[0].split([*map(torch.numel, gradients)]), strict=True):
            gradient.data = part.view_as(gradient)
    kept[0].mul_(0.5)


CHANGES = {
    function.__name__: function
    for function in (_clamped, _clamped_and_kept, _swapped, _transposed, _flat)
}


def _trained(
    accelerator: str, change: Callable[[nn.Module, Kept], None], first: int, is_graphed: bool
) -> tuple[list[torch.Tensor], int]:
    """The gradients after each step and the weights at the end; and the number of replays."""
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept: Kept = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if change is not _flat:
            optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    call = GraphedStep(step, modules=net) if is_graphed else step
    seen = []
    for index in range(16):
        call(torch.randn(4, 6, device=device), torch.randint(3, (4,), device=device))
        if index >= first:
            change(net, kept)
        seen += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        seen += [tensor.clone() for tensor in kept]
        optimizer.step()
    replays = call.summary.calls.replayed if isinstance(call, GraphedStep) else 0
    return [*seen, *net.parameters()], replays


@pytest.mark.spread
@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("name", CHANGES)
def test_graphed_step(accelerator: str, name: str, first: int) -> None:
    plain, _ = _trained(accelerator, CHANGES[name], first, False)
    graph, replays = _trained(accelerator, CHANGES[name], first, True)
    assert len(plain) == len(graph)
    assert all(map(torch.equal, plain, graph))
    assert replays >= 5


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "_flat"])  # references show that
def test_control(accelerator: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard, later steps go on with the gradients of an earlier one."""
    monkeypatch.setattr(Layouts, "changed", lambda self, tensors: False)
    plain, _ = _trained(accelerator, CHANGES[name], 6, False)
    try:
        graph, _ = _trained(accelerator, CHANGES[name], 6, True)
    except CUDAGraphError:
        return
    assert not all(map(torch.equal, plain, graph))


@pytest.mark.parametrize("options", [{}, {"verify": None}])
def test_a_gradient_that_the_step_reads_and_drops(accelerator: str, options: dict[str, Any]) -> None:
    """Other code makes it before some of the calls; without one, the optimizer leaves a weight alone."""
    device = device_of(accelerator)

    def weight(is_graphed: bool) -> torch.Tensor:
        torch.manual_seed(1)
        first, second = (nn.Linear(6, 4).to(device) for _ in range(2))
        one = torch.optim.SGD(first.parameters(), lr=0.1)
        other = torch.optim.SGD(second.parameters(), lr=0.1, weight_decay=0.5)

        def train(x: torch.Tensor) -> None:
            one.zero_grad()
            first(x).square().mean().backward()
            one.step()
            other.step()
            other.zero_grad()

        step = GraphedStep(train, modules=[first, second], optimizers=[one, other], **options)
        with step:
            for index in range(32):
                x = torch.randn(8, 6, device=device)
                if index < 9 or index % 4 == 0:
                    second(x).square().mean().backward()
                (step if is_graphed else train)(x)
            assert not is_graphed or step.summary.calls.replayed > 8
        return second.weight.detach()

    assert torch.equal(weight(is_graphed=False), weight(is_graphed=True))


@pytest.mark.parametrize("missing", ["", "_use_count", "users_of"])
def test_references_to_gradients_are_counted(
    accelerator: str, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing:  # as in a torch without it
        monkeypatch.setattr(external_references, missing, None)
    net = nn.Linear(3, 2).to(device_of(accelerator))
    net(torch.ones(1, 3, device=device_of(accelerator))).sum().backward()
    references = ExternalReferences(gradients_of(net.parameters()))
    references.count()
    assert not references.is_any_kept()
    kept = net.weight.grad
    assert references.is_any_kept()
    del kept
    assert not references.is_any_kept()
    storage = net.weight.grad.untyped_storage()  # type: ignore[union-attr]
    assert references.is_any_kept()
    del storage
    net.bias.grad = None  # one reference less is none of others
    assert not references.is_any_kept()
    view = net.weight.grad[0]  # type: ignore[index]
    assert references.is_any_kept()
    del view
    assert not references.is_any_kept()
