"""What CUDA's driver tells, and torch does not hand on, or not quickly.

How far a capture has come, and what comes next waits for: the last nodes of its graph. Counting ops
would not do: a Triton kernel passes no dispatcher, and a view launches nothing.

When events were passed: torch asks for each pair whether both have been, and sets the device, before it
asks for the time (c10/cuda/CUDAEvent.h). For a hundred events after every step that is too long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch

__all__ = ["event_times", "let_wait", "position_of"]

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


@lru_cache(maxsize=2)
def _driver_function(*names: str) -> Any:
    """The first of these functions that the driver has, or None without one."""
    try:
        # Calls keep the interpreter's lock: none of them waits, and who gives it away waits for it.
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    return next((getattr(driver, name) for name in names if hasattr(driver, name)), None)


def position_of(stream: torch.cuda.Stream) -> tuple[int, ...] | None:
    """What the next work on a stream that is captured would wait for.

    Args:
        stream: the stream.

    Returns:
        The capture, and the nodes of its graph: the same as long as nothing is issued. None if the
        stream is not captured, or if the driver does not tell.
    """
    function = _driver_function("cuStreamGetCaptureInfo_v2")
    if function is None:
        return None
    status, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, number = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    failed = function(
        ctypes.c_void_p(stream.cuda_stream),
        *map(ctypes.byref, (status, capture, graph, nodes, number)),
    )
    if failed or status.value != _ACTIVE:
        return None
    return capture.value, *sorted(nodes[i] or 0 for i in range(number.value))


def let_wait(stream: torch.cuda.Stream, nodes: Collection[int]) -> bool:
    """Let the next work on a stream that is captured wait for these nodes, and for nothing else.

    Args:
        stream: the stream.
        nodes: of the graph of its capture. Who drops others sees to it that they are waited for
            elsewhere, before the capture ends.

    Returns:
        Whether the driver can do that, and has done it.
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
    """What reads when events were passed.

    Args:
        events: they have been recorded, be it in a capture.

    Returns:
        A function that gives milliseconds after the first, one for each. It may be called whenever all
        have been passed, and raises a RuntimeError otherwise.
    """
    # The newer one (CUDA 12.8) does not look for errors of work that is pending. While the device is
    # busy, that takes the older one, and torch's queries, 3 to 4 us a pair (H200); the newer, 0.5 to 1.
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
