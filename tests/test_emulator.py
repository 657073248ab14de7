"""The emulator has the semantics of a CUDA graph, its traps included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, GraphedStep
from lightning_cudagraph.device.emulator.emulated_graph import HostEvent
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend


@pytest.fixture
def backend() -> EmulatorBackend:
    return EmulatorBackend()


def test_a_capture_executes_nothing(backend: EmulatorBackend) -> None:
    x, total = torch.ones(3), torch.zeros(3)
    rng = torch.get_rng_state()

    def body() -> Tensor:
        total.add_(x)
        return total + torch.rand(3)

    graph, static = backend.capture(body)
    assert torch.equal(total, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), rng)
    graph.replay()
    graph.replay()
    assert torch.equal(total, torch.full((3,), 2.0))
    torch.set_rng_state(rng)
    torch.rand(3)
    assert torch.equal(static, total + torch.rand(3))


def test_python_values_are_frozen_and_tensors_are_not(backend: EmulatorBackend) -> None:
    x, scale = torch.ones(2), {"python": 3.0, "tensor": torch.tensor(3.0)}
    graph, static = backend.capture(lambda: (x * scale["python"], x * scale["tensor"]))
    scale["python"] = 5.0
    scale["tensor"].fill_(5.0)  # type: ignore[attr-defined]
    graph.replay()
    assert static[0].tolist() == [3.0, 3.0]
    assert static[1].tolist() == [5.0, 5.0]


def test_addresses_are_frozen(backend: EmulatorBackend) -> None:
    holder = {"w": torch.ones(2)}
    old = holder["w"]
    graph, static = backend.capture(lambda: holder["w"].mul(2))
    holder["w"] = torch.full((2,), 10.0)
    graph.replay()
    assert static.tolist() == [2.0, 2.0]
    old.fill_(4.0)
    graph.replay()
    assert static.tolist() == [8.0, 8.0]


def test_views_and_in_place_ops(backend: EmulatorBackend) -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def body() -> Tensor:
        y = x * 1
        y[0].mul_(10)
        y.t()[1].add_(0.5)
        return y.reshape(3, 2).sum(0)

    expected = body()
    graph, static = backend.capture(body)
    for _ in range(3):
        graph.replay()
        assert torch.equal(static, expected)


def test_batch_norm_writes_that_its_schema_hides(backend: EmulatorBackend) -> None:
    norm, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    graph, _ = backend.capture(lambda: norm(x))
    assert torch.equal(norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]
    for _ in range(2):
        graph.replay()
        reference(x)
    assert torch.equal(norm.running_var, reference.running_var)  # type: ignore[arg-type]
    assert torch.equal(norm.num_batches_tracked, reference.num_batches_tracked)  # type: ignore[arg-type]


REFUSED: dict[str, Any] = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 0,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(minlength=3),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "print": lambda x: str(x),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "resize": lambda x: (x + 1).resize_(1),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1])),
    "inverse": lambda x: torch.linalg.inv(torch.eye(3) + x),
    "generator": lambda x: torch.rand(2, generator=torch.Generator()),
}
FINE: dict[str, Any] = {
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "assignment of one value": lambda x: (x + 0).__setitem__(x > 0, 1.0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "index by integers": lambda x: x[torch.tensor([0, 2])],
    "one of known size": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1]), output_size=4),
    "topk": lambda x: x.topk(2),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(torch.eye(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_a_capture_refuses(backend: EmulatorBackend, name: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(CaptureError, match=r"(?s)A CUDA graph cannot hold .* found (at|in)"):
        backend.capture(lambda: REFUSED[name](x))
    graph, static = backend.capture(lambda: x * 2)  # and is ready for the next
    graph.replay()
    assert static.tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("name", FINE)
def test_lets_pass_what_a_capture_holds(backend: EmulatorBackend, name: str) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    graph, _ = backend.capture(lambda: FINE[name](x))
    graph.replay()


def test_a_failed_capture_leaves_no_trace(backend: EmulatorBackend) -> None:
    x = torch.zeros(2)
    rng = torch.get_rng_state()

    def body() -> None:
        x.add_(torch.rand(2))
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        backend.capture(body)
    assert torch.equal(x, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), rng)
    assert backend.graph_bytes() == 0


def test_events_are_marked_by_each_replay(backend: EmulatorBackend) -> None:
    start, between, end = (backend.event() for _ in range(3))
    x = torch.randn(64, 64)

    def body() -> Tensor:
        backend.mark(start)
        y = x @ x
        backend.mark(end)
        return y

    graph, _ = backend.capture(body)
    with pytest.raises(RuntimeError, match="must have been recorded"):
        start.elapsed_time(end)
    graph.replay()
    assert start.elapsed_time(end) > 0
    backend.mark(between)
    graph.replay()
    assert between.elapsed_time(start) > 0
    assert isinstance(start, HostEvent)


def test_memory_is_counted_and_given_back(backend: EmulatorBackend) -> None:
    x = torch.zeros(1000)
    graph, _ = backend.capture(lambda: x * 2)
    assert backend.graph_bytes() == 4000
    backend.release(graph)
    assert backend.graph_bytes() == 0


def test_libraries_are_told_of_a_capture() -> None:
    """As on a GPU: in the thread that captures, and while it does."""
    before = torch.cuda.is_current_stream_capturing, torch.cuda.graphs.is_current_stream_capturing
    backend = EmulatorBackend()
    told: list[bool] = []
    backend.capture(lambda: told.append(torch.cuda.is_current_stream_capturing()))
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: 1 // 0)
    assert told == [True]
    now = torch.cuda.is_current_stream_capturing, torch.cuda.graphs.is_current_stream_capturing
    assert now == before


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_forward_derivatives() -> None:
    """Zeros of `torch.func.jvp` have no memory, and a replay writes none."""
    weight = torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        value, derivative = torch.func.jvp(lambda x: (x * weight).sin().sum(), (x,), (x,))
        return value + derivative

    call = GraphedStep(step, backend="emulator")
    for _ in range(8):
        x = torch.randn(3)
        assert torch.equal(call(x), step(x))
