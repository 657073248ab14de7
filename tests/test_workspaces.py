"""Which streams a capture is given, where CUDA and cuBLAS are simulated: who multiplies where, and when.

That real workspaces lie where they should is tested on a GPU (`tests/gpu/test_side_streams.py`).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cudagraph.device.streams import side_streams
from lightning_cudagraph.device.streams.side_streams import (
    EventStream,
    SideStream,
    keep_all_workspaces,
)

_DEVICE = torch.device("cuda", 0)
_STREAMS = 40
_WORKSPACE_BYTES = 32 << 20
_DEFAULT_POOL = (0, 0)


class Torch:
    """Streams, and a workspace for each, made where it is first asked for.

    Attributes:
        workspaces: for each stream that has one, the pool that it lies in.
    """

    def __init__(self) -> None:
        self.workspaces: dict[int, tuple[int, int]] = {}
        self._streams = 0
        self._pools = 0

    def new_stream(self, device: torch.device) -> Any:
        self._streams += 1
        return SimpleNamespace(cuda_stream=1000 + self._streams)

    def new_pool(self) -> Any:
        self._pools += 1
        return SimpleNamespace(id=(0, self._pools))

    def multiply(self, stream: int, pool: tuple[int, int] = _DEFAULT_POOL) -> None:
        self.workspaces.setdefault(stream, pool)

    def snapshot(self) -> list[dict[str, Any]]:
        # Results of products were in each pool, too.
        small = [
            {"stream": 0, "segment_pool_id": (0, n + 1), "active_size": 0} for n in range(self._pools)
        ]
        return small + [
            {"stream": stream, "segment_pool_id": pool, "active_size": _WORKSPACE_BYTES}
            for stream, pool in self.workspaces.items()
        ]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Torch:
    simulated = Torch()
    monkeypatch.setattr(side_streams, "new_stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "MemPool", simulated.new_pool)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", simulated.snapshot)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(side_streams, "_clear_workspaces", simulated.workspaces.clear)
    monkeypatch.setattr(side_streams, "_POOLED", [])
    monkeypatch.setattr(side_streams, "_FREE", [])
    monkeypatch.setattr(side_streams, "_FREE_OF_EVENTS", {})
    monkeypatch.setattr(
        side_streams._PooledStream,
        "keep_workspaces",
        lambda pooled: simulated.multiply(pooled.stream.cuda_stream, pooled.pool.id),
    )
    return simulated


def _is_own(side: SideStream, simulated: Torch) -> bool:
    return simulated.workspaces[side.stream.cuda_stream] == side._pooled.pool.id


def test_no_two_are_given_the_same_stream(simulated: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    # All are in use, so that garbage need not be collected for each of many.
    monkeypatch.setattr(side_streams, "_MANY_STREAMS", 2 * _STREAMS)
    kinds = [SideStream(_DEVICE) for _ in range(_STREAMS)], [EventStream(_DEVICE) for _ in range(5)]
    taken = [each.stream.cuda_stream for kind in kinds for each in kind]
    assert len(set(taken)) == _STREAMS + 5


def test_one_that_is_given_back_is_taken_again(simulated: Torch) -> None:
    side = SideStream(_DEVICE)
    first = side.stream.cuda_stream
    del side
    simulated.workspaces.clear()
    side = SideStream(_DEVICE)
    assert side.stream.cuda_stream == first
    assert _is_own(side, simulated)
    assert SideStream(_DEVICE).stream.cuda_stream != first


def test_one_that_others_have_used_since_is_not_taken_again(simulated: Torch) -> None:
    side = SideStream(_DEVICE)
    first = side.stream.cuda_stream
    del side
    simulated.workspaces.clear()
    simulated.multiply(first)
    side = SideStream(_DEVICE)
    assert side.stream.cuda_stream != first
    assert _is_own(side, simulated)


def test_what_others_made_on_the_streams_is_not_for_a_capture(simulated: Torch) -> None:
    sides = [SideStream(_DEVICE) for _ in range(3)]
    elsewhere = simulated.new_stream(_DEVICE).cuda_stream
    simulated.multiply(elsewhere)
    keep_all_workspaces(sides)
    assert elsewhere in simulated.workspaces  # nothing was cleared, because nothing was in the way
    simulated.workspaces.clear()
    simulated.multiply(sides[1].stream.cuda_stream)  # such as the rest of a step, after another's end
    keep_all_workspaces(sides)
    assert all(_is_own(side, simulated) for side in sides)


def test_those_of_runs_that_are_over_are_not_in_use(simulated: Torch) -> None:
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(2 * _STREAMS):
            over = SimpleNamespace(side=SideStream(_DEVICE))
            over.itself = over  # as a trainer and what belongs to it refer to one another
        assert len({pooled.stream.cuda_stream for pooled in side_streams._POOLED}) < _STREAMS
    finally:
        if was_on:
            gc.enable()


def test_two_threads_are_not_given_the_same(simulated: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    SideStream(_DEVICE)  # given back at once
    found: list[SideStream] = []
    other = threading.Thread(target=lambda: found.append(SideStream(_DEVICE)))
    keep: Callable[[Any], None] = side_streams._PooledStream.keep_workspaces

    def keep_and_let_the_other_in(pooled: Any) -> None:
        if other.ident is None:
            other.start()
            other.join(timeout=0.1)  # it would be through by now, if it did not have to wait
        keep(pooled)

    monkeypatch.setattr(side_streams._PooledStream, "keep_workspaces", keep_and_let_the_other_in)
    found.append(SideStream(_DEVICE))
    other.join()
    assert len({side.stream.cuda_stream for side in found}) == 2


def test_a_stream_for_events_is_taken_again(simulated: Torch) -> None:
    events = [EventStream(_DEVICE) for _ in range(2)]
    first = {each.stream.cuda_stream for each in events}
    events.clear()
    events = [EventStream(_DEVICE) for _ in range(3)]
    assert len({each.stream.cuda_stream for each in events} - first) == 1
    other = EventStream(torch.device("cuda", 1))
    assert other.stream.cuda_stream not in {each.stream.cuda_stream for each in events}
