"""The data flow of a capture on one stream tells how many streams are of use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.models import WORKLOADS
from lightning_cudagraph.capture.decisions.stream_choice import streams_of
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow


def _captured(step: Callable[[], Any], streams: int = 1) -> tuple[EmulatedGraph, RecordedFlow]:
    backend = EmulatorBackend(streams)
    backend.records_flow = True
    step()
    graph, _ = backend.capture(step)
    assert isinstance(graph, EmulatedGraph)
    assert backend.flow is not None
    return graph, backend.flow


def _benchmark(name: str) -> Callable[[], None]:
    """The training step of a model of the benchmarks."""
    workload = next(each for each in WORKLOADS if each.name == name)
    module, batch = workload.make(False), workload.batch(False)
    module.log = lambda *args: None
    optimizer: Any = module.configure_optimizers()

    def step() -> None:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()

    return step


def _chain() -> Callable[[], Tensor]:
    x = torch.randn(4)

    def step() -> Tensor:
        y = x
        for _ in range(50):
            y = y.cos()
        return y

    return step


# On an H200, trials of 2, 4 and 8 found 4, 8 and 4 the fastest; for the first, 8 as fast as 4.
@pytest.mark.parametrize(
    ("make", "useful"),
    [
        (lambda: _benchmark("actor-critic"), [5, 4, 2]),
        (lambda: _benchmark("DLRM 128"), [8, 4, 2]),
        (lambda: _benchmark("two critics"), [4, 2]),
        (_chain, []),
    ],
)
def test_the_streams_that_are_of_use(make: Callable[[], Any], useful: list[int]) -> None:
    _, flow = _captured(make())
    assert streams_of(flow) == useful


def test_a_capture_on_several_streams_places_ops_as_the_record_does() -> None:
    step = _benchmark("two critics")
    _, flow = _captured(step)
    graph, _ = _captured(step, 4)
    assert flow.on(4) == (graph.tape._flow.end, graph.tape._flow.used)


def test_all_streams_wait_for_what_is_no_op_of_torchs() -> None:
    x = torch.randn(4)
    backend = EmulatorBackend()
    backend.records_flow = True

    def step() -> None:
        for name in ("cos", "sin"):
            getattr(x, name)()
            backend.cut()  # the position in the capture moves without an op
            getattr(x, name)()

    backend.capture(step)
    assert backend.flow is not None
    assert [op is None for op in backend.flow.ops] == [False, True, False, False, True, False]
    assert backend.flow.on(4) == (pytest.approx(5, abs=0.01), 2)


def test_only_what_is_of_the_device_counts() -> None:
    flow = RecordedFlow("cuda", lambda: 0)
    x = torch.ones(3)
    run = lambda func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    assert flow.run(torch.ops.aten.add.Tensor, (x, x), {}, run).tolist() == [2.0] * 3
    assert not flow.ops


@pytest.mark.parametrize("waits", [False, True])
def test_only_the_wait_for_a_collective_is_a_barrier(waits: bool) -> None:
    position = [0]
    flow = RecordedFlow("cpu", lambda: position[0])
    x = torch.ones(4)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            return None  # nothing on the stream of the step
        position[0] += 1
        return func(*args, **kwargs)

    flow.run(torch.ops.aten.cos.default, (x,), {}, run)
    flow.run(torch.ops.c10d.allreduce_.default, ([x],), {}, run)
    if waits:
        position[0] += 1  # the stream waits
    flow.run(torch.ops.aten.sin.default, (x,), {}, run)
    assert [op is None for op in flow.ops] == ([False, True, False] if waits else [False, False])
    # In a chain too, parts of an optimizer's step may run beside all-reduces.
    assert streams_of(flow) == [2]
    flow.has_all_reduces = False
    assert streams_of(flow) == ([] if waits else [2])
