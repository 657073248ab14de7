"""What CUDA's driver tells: how far a capture has come, and when events were passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend

_LAG_MS = 0.02
T = TypeVar("T")


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cuda", 0))


def test_only_work_moves_it(backend: CudaBackend) -> None:
    x, linear = torch.randn(8, 8, device="cuda"), nn.Linear(8, 8).cuda()
    events = [backend.event() for _ in range(3)]  # they outlive the graph
    found: dict[str, Any] = {}

    def note(what: str) -> None:
        found[what] = backend.position()

    def body() -> None:
        note("begin")
        x.view(-1)
        torch.empty_like(x)
        note("views and memory")
        y = x + 1
        note("a kernel")
        backend.mark(events[0])
        note("a mark beside it")
        backend.mark(events[1], forked=False)
        note("a mark behind it")
        backend.mark(events[2], forked=False)
        note("another")
        out = linear(y)
        note("a layer")
        out.grad_fn.register_prehook(lambda gradients: note("the thread of autograd"))
        out.sum().backward()

    for _ in range(3):
        with backend.on_side_stream():
            linear(x).sum().backward()
    assert backend.position() is None
    graph, _ = backend.capture(body)
    assert None not in found.values()
    assert found["begin"] == found["views and memory"]
    assert found["a kernel"] == found["a mark beside it"]
    moving = ["begin", "a kernel", "a mark behind it", "another", "a layer", "the thread of autograd"]
    assert len({found[what] for what in moving}) == len(moving)
    graph.replay()
    torch.cuda.synchronize()
    # Stamps of the branch beside the stream come some us later than those on it.
    assert events[0].elapsed_time(events[2]) > -_LAG_MS
    backend.release(graph)


def test_times_are_those_of_torch(backend: CudaBackend) -> None:
    x = torch.randn(1 << 20, device="cuda")
    events = [backend.event() for _ in range(20)]

    def body() -> None:
        for event in events:
            backend.mark(event)
            x.sin_()

    graph, _ = backend.capture(body)
    read = backend.event_times(events)
    with pytest.raises(RuntimeError, match="cannot tell the times of 20 events: error"):
        read()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        times_ms = read()
        assert times_ms == [0.0, *(events[0].elapsed_time(event) for event in events[1:])]
        assert times_ms == sorted(times_ms)
        assert times_ms[-1] > 0
    backend.release(graph)


def test_a_kernel_that_no_dispatcher_sees(backend: CudaBackend) -> None:
    triton = pytest.importorskip("triton")
    language: Any = pytest.importorskip("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def add_one(pointer, n: language.constexpr):  # type: ignore[no-untyped-def]
        index = language.arange(0, n)
        language.store(pointer + index, language.load(pointer + index) + 1.0)

    x = torch.zeros(64, device="cuda")
    with backend.on_side_stream():
        add_one[(1,)](x, 64)
    positions = []

    def body() -> None:
        positions.append(backend.position())
        add_one[(1,)](x, 64)
        positions.append(backend.position())

    graph, _ = backend.capture(body)
    assert positions[0] != positions[1]
    backend.release(graph)


def test_the_mark_of_a_collective_holds_up_nothing(backend: CudaBackend) -> None:
    """What waits for it on a stream of its own does not hold up the computation, or its marks."""
    large = torch.randn(1 << 24, device="cuda")
    small = torch.randn(8, device="cuda")
    other = torch.cuda.Stream()

    class Work:
        """As a collective is handed out: whoever waits for it waits on the current stream."""

        def __init__(self) -> None:
            self.done = torch.cuda.Event()
            self.done.record(other)

        def wait(self) -> None:
            torch.cuda.current_stream().wait_event(self.done)

    def body() -> tuple[Any, ...]:
        begin, reduced, computed, end = (backend.event() for _ in range(4))
        backend.mark(begin)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            for _ in range(50):  # more than a millisecond
                large.sin_()
        work = Work()
        backend.mark_end(reduced, work)
        small.sin_()
        backend.mark(computed)
        work.wait()
        backend.mark(end)
        return begin, reduced, computed, end, work

    graph, (*events, _) = backend.capture(body)
    graph.replay()
    torch.cuda.synchronize()
    begin, reduced, computed, end = events
    assert begin.elapsed_time(computed) < begin.elapsed_time(reduced)
    assert begin.elapsed_time(end) > begin.elapsed_time(reduced) - _LAG_MS
    backend.release(graph)


def test_a_step_that_fails_may_have_let_go_of_its_marks(backend: CudaBackend) -> None:
    x = torch.zeros(8, device="cuda")

    def body(fails: bool) -> list[torch.cuda.Event]:
        events = [backend.event() for _ in range(50)]
        for number, event in enumerate(events):
            x.add_(1)
            backend.mark(event, forked=bool(number % 3))
        if fails:
            del events, event
            raise ValueError("no more cheese")
        return events

    for _ in range(3):
        with pytest.raises(ValueError, match="no more cheese"):
            backend.capture(lambda: body(True))
    # Also where what holds them is what the step returns, and it fails on its way out.
    with pytest.raises(ValueError, match="on the way out"):
        backend.capture(lambda: _failing_behind(lambda: body(False)))
    graph, events = backend.capture(lambda: body(False))
    x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [50.0] * 8
    assert len(backend.event_times(events)()) == 50
    backend.release(graph)


def _failing_behind(body: Callable[[], T]) -> T:
    @contextmanager
    def leaving() -> Iterator[None]:
        yield
        raise ValueError("on the way out")

    with leaving():
        return body()
