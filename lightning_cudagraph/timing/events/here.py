"""What marks time where the code now runs: a stream of the GPU, an emulated capture, the host's clock.

Events know by themselves whether they are recorded in a capture. Outside, torch takes an external event
for an ordinary one (c10/cuda/CUDAEvent.h); inside, it becomes a node of the graph.

CUDA is not initialised for the sake of a timer: while nobody has done so, nothing runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_cudagraph.device.emulator import EmulatedGraph, HostEvent

__all__ = ["event_here", "is_captured_here"]


def is_captured_here() -> bool:
    """Whether what the calling thread issues now becomes part of a graph."""
    if EmulatedGraph.recording() is not None:
        return True
    # It asks the current stream, so that autograd's threads and forked streams are known too.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def event_here() -> Any:
    """A new timing event, to be recorded here."""
    if torch.cuda.is_initialized() and EmulatedGraph.recording() is None:
        return torch.cuda.Event(enable_timing=True, external=True)
    return HostEvent()
