"""Stamps: what a graph's kernels of one thread write down of the time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_cudagraph.capture.backend import CudaBackend
from lightning_cudagraph.capture.driver import load_kernels
from lightning_cudagraph.capture.stamps import Stamp, clock_of
from lightning_cudagraph.timing.marks import StepMarks

_DEVICE = torch.device("cuda", 0)
# Of what waits on a branch: it can begin some us late.
_LAG_MS = 0.02


@pytest.fixture(params=[1, 4])
def backend(request: pytest.FixtureRequest) -> CudaBackend:
    return CudaBackend(_DEVICE, streams=request.param)


def test_they_say_what_events_say(backend: CudaBackend) -> None:
    x = torch.randn(1 << 22, device=_DEVICE)
    events = [backend.event() for _ in range(20)]

    def body() -> list[Any]:
        assert backend.stamp is not None
        stamps = []
        for number, event in enumerate(events):
            backend.mark(event)
            stamp = backend.stamp()
            backend.mark(stamp)
            stamps.append(stamp)
            for _ in range(number):
                x.sin_()
        return stamps

    graph, stamps = backend.capture(body)
    read = backend.event_times(stamps)
    with pytest.raises(RuntimeError, match="No replay has come to 20 of 20 stamps"):
        read()
    by_event = backend.event_times(events)
    before: list[float] = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        times_ms = read()
        assert times_ms == sorted(times_ms)
        assert times_ms != before
        for ours_ms, theirs_ms in zip(pairwise(times_ms[1:]), pairwise(by_event()[1:]), strict=True):
            took_ms = [late - early for early, late in (ours_ms, theirs_ms)]
            assert took_ms[0] == pytest.approx(took_ms[1], rel=0.1, abs=_LAG_MS)
        before = times_ms
    assert before[-1] > 0.5  # 190 kernels
    backend.release(graph)


@pytest.mark.parametrize("kind", ["many blocks", "large blocks"])
def test_they_do_not_wait_for_what_comes_behind_them(backend: CudaBackend, kind: str) -> None:
    """Each of these fills the device many times over, and begins as soon as the stamp before it may."""
    shape = (1 << 28,) if kind == "many blocks" else (1 << 13, 1 << 13)
    x, out = torch.ones(2, *shape, dtype=torch.bfloat16, device=_DEVICE)
    with backend.on_side_stream():
        if kind == "large blocks":
            torch.mm(x, x, out=out)

    def body() -> list[Any]:
        assert backend.stamp is not None
        stamps = []
        for _ in range(5):
            stamps.append(backend.stamp())
            backend.mark(stamps[-1])
            if kind == "many blocks":
                x.neg_()
            else:
                torch.mm(x, x, out=out)
        return stamps

    graph, stamps = backend.capture(body)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times_ms = backend.event_times(stamps)()
    took_ms = [late - early for early, late in pairwise(times_ms)]
    assert min(took_ms) > 0.1, took_ms
    assert max(took_ms) < 1.1 * min(took_ms), took_ms
    backend.release(graph)


def test_more_than_there_is_room_for_at_first(backend: CudaBackend) -> None:
    x = torch.zeros(8, device=_DEVICE)

    def body() -> list[Any]:
        assert backend.stamp is not None
        stamps = []
        for _ in range(3000):
            x.add_(1)
            stamps.append(backend.stamp())
            backend.mark(stamps[-1])
        return stamps

    graph, stamps = backend.capture(body)
    assert len({stamp.address for stamp in stamps}) == 3000
    x.zero_()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times_ms = backend.event_times(stamps)()
    assert times_ms == sorted(times_ms)
    assert x.tolist() == [6000.0] * 8
    backend.release(graph)


def test_a_capture_that_fails_leaves_nothing(backend: CudaBackend) -> None:
    x = torch.zeros(8, device=_DEVICE)

    def body(fails: bool) -> list[Any]:
        assert backend.stamp is not None
        stamps = [backend.stamp() for _ in range(50)]
        for stamp in stamps:
            x.add_(1)
            backend.mark(stamp)
        if fails:
            raise ValueError("no more cheese")
        return stamps

    with pytest.raises(ValueError, match="no more cheese"):
        backend.capture(lambda: body(True))
    graph, stamps = backend.capture(lambda: body(False))
    graph.replay()
    torch.cuda.synchronize()
    assert len(backend.event_times(stamps)()) == 50
    backend.release(graph)


def test_outside_of_captures_there_are_none(backend: CudaBackend) -> None:
    assert backend.stamp is None
    marks = StepMarks(backend, {}, has_optimizer=False)
    with marks.recording():
        torch.zeros(8, device=_DEVICE)
    assert not any(isinstance(mark, Stamp) for mark in marks._marks)
    torch.cuda.synchronize()
    assert marks.read()[0] == 0.0


@pytest.mark.parametrize("placement", ["forked", "serial"])
def test_marks_without_them(monkeypatch: pytest.MonkeyPatch, placement: Any) -> None:
    """By events between the kernels, and where the driver or the clock has no stamps."""
    backend = CudaBackend(_DEVICE)
    if placement == "forked":
        monkeypatch.setattr(backend, "_clock", None)
    x = torch.randn(64, 64, device=_DEVICE)

    def body() -> StepMarks:
        marks = StepMarks(backend, {}, placement=placement)
        with marks.recording():
            out = x @ x
            marks.forward_ended()
            out.sin_()
            marks.backward_ended()
            out.cos_()
        return marks

    graph, marks = backend.capture(body)
    assert all(isinstance(mark, torch.cuda.Event) for mark in marks._marks)
    assert marks.start is marks._marks[0]
    graph.replay()
    torch.cuda.synchronize()
    times_ms = marks.read()
    assert len(times_ms) == marks.layout.n_marks == 4
    assert 0.0 < times_ms[-1] < 10.0
    backend.release(graph)


def test_what_the_driver_does_not_take() -> None:
    assert load_kernels(b"no more cheese", ["lightning_cudagraph_stamp"]) is None
    assert load_kernels(b".version 6.0\n.target sm_70\n.address_size 64\n", ["cheese"]) is None
    assert clock_of(_DEVICE) is not None
    assert torch.ones(3, device=_DEVICE).sum().item() == 3.0
