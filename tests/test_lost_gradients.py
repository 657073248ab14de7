"""Gradients that a step uses or makes, and that replays of a graph would not find or make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.capture.gradients.lost_gradients import LostGradients
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
    """Its gradients stay where they are, and replays would add to them, even after they are dropped."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.own_optimizer.step()
        self.own_optimizer.zero_grad(set_to_none=False)


class StepsSeldom(Shifted):
    """Its gradients add up over four steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            super().on_train_batch_end()


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


class AsksForTheGradientBefore(ReadsTheGradientBefore):
    """Takes no value of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Net.training_step(self, batch, batch_idx)["loss"]
        return loss if self.head.weight.grad is None else loss * 3


class AsksForAGradient(Net):
    """Asks for the gradient of a parameter that never has one."""

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


class DropsThemItself(Net):
    """Drops and moves gradients in the step, as far as there are any."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        self.optimizers().zero_grad()
        self.features.to(self.device)
        return super().training_step(batch, batch_idx)


class InTurns(Net):
    """Asks in steps of the one head for the gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(24, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx % 2:
            return nn.functional.cross_entropy(self.other(self.features(x)), y)
        loss = nn.functional.cross_entropy(self(x), y)
        return loss if self.other.weight.grad is None else loss * 3


REFUSED: dict[type[Net], str] = {
    Shifted: r"the gradient of a tensor of shape \(12,\) that is no parameter.*Make it a parameter",
    ShiftedByAHiddenLayer: r"the gradient of a tensor of shape \(12, 12\) that.*register the layer",
    KeepsItsGradients: r"the gradient of a tensor of shape \(12,\) that is no parameter",
    StepsSeldom: r"the gradient of a tensor of shape \(12,\) that is no parameter",
    ReadsTheGradientBefore: r"the gradient of `head.weight` from the step before.*lost_gradients.py:\d+"
    r" \(`gradient = self.head.weight.grad`\).*a registered buffer in",
    InTurns: r"the gradient of `other.weight` from the step before.*`return loss if",
    ReturnsTheGradientBefore: r"the gradient of `head.weight` from the step before",
    AsksForTheGradientBefore: r"the gradient of `head.weight` from the step before.*`return loss if",
}


@pytest.mark.spread
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_is_refused_or_eager(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){REFUSED[cls]}"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(cls), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert eager.counts.replayed == 0


CAPTURED = [KeepsItsNorm, AsksForAGradient, LeavesOfOneStep, DropsThemItself]


@pytest.mark.spread
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
