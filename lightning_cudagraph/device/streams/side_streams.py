"""The side stream of warm-up and capture, and the memory pool of its cuBLAS workspaces.

cuBLAS and cuBLASLt write partial results into workspaces, which torch keeps for each handle (one per
thread) and stream, for the whole process. A graph holds their addresses. Code that clears torch's
workspaces (Lightning at the end of every run, Inductor's own CUDA graphs, newer versions of torch when a
graph captured on the stream is destroyed) frees memory that live graphs use: a second Trainer in a
callback is enough. Here the workspaces come from a memory pool that lives as long as the graphs: memory
that is cleared stays in the pool, as scratch memory of these graphs.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.streams.driver import new_stream

# Frees the workspaces of all handles on all streams.
_clear_workspaces: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

# From this number on, streams of finished runs are collected before another is made.
_MANY_STREAMS = 16


def _matmul(operand: Tensor, pool: torch.cuda.MemPool) -> None:
    with torch.cuda.use_mem_pool(pool, operand.device):
        torch.mm(operand, operand)
        # A product with a bias goes to cuBLASLt if no size is one (aten/src/ATen/native/cuda/Blas.cpp).
        # In some versions of torch cuBLASLt shares cuBLAS's workspace, in others it has its own
        # (aten/src/ATen/cuda/CublasHandlePool.cpp).
        torch.addmm(operand[0], operand, operand)


class _PooledStream:
    """A stream, and the memory pool with the workspaces on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = new_stream(device)
        with torch.cuda.device(device):  # a pool is made for the current device
            self.pool = torch.cuda.MemPool()
        with torch.cuda.stream(self.stream):
            self.keep_workspaces()
        self.note_workspaces(torch.cuda.memory_snapshot())

    def keep_workspaces(self) -> None:
        """Make missing workspaces of the current stream, in the pool."""
        # Only for the handle of this thread, in which backward passes of captured steps run too.
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            _matmul(torch.zeros(16, 16, device=self.device), self.pool)

    def note_workspaces(self, snapshot: list[dict[str, Any]]) -> None:
        """Record the size of the pool with all workspaces in it."""
        self._made_bytes = self._used_bytes(snapshot)

    def has_workspaces(self, snapshot: list[dict[str, Any]]) -> bool:
        """True if all workspaces are in the pool; called after `keep_workspaces`.

        They are not if other code has multiplied matrices on the stream after they were cleared.
        """
        return self._used_bytes(snapshot) >= self._made_bytes

    def segments(self, snapshot: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # Filtered here: a snapshot of one pool over-releases the integers of the pool's id in torch
        # (pytorch#196366). From the 257th pool of a process on, Python frees them, and crashes later.
        pool = self.pool.id
        return [segment for segment in snapshot if segment["segment_pool_id"] == pool]

    def _used_bytes(self, snapshot: list[dict[str, Any]]) -> int:
        return sum(segment["active_size"] for segment in self.segments(snapshot))


# All pooled streams of the process. Graphs hold addresses in their pools, so they are never released.
_POOLED: list[_PooledStream] = []
# Those without graphs, for the next runs: at most as many as were ever in use at the same time.
_FREE: list[_PooledStream] = []
# Streams for events that no backend uses.
_FREE_OF_EVENTS: dict[torch.device, list[torch.cuda.Stream]] = {}
# Held while one is taken, but not while one is returned: a garbage collection may do so at any time.
_TAKING = threading.Lock()


def _given_back(device: torch.device) -> _PooledStream | None:
    """A returned stream with all workspaces in its pool; None if there is none."""
    for each in [each for each in _FREE if each.device == device]:
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
            # Most may belong to finished runs that wait for a collection. Captures collect, but runs may
            # end before their capture.
            gc.collect()
            taken = _given_back(device)
        if taken is None:
            taken = _PooledStream(device)
            _POOLED.append(taken)
        return taken


class EventStream:
    """A stream for events and waits, reserved until this object is collected."""

    def __init__(self, device: torch.device) -> None:
        with _TAKING:
            free = _FREE_OF_EVENTS.setdefault(device, [])
            self.stream = free.pop() if free else new_stream(device)
        weakref.finalize(self, free.append, self.stream)


class SideStream:
    """The side stream of warm-up and capture, reserved until this object is collected."""

    def __init__(self, device: torch.device) -> None:
        self._pooled = _take(device)
        self.stream = self._pooled.stream
        weakref.finalize(self, _FREE.append, self._pooled)

    def keep_workspaces(self) -> None:
        """Make missing or cleared workspaces in the pool, with this stream current.

        Called before work on the stream that a graph will hold or be compared with.
        """
        self._pooled.keep_workspaces()

    def workspace_bytes(self, snapshot: list[dict[str, Any]]) -> int:
        segments = self._pooled.segments(snapshot)
        return sum(segment["total_size"] for segment in segments)


def keep_all_workspaces(sides: Sequence[SideStream]) -> None:
    """Make all workspaces of the streams of a capture, all idle, lie in their pools."""
    for side in sides:
        with torch.cuda.stream(side.stream):
            side.keep_workspaces()
    snapshot = torch.cuda.memory_snapshot()
    streams = [side._pooled for side in sides]
    if _clear_workspaces is None or all(each.has_workspaces(snapshot) for each in streams):
        return
    # Workspaces cleared in the middle of a step were made again outside the pools.
    _clear_workspaces()
    for side in sides:
        with torch.cuda.stream(side.stream):
            side.keep_workspaces()
    snapshot = torch.cuda.memory_snapshot()
    for each in streams:
        each.note_workspaces(snapshot)
