"""Whoever captures: the profiler takes the graphs of all that go through `torch.cuda.CUDAGraph`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import Profiler

Seen = list[tuple[str, float]]


@pytest.fixture
def seen() -> Seen:
    return []


@pytest.fixture
def profiler(seen: Seen) -> Iterator[Profiler[str]]:
    before = dict(vars(torch.cuda.CUDAGraph))
    with Profiler[str](lambda name, elapsed_ms: seen.append((name, elapsed_ms))) as profiler:
        yield profiler
    assert dict(vars(torch.cuda.CUDAGraph)) == before


def names(seen: Seen) -> list[str]:
    found = [name for name, _ in seen]
    assert all(time_ms > 0 for _, time_ms in seen)
    seen.clear()
    return found


class InBackward(torch.autograd.Function):
    """Timed in the thread of autograd's."""

    profiler: Profiler[str]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with InBackward.profiler.time("in backward"):
            return grad * 2


class Net(nn.Module):
    def __init__(self, profiler: Profiler[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.profiler = profiler
        InBackward.profiler = profiler

    def forward(self, x: Tensor) -> Tensor:
        with self.profiler.time("linear"):
            x = self.linear(x)
        return InBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


# torch's own warm-up, on a stream of its own, meets the parameters' nodes of the one before.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_make_graphed_callables(profiler: Profiler[str], seen: Seen) -> None:
    net = Net(profiler).cuda()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(net, (x,))
    names(seen)  # of the warm-up, which is eager
    for _ in range(3):
        out = graphed(x)
        assert names(seen) == ["linear"]
        out.sum().backward()
        assert names(seen) == ["in backward"]


def test_forward_and_backward_in_one_graph(profiler: Profiler[str], seen: Seen) -> None:
    net = Net(profiler).cuda()
    x = torch.randn(8, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        net(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    assert names(seen) == ["linear", "in backward"]
    net.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        net(x).sum().backward()
    assert seen == []
    for _ in range(3):
        graph.replay()
        assert names(seen) == ["linear", "in backward"]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_by_its_own_methods_and_captured_again(profiler: Profiler[str], seen: Seen, mode: str) -> None:
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    for round in range(3):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode=mode)
            with profiler.time(f"add {round}"):
                x += 1
            graph.capture_end()
        with pytest.raises(RuntimeError), torch.cuda.stream(side):
            graph.capture_begin()  # it holds one already
        for _ in range(2):
            graph.replay()
            assert names(seen) == [f"add {round}"]
        graph.reset()
    assert x.tolist() == [6.0] * 1000


def test_a_shared_pool_and_a_forked_stream(profiler: Profiler[str], seen: Seen) -> None:
    x = torch.zeros(1000, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    side = torch.cuda.Stream()
    for number, graph in enumerate(graphs):
        with torch.cuda.graph(graph, pool=pool):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side), profiler.time(f"side {number}"):
                x += 1
            main.wait_stream(side)
            with profiler.time(f"main {number}"):
                x *= 2
    for number in (0, 1, 1, 0):
        graphs[number].replay()
        assert names(seen) == [f"side {number}", f"main {number}"]
    assert x.tolist() == [30.0] * 1000


def test_graphs_that_are_deleted_while_they_run(profiler: Profiler[str], seen: Seen) -> None:
    gc.collect()  # graphs of other tests, which no capture survives if they are freed in its middle
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(50):
                with profiler.time(str(i)):
                    torch.cuda._sleep(1000)
        graph.replay()
        assert len(names(seen)) == 50
        gone = ref(graph)
        del graph
        gc.collect()
        assert gone() is None
    torch.cuda.synchronize()
    assert len(profiler._graphs) == 0


def test_graphs_outlive_the_profiler() -> None:
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with Profiler(lambda name, elapsed_ms: None) as profiler, torch.cuda.graph(graph):
        for i in range(50):
            with profiler.time(i):
                x += 1
    del profiler
    gc.collect()
    for _ in range(20):
        graph.replay()
    assert x.tolist() == [1000.0] * 1000


def test_blocks_do_not_change_the_numbers(profiler: Profiler[str], seen: Seen) -> None:
    torch.manual_seed(0)
    net = Net(profiler).cuda()
    x = torch.randn(8, 64, device="cuda")
    expected = net(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = net(x)
    graph.replay()
    assert torch.equal(out, expected)
