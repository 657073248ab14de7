"""Gradients that user code gives other memory between two steps (`p.grad.data = ...`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cudagraph import CUDAGraphCallback, CUDAGraphError, GraphedStep
from lightning_cudagraph.tensors.external_references import ExternalReferences
from tests.harness import Net, assert_same, make, train


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


RUNS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "accumulated": (HalvesAfterTheStep, {"accumulate_grad_batches": 4, "max_epochs": 6}, {}),
    "eager optimizer": (HalvesBeforeTheOptimizer, {}, {"scope": "forward_backward"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_training(tmp_path: Path, accelerator: str, name: str) -> None:
    cls, kwargs, options = RUNS[name]
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator, **kwargs)
    graph = train(
        make(cls), tmp_path / "graph", CUDAGraphCallback(**options), accelerator=accelerator, **kwargs
    )
    assert_same(plain, graph)
    assert graph.counts.replayed > 4


def _weights(accelerator: str, is_graphed: bool) -> list[torch.Tensor]:
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    torch.manual_seed(0)
    net = nn.Linear(6, 3, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    call = GraphedStep(step, modules=net) if is_graphed else step
    for _ in range(12):
        call(torch.randn(4, 6, device=device), torch.randint(3, (4,), device=device))
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clamp(-0.02, 0.02)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def _check_graphed_step(accelerator: str) -> None:
    plain, graph = (_weights(accelerator, is_graphed) for is_graphed in (False, True))
    assert all(map(torch.equal, plain, graph))


def test_graphed_step(accelerator: str) -> None:
    _check_graphed_step(accelerator)


def test_control(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer would go on with the gradients of an earlier step."""
    monkeypatch.setattr(ExternalReferences, "_bring_back", lambda self: False)
    with pytest.raises((AssertionError, CUDAGraphError)):
        _check_graphed_step(accelerator)
