"""Three programs that time code in CUDA graphs, as such programs are commonly written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_cudagraph import EventTimer, Profiler, TimerError, TimerRegistry


def test_a_timer_in_eager_code(capsys: pytest.CaptureFixture[str]) -> None:
    timer = EventTimer()
    a = torch.randn(1000, 1000, device="cuda")
    b = torch.randn(1000, 1000, device="cuda")

    for i in range(10):
        with timer():
            _ = a + b
        elapsed = timer.elapsed_time()
        print(f"[Iter {i}] Elapsed time: {elapsed:.2f} ms")
        assert 0 < elapsed < 1000

    assert len(capsys.readouterr().out.splitlines()) == 10


def test_reading_a_timer_inside_the_capture_is_refused() -> None:
    timer = EventTimer()
    static_a = torch.empty(1000, 1000, device="cuda")
    static_b = torch.empty(1000, 1000, device="cuda")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            with timer():
                _ = static_a + static_b
            with pytest.raises(TimerError, match="during a capture"):
                timer.elapsed_time()

    static_a.copy_(torch.randn(1000, 1000, device="cuda"))
    static_b.copy_(torch.randn(1000, 1000, device="cuda"))
    graph.replay()
    assert timer.elapsed_time() > 0


def test_a_timer_in_a_graph() -> None:
    timer = EventTimer()
    static_a = torch.empty(1000, 1000, device="cuda")
    static_b = torch.empty(1000, 1000, device="cuda")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            with timer():
                _ = static_a + static_b

    static_a.copy_(torch.randn(1000, 1000, device="cuda"))
    static_b.copy_(torch.randn(1000, 1000, device="cuda"))
    graph.replay()

    timer.synchronize()
    elapsed = timer.elapsed_time()
    print(f"[Iter 10] Elapsed time: {elapsed:.2f} ms")
    assert 0 < elapsed < 1


def test_a_registry_for_many_timers() -> None:
    registry = TimerRegistry[int]()
    static_a = torch.empty(1000, 1000, device="cuda")
    static_b = torch.empty(1000, 1000, device="cuda")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(10):
            with registry.time(context=i):
                _ = static_a + static_b

    for i in range(3):
        print(f"--- Replay Iteration {i} ---")
        static_a.copy_(torch.randn(1000, 1000, device="cuda"))
        static_b.copy_(torch.randn(1000, 1000, device="cuda"))
        graph.replay()
        contexts = []
        for context, elapsed in registry.elapsed_times():
            print(f"[Iter {context}] {elapsed:.2} ms")
            assert 0 < elapsed < 100  # other processes may share the GPU
            contexts.append(context)
        assert contexts == list(range(10))


@dataclass
class Context:
    layer_id: int
    op: str


def dump_fn(context: Context, elapsed: float) -> None:
    print(f"[Layer {context.layer_id}] {context.op} took {elapsed:.2f} ms")


profiler: Profiler[Context]


class Layer(torch.nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.offset = torch.nn.Parameter(torch.randn(1000, 1000))
        self.relu = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with profiler.time(Context(self.layer_id, "add")):
            x = x + self.offset
        with profiler.time(Context(self.layer_id, "relu")):
            x = self.relu(x)
        return x  # noqa: RET504


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(i) for i in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def execution() -> None:
    model = Model().cuda()
    static_input = torch.randn(1000, 1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ = model(static_input)

    for i in range(3):
        print(f"--- Replay Iteration {i} ---")
        static_input.copy_(torch.randn(1000, 1000, device="cuda"))
        graph.replay()


@pytest.fixture
def _profiled() -> Iterator[None]:
    global profiler
    # A module that is imported has it at the top; tests put it away again.
    with Profiler(dump_fn) as profiler:
        yield


@pytest.mark.usefixtures("_profiled")
def test_a_profiler_that_the_execution_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    execution()
    lines = capsys.readouterr().out.splitlines()
    expected: list[Any] = []
    for i in range(3):
        expected.append(f"--- Replay Iteration {i} ---")
        expected += [f"[Layer {n}] {op} took " for n in range(5) for op in ("add", "relu")]
    assert len(lines) == len(expected)
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(begin)
