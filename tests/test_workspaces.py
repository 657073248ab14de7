"""Which stream a capture is given, where torch and cuBLAS are simulated: who multiplies where, and when.

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
    SideStream,
    event_stream,
    keep_all_workspaces,
)

_DEVICE = torch.device("cuda", 0)
_STREAMS = side_streams._STREAMS_OF_TORCH
_WORKSPACE_BYTES = 32 << 20
_DEFAULT_POOL = (0, 0)


class Torch:
    """Streams that are handed out in turn, and a workspace for each, made where it is first asked for.

    Attributes:
        workspaces: for each stream that has one, the pool that it lies in.
    """

    def __init__(self) -> None:
        self.workspaces: dict[int, tuple[int, int]] = {}
        self._streams = 0
        self._pools = 0

    def new_stream(self, device: torch.device) -> Any:
        self._streams += 1
        return SimpleNamespace(cuda_stream=1000 + self._streams % _STREAMS)

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
    monkeypatch.setattr(torch.cuda, "Stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "MemPool", simulated.new_pool)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", simulated.snapshot)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(side_streams, "_clear_workspaces", simulated.workspaces.clear)
    monkeypatch.setattr(side_streams, "_POOLED", [])
    monkeypatch.setattr(side_streams, "_FREE", [])
    monkeypatch.setattr(
        side_streams._PooledStream,
        "keep_workspaces",
        lambda pooled: simulated.multiply(pooled.stream.cuda_stream, pooled.pool.id),
    )
    return simulated


def _is_own(side: SideStream, simulated: Torch) -> bool:
    return simulated.workspaces[side.stream.cuda_stream] == side._pooled.pool.id


def test_a_stream_on_which_others_have_multiplied_is_passed_over(simulated: Torch) -> None:
    streams = [simulated.new_stream(_DEVICE).cuda_stream for _ in range(_STREAMS)]
    for stream in streams[:5] + streams[6:]:
        simulated.multiply(stream)
    side = SideStream(_DEVICE)
    assert side.stream.cuda_stream == streams[5]
    assert _is_own(side, simulated)


@pytest.fixture
def none_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams are in use, so that garbage need not be collected for each of many."""
    monkeypatch.setattr(side_streams, "_MANY_STREAMS", 2 * _STREAMS)


def test_no_two_are_given_the_same_stream(simulated: Torch, none_is_over: None) -> None:
    sides = [SideStream(_DEVICE) for _ in range(_STREAMS // 2)]
    simulated.workspaces.clear()  # then the streams of the first do not show by their memory
    for _ in range(_STREAMS // 2):
        simulated.new_stream(_DEVICE)
    sides += [SideStream(_DEVICE) for _ in range(_STREAMS // 2)]
    assert len({side.stream.cuda_stream for side in sides}) == _STREAMS


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


@pytest.mark.parametrize("used", [0, 2])
def test_it_is_said_when_there_is_no_stream_left(simulated: Torch, used: int) -> None:
    sides = [SideStream(_DEVICE) for _ in range(used)]
    for _ in range(_STREAMS):
        simulated.multiply(simulated.new_stream(_DEVICE).cuda_stream)
    with pytest.warns(UserWarning, match=f"each of the {_STREAMS} streams of torch's pool is in use"):
        side = SideStream(_DEVICE)
    pool = simulated.workspaces[side.stream.cuda_stream]
    # Scratch memory of a pooled stream is never freed; that of others may be.
    assert pool in {other._pooled.pool.id for other in sides} if used else pool == _DEFAULT_POOL


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


def test_one_that_shares_is_not_taken_again_without_a_word(simulated: Torch) -> None:
    for _ in range(_STREAMS):
        simulated.multiply(simulated.new_stream(_DEVICE).cuda_stream)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is in use, so"):
            SideStream(_DEVICE)  # given back at once
    simulated.workspaces.clear()
    side = SideStream(_DEVICE)
    assert _is_own(side, simulated)


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


def test_a_stream_for_events_is_not_that_of_a_capture(simulated: Torch, none_is_over: None) -> None:
    sides = [SideStream(_DEVICE) for _ in range(_STREAMS - 1)]
    taken = {side.stream.cuda_stream for side in sides}
    assert all(event_stream(_DEVICE).cuda_stream not in taken for _ in range(3))
    sides.append(SideStream(_DEVICE))
    assert event_stream(_DEVICE).cuda_stream in {side.stream.cuda_stream for side in sides}
