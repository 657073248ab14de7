"""Deferred metrics whose calls use what the step changes after them, or change what it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, assert_same, make, train


class OfAParameter(Metric):
    """Deferred, because it reads a value on the host: of a tensor outside of the metric."""

    def __init__(self, net: Outside) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.__dict__["net"] = net

    def update(self, value: Tensor) -> None:
        self.total += value.detach() * (1.0 + self.used().detach().item())

    def compute(self) -> Tensor:
        return self.total

    def used(self) -> Tensor:
        return self.net.head.weight.sum()


class OfStatistics(OfAParameter):
    """Reads a buffer that the step changes before the call, and not after it."""

    def used(self) -> Tensor:
        return self.net.features[1].running_mean.sum()


class OfAConstant(OfAParameter):
    def used(self) -> Tensor:
        return self.net.constant


class OfAGradient(OfAParameter):
    def used(self) -> Tensor:
        gradient = self.net.head.weight.grad
        return torch.zeros(()) if gradient is None else gradient.sum()


class OfWhatIsKept(OfAParameter):
    def used(self) -> Tensor:
        return self.net.kept.sum()


class CountsOutside(OfAParameter):
    """Writes into a tensor of others, which a trial of the call must leave as it was."""

    def used(self) -> Tensor:
        return self.net.constant.add_(1.0)


class WritesABuffer(OfAParameter):
    def used(self) -> Tensor:
        return self.net.level.add_(1.0)


class Outside(Net):
    kind: type[OfAParameter] = OfAParameter

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.constant, self.kept = torch.ones(()), torch.zeros(4)
        self.deferred = self.kind(self)
        self.totals: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.deferred.update(loss)
        self.kept = logits.detach().mean(0)
        self.log("level", self.level)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.totals.append(self.deferred.total.clone())


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfStatistics, ""),
        (OfAConstant, ""),
        (CountsOutside, ""),
        (OfAParameter, "reads the parameter `head.weight`, which the step changes later"),
        (OfAGradient, "reads a tensor, which the step changes later"),
        (OfWhatIsKept, "reads a tensor, which the step changes later"),
        (WritesABuffer, "writes into the buffer `level`"),
    ],
)
def test_deferred_calls_use_what_is_as_at_their_place(
    tmp_path: Path, accelerator: str, kind: type[OfAParameter], reason: str
) -> None:
    def build() -> Outside:
        outside: Outside = type("Net", (Outside,), {"kind": kind})()
        return outside

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    graph = train(make(build), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert isinstance(plain.module, Outside)
    assert isinstance(graph.module, Outside)
    assert torch.equal(torch.stack(plain.module.totals), torch.stack(graph.module.totals))
    assert reason in str(graph.summary)
    assert (graph.counts.replayed == 0) is bool(reason)
