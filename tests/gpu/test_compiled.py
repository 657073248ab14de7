"""The sentry around compiled code: it stays compiled, and what it does is still seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CaptureError
from lightning_cudagraph.capture.backend import CudaBackend
from lightning_cudagraph.capture.mends import Constants, HostMemory, MendingSentry
from lightning_cudagraph.capture.sentry import HostReads


def _step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device="cuda"), fused=True)


# of torch, where it imports its own compiler
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.*deprecated:DeprecationWarning", "ignore:TensorFloat32 tensor cores"
)
def test_a_compiled_module_is_captured_compiled() -> None:
    backend = CudaBackend(torch.device("cuda", 0))
    model, optimizer = _made()
    compiled = torch.compile(model)
    batches = torch.randn(8, 16, 32, device="cuda")
    static = batches[0].clone()
    with backend.on_side_stream():
        for _ in range(2):
            _step(compiled, optimizer, static)
        # Dynamo compiles anew under function modes; not in the capture, if warm-up has had them.
        memory = HostMemory()
        with HostReads("cuda"), Constants(memory), MendingSentry(backend.generators, memory):
            _step(compiled, optimizer, static)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    graph, loss = backend.capture(lambda: _step(compiled, optimizer, static))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations
    captured = []
    for batch in batches:
        static.copy_(batch)
        graph.replay()
        captured.append(loss.clone())
    model.load_state_dict(before)
    with backend.on_side_stream():
        eager = [_step(compiled, optimizer, batch.clone()) for batch in batches]
    assert torch.equal(torch.stack(captured), torch.stack(eager))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.*deprecated:DeprecationWarning", "ignore:TensorFloat32 tensor cores"
)
def test_a_host_read_between_compiled_regions_is_named() -> None:
    backend = CudaBackend(torch.device("cuda", 0))
    model, optimizer = _made()
    compiled = torch.compile(model)

    def step(x: Tensor) -> Tensor:
        loss = _step(compiled, optimizer, x)
        return loss * float(loss)

    x = torch.randn(16, 32, device="cuda")
    with backend.on_side_stream():
        for _ in range(3):
            step(x)
    with pytest.raises(CaptureError, match=r"`float\(tensor\)`.*test_compiled.py:\d+ \(`return loss \*"):
        backend.capture(lambda: step(x))
    # The process is none the worse for it.
    graph, _ = backend.capture(lambda: _step(compiled, optimizer, x))
    graph.replay()
    torch.cuda.synchronize()
