"""The stream of warm-up and capture, with the scratch memory that cuBLAS uses on it.

cuBLAS and cuBLASLt write partial results into workspaces that torch keeps for each handle (one a thread)
on each stream, for the whole process. A graph holds their addresses. Code that clears torch's workspaces
(Lightning at the end of every run, Inductor's own CUDA graphs, newer versions of torch whenever a graph
that was captured on the stream goes) frees the memory under the graphs that are alive: a second Trainer
in a callback is enough. Here it comes from a pool of its own, which lives as long as the graphs: when it
is cleared, it stays scratch memory of theirs.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SideStream", "event_stream", "keep_all_workspaces"]

# Frees the workspaces of all handles on all streams.
_clear_workspaces: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

# torch has 32 streams of a priority, and hands them out in turn.
_STREAMS_OF_TORCH = 32
# From so many on, those of runs that are over are looked for before there is one more.
_MANY_STREAMS = 16


def _matmul(operand: Tensor, pool: torch.cuda.MemPool) -> None:
    with torch.cuda.use_mem_pool(pool, operand.device):
        torch.mm(operand, operand)
        # A product with a bias goes to cuBLASLt if no size is one (aten/src/ATen/native/cuda/Blas.cpp).
        # That has a workspace of its own, unless it shares cuBLAS's, which depends on the version of
        # torch (aten/src/ATen/cuda/CublasHandlePool.cpp).
        torch.addmm(operand[0], operand, operand)


class _PooledStream:
    """A stream, and the pool with the workspaces of the handles that work on it.

    Attributes:
        shares: the stream is that of others, too, because there was no other.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        own = _stream_of_ones_own(device)
        self.shares = own is None
        self.stream = own or _shared_stream(device)
        with torch.cuda.device(device):  # a pool is made for the current device
            self.pool = torch.cuda.MemPool()
        with torch.cuda.stream(self.stream):
            self.keep_workspaces()
        self.note_workspaces(torch.cuda.memory_snapshot())

    def keep_workspaces(self) -> None:
        """On the current stream: have the workspaces made in the pool, where there are none."""
        # Of this thread's handle alone: backward passes of captured steps run in it too.
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            _matmul(torch.zeros(16, 16, device=self.device), self.pool)

    def note_workspaces(self, snapshot: list[dict[str, Any]]) -> None:
        """Note that all of them are in the pool."""
        self._made_bytes = self._used_bytes(snapshot)

    def has_workspaces(self, snapshot: list[dict[str, Any]]) -> bool:
        """Tell if they are in the pool, as they were at first, once `keep_workspaces` has been called.

        They are not if others have multiplied matrices on the stream after they had been cleared.
        """
        return self._used_bytes(snapshot) >= self._made_bytes

    def segments(self, snapshot: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The segments of the device's memory that the pool has taken."""
        # Out of all: asked for those of one pool, torch gives away references to the numbers of its
        # name that are not its own (pytorch#196366). From the 257th pool of a process on, Python frees
        # them for it, and crashes some time later.
        pool = self.pool.id
        return [segment for segment in snapshot if segment["segment_pool_id"] == pool]

    def _used_bytes(self, snapshot: list[dict[str, Any]]) -> int:
        return sum(segment["active_size"] for segment in self.segments(snapshot))


# All of a process that are not shared. Their graphs hold addresses in their pools, and so they are
# never given up.
_POOLED: list[_PooledStream] = []
# Those whose graphs are gone, for the next ones: as many as were ever in use at the same time.
_FREE: list[_PooledStream] = []
# Held while one is taken. Not while one is given back, which a garbage collection may do at any time.
_TAKING = threading.Lock()


def _stream_of_ones_own(device: torch.device) -> torch.cuda.Stream | None:
    """A stream on which there is no memory of others: no workspaces either, of whatever handle."""
    pooled = {each.stream.cuda_stream for each in _POOLED}
    others = {s["stream"] for s in torch.cuda.memory_snapshot() if s["active_size"]} - pooled
    streams = (torch.cuda.Stream(device) for _ in range(_STREAMS_OF_TORCH))
    return next((stream for stream in streams if stream.cuda_stream not in pooled | others), None)


def _shared_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which others have memory; that is said."""
    warnings.warn(
        f"lightning_cudagraph: each of the {_STREAMS_OF_TORCH} streams that torch hands out is in use"
        " already, so that graphs share cuBLAS's scratch memory with others. They may come to wrong"
        " numbers where both run at the same time, or once it is freed, as Lightning does at the end of"
        " every run. Make fewer streams (`torch.cuda.Stream`), or fewer graphs at the same time.",
        stacklevel=2,
    )
    # Scratch memory of a pooled stream at least stays where it is.
    pooled = {each.stream.cuda_stream for each in _POOLED}
    streams = [torch.cuda.Stream(device) for _ in range(_STREAMS_OF_TORCH)]
    return next((stream for stream in streams if stream.cuda_stream in pooled), streams[0])


def _given_back(device: torch.device) -> _PooledStream | None:
    """One that has been in use before, and has its workspaces to itself."""
    for each in [each for each in _FREE if each.device == device and not each.shares]:
        with torch.cuda.stream(each.stream):
            each.keep_workspaces()
        if each.has_workspaces(torch.cuda.memory_snapshot()):
            _FREE.remove(each)
            return each
    return None


def _take(device: torch.device) -> _PooledStream:
    with _TAKING:
        taken = _given_back(device)
        if taken is None and len(_POOLED) >= _MANY_STREAMS:
            # Most may be of runs that are over, and wait for a collection, which captures do, but not
            # runs that end before theirs.
            gc.collect()
            taken = _given_back(device)
        if taken is None:
            taken = _PooledStream(device)
            if not taken.shares:
                _POOLED.append(taken)
        return taken


def event_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for events and waits; not one on which graphs are captured, if there are others."""
    pooled = {each.stream.cuda_stream for each in _POOLED}
    streams = (torch.cuda.Stream(device) for _ in range(_STREAMS_OF_TORCH))
    apart = (stream for stream in streams if stream.cuda_stream not in pooled)
    return next(apart, None) or torch.cuda.Stream(device)


class SideStream:
    """The one side stream of warm-up and capture.

    Attributes:
        stream: the stream. It has no other use until this object is gone.
    """

    def __init__(self, device: torch.device) -> None:
        self._pooled = _take(device)
        self.stream = self._pooled.stream
        weakref.finalize(self, _FREE.append, self._pooled)

    def keep_workspaces(self) -> None:
        """Have the workspaces in their pool before work on the stream that a graph will hold or be like.

        The stream is the current one. Workspaces that were cleared are made once more.
        """
        self._pooled.keep_workspaces()

    def workspace_bytes(self) -> int:
        """Device memory that the workspaces take, in bytes."""
        segments = self._pooled.segments(torch.cuda.memory_snapshot())
        return sum(segment["total_size"] for segment in segments)


def keep_all_workspaces(sides: Sequence[SideStream]) -> None:
    """Have the workspaces on all streams of a capture in their pools, and nowhere else, before it.

    Args:
        sides: nothing runs on them, or on what waits for them.
    """
    for side in sides:
        with torch.cuda.stream(side.stream):
            side.keep_workspaces()
    snapshot = torch.cuda.memory_snapshot()
    streams = [side._pooled for side in sides]
    if _clear_workspaces is None or all(each.has_workspaces(snapshot) for each in streams):
        return
    # Cleared in the middle of a step, they were made by the rest of it, and not in the pools.
    _clear_workspaces()
    for side in sides:
        with torch.cuda.stream(side.stream):
            side.keep_workspaces()
    snapshot = torch.cuda.memory_snapshot()
    for each in streams:
        each.note_workspaces(snapshot)
