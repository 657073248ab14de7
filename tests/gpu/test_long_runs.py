"""Thousands of replays on several streams, beside a process that uses the GPU too, and on one stream."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from benchmarks.models import WORKLOADS, Workload
from lightning_cudagraph.capture.backend import CudaBackend
from tests.harness import differences

_DEVICE = torch.device("cuda", 0)
_REPLAYS = 5000
_BATCHES = 16
_NAMES = ("two critics", "actor-critic", "DLRM 128", "MLP", "GPT", "ResNet-18", "ViT-tiny")
_SMALL = [workload for workload in WORKLOADS if workload.name in _NAMES]

_LOAD = """
import sys, torch
x = torch.randn(2048, 2048, device="cuda")
small = torch.randn(64, device="cuda")
print("ready", flush=True)
while True:
    for _ in range(20):
        x = (x @ x).tanh()
        for _ in range(20):
            small = small * 0.5 + 1.0
    torch.cuda.synchronize()
"""


@pytest.fixture
def load() -> Iterator[None]:
    """Another process keeps the GPU busy, now with large kernels and now with many small ones."""
    with subprocess.Popen([sys.executable, "-c", _LOAD], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def _trained(workload: Workload, streams: int, batches: list[Any], replays: int) -> list[list[Tensor]]:
    """The state after each quarter of the replays."""
    torch.manual_seed(0)
    module = workload.make(False).to(_DEVICE).train()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True, capturable=True)
    static = tree_map(torch.clone, batches[0])
    places = [*tree_iter(static)]
    autocast = torch.autocast(
        "cuda", torch.bfloat16, enabled=workload.precision == "bf16-mixed", cache_enabled=False
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        with autocast:
            loss: Any = module.training_step(static, 0)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    backend = CudaBackend(_DEVICE, streams=streams)
    with backend.on_side_stream():
        for _ in range(3):
            step()
    graph, loss = backend.capture(step)
    found = []
    torch.manual_seed(1)
    for index in range(replays):
        for place, value in zip(places, tree_iter(batches[index % _BATCHES]), strict=True):
            place.copy_(value)
        graph.replay()
        if (index + 1) % (replays // 4) == 0:
            state = [*module.state_dict().values(), loss]
            found.append([tensor.detach().clone() for tensor in state])
    torch.cuda.synchronize()
    backend.release(graph)
    return found


@pytest.mark.parametrize("workload", _SMALL, ids=lambda workload: workload.name)
def test_thousands_of_replays(workload: Workload, load: None) -> None:
    if not workload.is_here:
        pytest.skip(f"needs {workload.needs}")
    torch.manual_seed(5)
    batches = [
        tree_map(lambda tensor: tensor.to(_DEVICE), workload.batch(False)) for _ in range(_BATCHES)
    ]
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        one = _trained(workload, 1, batches, _REPLAYS)
        assert all(bool(value.isfinite().all()) for value in one[-1] if value.is_floating_point())
        for streams in (2, 8):
            assert differences(one, _trained(workload, streams, batches, _REPLAYS)) == []
    finally:
        torch.backends.cudnn.deterministic = deterministic
