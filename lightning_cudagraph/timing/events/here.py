"""Timing events for the calling thread: of a CUDA stream, an emulated capture, or the host's clock.

An external event becomes a node of the graph if it is recorded in a capture; outside, torch treats it as
an ordinary one (c10/cuda/CUDAEvent.h). A timer does not initialise CUDA: before other code has done so,
nothing runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_cudagraph.device.emulator import EmulatedGraph, HostEvent

__all__ = ["event_here", "is_captured_here"]


def is_captured_here() -> bool:
    """True if the calling thread issues into a capture."""
    if EmulatedGraph.recording() is not None:
        return True
    # A query of the current stream, which includes autograd's threads and forked streams.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def event_here() -> Any:
    """A new timing event, for the calling thread to record."""
    if torch.cuda.is_initialized() and EmulatedGraph.recording() is None:
        return torch.cuda.Event(enable_timing=True, external=True)
    return HostEvent()
