"""Compiled code on CUDA, with kernels of Inductor's: it stays compiled, and what it does is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from lightning_cudagraph.capture.decisions.stream_choice import AskedStreams
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.sentry.op_rewrites import Constants, HostMemory, RewritingSentry
from lightning_cudagraph.device.sentry.sentry import FunctionSentry
from tests.harness import Net, Trace, assert_same, loader, make, train
from tests.test_compiled import *  # noqa: F403
from tests.test_compiled import fit


@pytest.fixture(autouse=True)
def compiled_alike() -> Iterator[None]:
    """Inductor chooses how to reduce by timing it, and finds in its files what was chosen before.

    In those of the user, what another process has chosen since, on a device that it uses too.
    """
    with fresh_cache():
        yield


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


@contextmanager
def _as_in_captures(backend: CudaBackend) -> Iterator[None]:
    """The modes that a capture runs a step under."""
    memory = HostMemory()
    with FunctionSentry("cuda"), Constants(memory), RewritingSentry(backend.generators, memory):
        yield


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
        with _as_in_captures(backend):
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
    # The code that the graph has. The other was compiled apart.
    with backend.on_side_stream(), _as_in_captures(backend):
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
        # Dynamo compiles anew under function modes; not in the capture, if warm-up has had them.
        with _as_in_captures(backend):
            _step(compiled, optimizer, x)
    message = r"(?s)`float\(tensor\)`.*test_compiled.py:\d+ \(`return loss \*"
    with pytest.raises(CaptureError, match=message):
        backend.capture(lambda: step(x))
    # The process is none the worse for it.
    graph, _ = backend.capture(lambda: _step(compiled, optimizer, x))
    graph.replay()
    torch.cuda.synchronize()


class ByInductor(Net):
    """Kernels that no op stands for: of a layer, and of what the step computes with its output."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.features: Any = torch.compile(self.features, **arguments)


@pytest.mark.parametrize("streams", ["auto", 4])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated", "ignore:TensorFloat32 tensor cores")
def test_kernels_of_inductors(tmp_path: Path, mode: str, streams: AskedStreams) -> None:
    """Whatever graphs of its own were asked for; the plain run is one without them."""

    def run(name: str, mode: str, callback: CUDAGraphCallback | None = None) -> Trace:
        return fit(lambda: ByInductor(mode=mode), tmp_path / name, callback, accelerator="gpu")

    callback = CUDAGraphCallback(streams=streams)
    plain, graph = run("plain", "default"), run("graph", mode, callback)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    if streams == 4:
        assert "captured on 4 streams" in str(callback.summary)
        assert "work that is no op of torch's" in str(callback.summary)
    assert ("without the CUDA graphs of its own" in str(callback.summary)) is (mode != "default")


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated", "ignore:TensorFloat32 tensor cores")
def test_one_word_is_the_compiled_step(tmp_path: Path) -> None:
    """`compile=True` comes to the numbers of a run whose step is compiled in the same way by hand."""
    torch.compiler.reset()
    module: Any = make(Net)
    module.training_step = torch.compile(module.training_step)
    logging = {name: vars(pl.LightningModule)[name] for name in ("log", "log_dict")}
    try:
        for name, method in logging.items():
            setattr(pl.LightningModule, name, torch.compiler.disable(method))
        plain = train(module, tmp_path / "plain", accelerator="gpu", train_loader=loader(ragged=False))
    finally:
        for name, method in logging.items():
            setattr(pl.LightningModule, name, method)
    callback = CUDAGraphCallback(compile=True)
    graph = fit(Net, tmp_path / "graph", callback, accelerator="gpu")
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
