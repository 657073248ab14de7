"""Graphs go on with their own scratch memory when torch's workspaces for cuBLAS are cleared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from lightning.fabric.accelerators.cuda import _clear_cuda_memory
from torch import nn

from lightning_cudagraph import GraphedStep

# Products of these sizes are split on an H200, and their partial sums go to the workspace.
_BATCH, _WIDTH, _DEPTH = 128, 256, 6
_FILLER = 7.0


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(_DEPTH) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


def _batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(count):
        yield torch.randn(_BATCH, _WIDTH, device="cuda", generator=generator)


def _train(model: nn.Module, graphed: bool, clear_at: int | None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    fillers: list[torch.Tensor] = []
    with GraphedStep(
        step, modules=model, optimizers=optimizer, backend="cuda" if graphed else "off"
    ) as run:
        for index, x in enumerate(_batches(40)):
            if index == clear_at:
                _clear_cuda_memory()
                # What was freed is somebody else's now.
                fillers = [torch.full((2**20,), _FILLER, device="cuda") for _ in range(64)]
            run(x)
        assert not graphed or run.counts.replayed > 30
    torch.cuda.synchronize()
    assert all(bool((filler == _FILLER).all()) for filler in fillers)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("clear_at", [1, 3, 5, 20])
def test_clearing_workspaces_leaves_graphs_their_scratch_memory(clear_at: int) -> None:
    plain = _train(_model(), False, None)
    graphed = _train(_model(), True, clear_at)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=0)


def test_streams_are_used_again_when_their_graphs_are_gone() -> None:
    _train(_model(), True, None)
    reserved_bytes = torch.cuda.memory_reserved()
    for _ in range(4):
        _train(_model(), True, None)
        _clear_cuda_memory()
    assert torch.cuda.memory_reserved() <= reserved_bytes


_MANY_POOLS = """
import torch
from lightning_cudagraph.capture.side_streams import SideStream
taken = [torch.cuda.MemPool() for _ in range(300)]  # their numbers are counted by reference
kept = []
for index in range(80):  # more than torch has streams
    kept.append(SideStream(torch.device("cuda")))
    kept += [object() for _ in range(50_000)] + list(range(1000 * index, 1000 * index + 50_000))
assert kept[0].workspace_bytes() > 0
"""


def test_in_a_process_with_many_pools() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _MANY_POOLS], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, f"{run.returncode}: {run.stderr[-2000:]}"


def test_with_expandable_segments() -> None:
    code = "from tests.gpu.test_side_streams import _model, _train; _train(_model(), True, 5)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
