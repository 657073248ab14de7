"""Thousands of replays on several streams, beside another process on the GPU; on one; and eagerly."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from benchmarks.models import WORKLOADS, Workload
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from tests.harness import differences

_DEVICE = torch.device("cuda", 0)
_REPLAYS = 2000
_BATCHES = 16
_EAGER_STEPS = _REPLAYS // 4
_LOOKS = tuple(_REPLAYS * quarter // 4 for quarter in (1, 2, 3, 4))
# Eager steps of the one left out do not repeat themselves, and it takes one stream.
_MODELS = [workload for workload in WORKLOADS if workload.name != "compute-bound GPT"]

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


def _trained(workload: Workload, streams: int | None, batches: list[Any]) -> list[list[Tensor]]:
    """The state now and then in as many replays; of the first eager steps, without streams."""
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

    backend = CudaBackend(_DEVICE, streams=streams or 1)
    with backend.on_side_stream():
        for _ in range(3):
            step()
    graph, loss = (None, None) if streams is None else backend.capture(step)
    found = []
    torch.manual_seed(1)
    with contextlib.nullcontext() if graph is not None else backend.on_side_stream():
        for index in range(_EAGER_STEPS if graph is None else _REPLAYS):
            for place, value in zip(places, tree_iter(batches[index % _BATCHES]), strict=True):
                place.copy_(value)
            if graph is None:
                loss = step()
            else:
                graph.replay()
            if index + 1 in _LOOKS:
                state = [*module.state_dict().values(), loss]
                found.append([tensor.detach().clone() for tensor in state])
    torch.cuda.synchronize()
    if graph is not None:
        backend.release(graph)
    return found


@pytest.mark.parametrize("workload", _MODELS, ids=lambda workload: workload.name)
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
        one = _trained(workload, 1, batches)
        assert len(one) == len(_LOOKS)
        assert all(bool(value.isfinite().all()) for value in one[-1] if value.is_floating_point())
        for streams in (2, 8):
            assert differences(one, _trained(workload, streams, batches)) == []
        assert differences(one[:1], _trained(workload, None, batches)) == []
    finally:
        torch.backends.cudnn.deterministic = deterministic
