"""Calls into CUDA's driver for what torch does not offer, or not fast enough.

Streams of torch's pool may be given to several: to NCCL, to the user, to a capture.

The dependencies of a stream under capture (the last nodes of its graph) show how far the capture has
come. Counting ops would not do: a Triton kernel passes no dispatcher, and a view launches nothing.

Times of events: for each pair, torch queries both events and sets the device before it reads the time
(c10/cuda/CUDAEvent.h). For a hundred events after every step that is too slow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch

from lightning_cudagraph.errors import CUDAGraphError

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, as the streams of torch's pool


@lru_cache(maxsize=2)
def _driver_function(*names: str) -> Any:
    """The first of these functions that the driver has; None if it has none, or without a driver."""
    try:
        # Calls through `PyDLL` keep the GIL: none blocks, and taking the GIL again would take time.
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    return next((getattr(driver, name) for name in names if hasattr(driver, name)), None)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that torch gives to no other code, and that is never destroyed.

    Raises:
        CUDAGraphError: the driver cannot make it.
    """
    function = _driver_function("cuStreamCreate")
    stream, error = ctypes.c_void_p(), -1
    with torch.cuda.device(device):
        torch.cuda.Event().record()  # makes the device's context that of this thread, in captures too
        if function is not None:
            error = function(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    if error or stream.value is None:
        raise CUDAGraphError(
            f"CUDA's driver (libcuda.so.1) made no stream for captures: error {error}."
            ' Pass `backend="off"` to train without graphs.'
        )
    return torch.cuda.ExternalStream(stream.value, device=device)


def position_of(stream: torch.cuda.Stream) -> tuple[int, ...] | None:
    """The dependencies of the next work on a stream under capture.

    Returns:
        The id of the capture and the nodes of its graph: unchanged as long as nothing is issued. None if
        the stream is not under capture, or if the driver lacks the function.
    """
    function = _driver_function("cuStreamGetCaptureInfo_v2")
    if function is None:
        return None
    status, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, number = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    failed = function(
        ctypes.c_void_p(stream.cuda_stream), *map(ctypes.byref, (status, capture, graph, nodes, number))
    )
    if failed or status.value != _ACTIVE:
        return None
    return capture.value, *sorted(nodes[i] or 0 for i in range(number.value))


def let_wait(stream: torch.cuda.Stream, nodes: Collection[int]) -> bool:
    """Replace the dependencies of the next work on a stream under capture by these nodes.

    Args:
        nodes: nodes of the graph under capture. Nodes that are dropped must be waited for elsewhere
            before the capture ends.

    Returns:
        True if the driver has done so; False if it failed or lacks the function.
    """
    function = _driver_function("cuStreamUpdateCaptureDependencies")
    if function is None:
        return False
    array = (ctypes.c_void_p * max(1, len(nodes)))(*nodes)
    failed = function(
        ctypes.c_void_p(stream.cuda_stream),
        array,
        ctypes.c_size_t(len(nodes)),
        ctypes.c_uint(_SET_DEPENDENCIES),
    )
    return not failed


def event_times(events: Sequence[torch.cuda.Event]) -> Callable[[], list[float]]:
    """Build a reader of the times of events.

    Returns:
        A function that returns for each event the milliseconds since the first. It raises a RuntimeError
        if one of them has not completed.
    """
    # `_v2` (CUDA 12.8) does not look for errors of pending work. While the device is busy, it takes 0.5
    # to 1 us a pair (H200); the older function, and torch's queries, 3 to 4.
    function = _driver_function("cuEventElapsedTime_v2", "cuEventElapsedTime")
    if function is None:
        return lambda: [0.0, *map(events[0].elapsed_time, events[1:])]
    times = (ctypes.c_float * len(events))()
    size = ctypes.sizeof(ctypes.c_float)
    targets = [ctypes.byref(times, size * index) for index in range(1, len(events))]
    first, *others = [ctypes.c_void_p(event.cuda_event) for event in events]

    def read() -> list[float]:
        if error := next(filter(None, map(function, targets, repeat(first), others)), 0):
            raise RuntimeError(f"CUDA cannot tell the times of {len(events)} events: error {error}.")
        return list(times)

    return read
