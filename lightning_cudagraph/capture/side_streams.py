"""The stream of warm-up and capture, with the scratch memory that cuBLAS uses on it.

cuBLAS writes partial results into a workspace that torch keeps for each of its handles (one a thread) on
each stream, for the whole process. A graph holds its address. Whoever clears torch's workspaces
(Lightning at the end of every run, Inductor's own CUDA graphs) frees the memory under the graphs that
are alive: a second Trainer in a callback is enough. Here it comes from a pool that nobody else takes
from, and that lives as long as the graphs: when it is cleared, it stays scratch memory of theirs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["SideStream"]

# torch has 32 streams of a priority, and hands them out in turn.
_STREAMS_OF_TORCH = 32


class _MatmulInBackward(torch.autograd.Function):
    """A matrix product in autograd's thread for the device, which has a cuBLAS handle of its own."""

    @staticmethod
    def forward(ctx: Any, operand: Tensor, pool: torch.cuda.MemPool) -> Tensor:
        ctx.pool = pool
        ctx.save_for_backward(operand)
        return operand.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (operand,) = ctx.saved_tensors
        # First, because cuBLAS warns in a thread in which nothing has called CUDA before.
        gradient = torch.zeros_like(operand)
        _matmul(operand, ctx.pool)
        return gradient, None


def _matmul(operand: Tensor, pool: torch.cuda.MemPool) -> None:
    with torch.cuda.use_mem_pool(pool, operand.device):
        torch.mm(operand, operand)
        # cuBLASLt has workspaces of its own, unless torch was told to unify them
        # (aten/src/ATen/cuda/CUDABlas.cpp); a product with a bias goes there.
        torch.addmm(operand[0], operand, operand)


class _Lane:
    """A stream, and the pool with the workspaces of the handles that work on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        for _ in range(_STREAMS_OF_TORCH):
            self.stream = torch.cuda.Stream(device)
            self.pool = torch.cuda.MemPool()
            with torch.cuda.stream(self.stream):
                self.keep_workspaces()
            if self.segments():
                return
            # Somebody has multiplied matrices on this stream before: its workspace lies elsewhere.

    def keep_workspaces(self) -> None:
        """On the current stream: have the workspaces made in the pool, where there are none."""
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            operand = torch.zeros(16, 16, device=self.device, requires_grad=True)
            _matmul(operand.detach(), self.pool)
            _MatmulInBackward.apply(operand, self.pool).sum().backward()  # type: ignore[no-untyped-call]

    def segments(self) -> list[dict[str, Any]]:
        """What the pool has taken of the device's memory."""
        # Out of all: asked for those of one pool, torch gives away references to the numbers of its
        # name that are not its own (pytorch#196366). From the 257th pool of a process on, Python frees
        # them for it, and crashes some time later.
        pool = self.pool.id
        return [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool]


# Those whose graphs are gone, for the next ones: as many as were ever in use at the same time.
_FREE: list[_Lane] = []


class SideStream:
    """The one side stream of warm-up and capture.

    Args:
        device: a CUDA device.

    Attributes:
        stream: the stream. It serves nobody else until this object is gone.
    """

    def __init__(self, device: torch.device) -> None:
        free = next((lane for lane in _FREE if lane.device == device), None)
        if free is not None:
            _FREE.remove(free)
        self._lane = free or _Lane(device)
        self.stream = self._lane.stream
        weakref.finalize(self, _FREE.append, self._lane)

    def keep_workspaces(self) -> None:
        """Before work on the stream, as the current one, that a graph will hold or be like.

        Workspaces that were cleared are made anew in their pool.
        """
        self._lane.keep_workspaces()

    def workspace_bytes(self) -> int:
        """Device memory that the workspaces take, in bytes."""
        return sum(segment["total_size"] for segment in self._lane.segments())
