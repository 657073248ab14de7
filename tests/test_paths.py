"""Steps that branch on `batch_idx`: a graph for each path, chosen by what the step reads of the index.

`tests/gpu/test_paths.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.tensors.host_values import HostReads, HostValue
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

BATCHES = 24


class Branching(Net):
    """Has a layer of its own for some steps, logs a value of theirs, and passes the loss to a function."""

    def __init__(self, use: Callable[[Branching, Tensor, Any], Any]) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3))
        self.use = use
        self.extra = nn.Linear(12, 4)
        self.every = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return self.use(self, loss, batch_idx)

    def penalty(self) -> Tensor:
        return self.extra.weight.square().mean()


def regularises(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """Other parameters, other logged values and other outputs on one path."""
    if batch_idx % net.every == 0:
        penalty = net.penalty()
        net.log("penalty", penalty, on_step=True, on_epoch=True)
        return {"loss": loss + penalty, "penalty": penalty.detach()}
    return {"loss": loss}


def alternates(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    return loss if batch_idx % 2 else net.penalty() - loss


def warms_up(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    return loss * (0.1 if batch_idx < 10 else 1.0)


def computes(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """Part of the index in arithmetic, in place, as an index, and in C code."""
    part = loss.new_ones(4)
    view = part[:2]
    view *= 1 + batch_idx % 3
    weights = [1.0, 2.0, 3.0]
    return loss * weights[batch_idx % 3] + torch.mul(part, 2 * (batch_idx % 3)).sum()


def logs_numbers(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """A number that is constant on each path."""
    is_odd = bool(batch_idx & 1)
    net.log("scale", 2.0 if is_odd else 1.0)
    return loss * (2.0 if is_odd else 1.0)


def comes_late(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """The first step of a path comes behind many captured ones; on it, the step reads more."""
    if batch_idx >= 16:
        return loss * (2 if batch_idx % 2 == 0 else 3)
    return loss


def both(tmp_path: Path, accelerator: str, use: Any, ours: Any = None, **kwargs: Any) -> Trace:
    """Train without and with the callback, and return the second run, which must equal the first."""
    kwargs = {"accelerator": accelerator, "max_epochs": 4, **kwargs}
    plain, graph = (
        train(
            make(lambda: Branching(use)),
            tmp_path / name,
            callback,
            train_loader=loader(batches=BATCHES, ragged=False),
            **kwargs,
        )
        for name, callback in (("plain", None), ("graph", ours or CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    return graph


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "alone"])
@pytest.mark.parametrize(
    ("use", "paths"),
    [
        (regularises, 2),
        (alternates, 2),
        (warms_up, 2),
        (computes, 3),
        (logs_numbers, 2),
        (comes_late, 4),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_paths(
    tmp_path: Path, accelerator: str, use: Any, paths: int, verify: bool
) -> None:
    ours = CUDAGraphCallback() if verify else CUDAGraphCallback(verify=None)
    run = both(tmp_path, accelerator, use, ours)
    assert run.counts.captures == paths
    assert run.counts.recaptures == ()
    assert run.counts.replayed > 1.5 * BATCHES
