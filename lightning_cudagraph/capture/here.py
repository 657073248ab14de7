"""What marks time where the code now runs: a stream of the GPU, an emulated capture, the host's clock.

Events know by themselves whether they are recorded in a capture. Outside, torch takes an external event
for an ordinary one (c10/cuda/CUDAEvent.h); inside, it becomes a node of the graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lightning_cudagraph.capture.emulator import EmulatedGraph, HostEvent

__all__ = ["event_here", "is_captured_here"]


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def is_captured_here() -> bool:
    """Whether what the calling thread issues now becomes part of a graph."""
    if EmulatedGraph.recording() is not None:
        return True
    # It asks the current stream, so that autograd's threads and forked streams are known too.
    return _has_gpu() and torch.cuda.is_current_stream_capturing()


def event_here() -> Any:
    """A new timing event, to be recorded here."""
    if _has_gpu() and EmulatedGraph.recording() is None:
        return torch.cuda.Event(enable_timing=True, external=True)
    return HostEvent()
