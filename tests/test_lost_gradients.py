"""Gradients that a step uses or makes, and that replays of a graph would not find or make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from lightning_cudagraph.trainer.training.captured_step.lost_gradients import LostGradients
from tests.harness import Net, assert_same, differences, make, train

# From here on, the gradient counts.
_FROM = 10


class Shifted(Net):
    """Shifts the batch by what has an optimizer of its own and is no parameter of the module."""

    def on_fit_start(self) -> None:
        self.own = self.make_own()
        self.own_optimizer = torch.optim.SGD(self.leaves(), lr=0.1)

    def make_own(self) -> Any:
        return torch.zeros(12, device=self.device, requires_grad=True)

    def leaves(self) -> list[Tensor]:
        return [self.own]

    def shift(self, x: Tensor) -> Tensor:
        return x + self.own

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step([self.shift(x), y], batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.own_optimizer.step()
        self.own_optimizer.zero_grad()


class ShiftedByAHiddenLayer(Shifted):
    def make_own(self) -> Any:
        torch.manual_seed(0)
        return [nn.Linear(12, 12, device=self.device)]

    def leaves(self) -> list[Tensor]:
        return [*self.own[0].parameters()]

    def shift(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.own[0](x)
        return shifted


class KeepsItsGradients(Shifted):
    """Its gradients stay where they are, and replays add to them."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.own_optimizer.step()
        self.own_optimizer.zero_grad(set_to_none=False)


class ReadsTheGradientBefore(Net):
    """Weighs the loss by the gradient of the step before, which counts late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(()))
        self.register_buffer("norm", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight.fill_(float(self.global_step >= _FROM))

    def read(self) -> Tensor | None:
        gradient = self.head.weight.grad
        return None if gradient is None else gradient.norm()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, norm = super().training_step(batch, batch_idx)["loss"], self.read()
        return loss if norm is None else loss * (1 + self.weight * norm)


class KeepsItsNorm(ReadsTheGradientBefore):
    """Does as the remedy says."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm.copy_(self.head.weight.grad.norm())

    def read(self) -> Tensor:
        return self.norm


class ReturnsTheGradientBefore(ReadsTheGradientBefore):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Net.training_step(self, batch, batch_idx)["loss"]
        return {"loss": loss, "before": self.head.weight.grad}


class AsksForAGradient(Net):
    """Asks for the gradient of a parameter that never has one, and of one that always has one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * 2 if self.unused.weight.grad is None else loss


class LeavesOfOneStep(Net):
    """Leaves that live in a step alone: a detached buffer, and a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchor", torch.ones(12))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        shift = self.anchor.detach().requires_grad_()
        weight = self.head.weight.detach().requires_grad_()
        loss = super().training_step([x + shift, y], batch_idx)["loss"]
        return loss + weight.square().mean()


class ZeroesInstead(Net):
    """Its optimizer writes zeros; a plain run and a graph make the same of them."""

    def on_fit_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)


REFUSED: dict[type[Net], str] = {
    Shifted: r"the gradient of a tensor of shape \(12,\) that is no parameter.*Make it a parameter",
    ShiftedByAHiddenLayer: r"the gradient of a tensor of shape \(12, 12\) that.*register the layer",
    ReadsTheGradientBefore: r"the gradient of `head.weight` from the step before.*lost_gradients.py:\d+"
    r" \(`return None if gradient is None else gradient.norm\(\)`\).*a registered buffer in",
    ReturnsTheGradientBefore: r"the gradient of `head.weight` from the step before",
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_is_refused_or_eager(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    with pytest.raises(CaptureError, match=f"(?s){REFUSED[cls]}"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(cls), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert eager.counts.replayed == 0


CAPTURED = [KeepsItsGradients, KeepsItsNorm, AsksForAGradient, LeavesOfOneStep, ZeroesInstead]


@pytest.mark.parametrize("cls", CAPTURED, ids=lambda cls: cls.__name__)
def test_is_captured(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed >= _FROM


_WITHOUT: dict[type[Net], tuple[str, Callable[..., Any]]] = {
    Shifted: ("check", lambda gradients: None),
    ReadsTheGradientBefore: ("unused_in", lambda gradients, step: step),
}


@pytest.mark.parametrize("cls", _WITHOUT, ids=lambda cls: cls.__name__)
def test_without_the_check_it_trains_wrong(
    tmp_path: Path, accelerator: str, cls: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    monkeypatch.setattr(LostGradients, *_WITHOUT[cls])
    callback = CUDAGraphCallback(verify=None)
    graph = train(make(cls), tmp_path / "graph", callback, accelerator=accelerator)
    assert graph.counts.replayed >= _FROM
    assert differences(plain.final["weights"], graph.final["weights"])
