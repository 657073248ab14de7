"""Translation of errors that CUDA and torch raise during a capture into `CaptureError`s."""

from __future__ import annotations

import traceback

import torch
from torch.autograd import graph
from torch.nn.parallel import distributed

from lightning_cudagraph.device.lines.user_lines import is_users, location_of
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.errors import CaptureError, CUDAGraphError

# Of training alone: other graphs have no events.
NO_TIMINGS_OR_USE = (
    "Pass `CUDAGraphCallback(timings=None)`, which needs one graph instead of two, or use"
)
_WORDS = ("captur", "cudagraph", "cuda graph")


def clear_frames(error: BaseException | None) -> None:
    """Clear the locals of the frames of an error and of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # Before Python 3.12 a profiling hook leaves a copy of the locals in each frame; this
            # empties it.
            frame.f_locals  # noqa: B018
        error = error.__cause__ or error.__context__


def meaning_of(error: BaseException) -> BaseException:
    """Translate an error that ended a capture, if CUDA or torch raised it because of the capture."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        details = text.splitlines()[0] if text else "no details"
        return CaptureError(
            f"The capture of the training step ran out of memory: {details}",
            f"{NO_TIMINGS_OR_USE} smaller batches.",
        )
    refused = any(word in text.lower() for word in _WORDS)
    said = isinstance(error, (CUDAGraphError, SentBackError))
    if said or not (isinstance(error, RuntimeError) and refused):
        return error
    reason = ""
    remedy = (
        "Keep copies between host and GPU, and waits for the GPU, out of the step: make constants on"
        " the device, or keep them in buffers (`register_buffer`)."
    )
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [frame.f_code.co_filename for frame in frames]
    if "legacy stream" in text and graph.__file__ in files:
        # Gradient accumulation nodes run on the stream that was current when they were made. A wrapper
        # makes them in its constructor and keeps them.
        reason = (
            " in a backward pass that goes on on the default stream, where something that keeps its"
            " nodes, such as a `DistributedDataParallel`, was made"
        )
        remedy = (
            "Make it on a stream of its own, as Lightning and Fabric do: `with"
            " torch.cuda.stream(torch.cuda.Stream()): model = DistributedDataParallel(model)`."
        )
    elif distributed.__file__ in files and not any(
        is_users(frame.f_code, frame.f_globals) for frame in frames[files.index(distributed.__file__) :]
    ):
        reason = ", inside of a `DistributedDataParallel`"
        remedy = (
            "Pass the wrapper to `GraphedStep(modules=...)`, so that what it does on the host is kept"
            " out of the capture."
        )
    return CaptureError(
        f"CUDA refused to capture the training step{reason}: {text.splitlines()[0]}.",
        remedy,
        location=location_of(error),
    )
