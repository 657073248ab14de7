"""How far a capture on CUDA has come: the last nodes that were put into its graph.

The driver knows it, and torch does not hand it on. Counting ops would not do: a Triton kernel passes no
dispatcher, and a view launches nothing.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

__all__ = ["position_of"]

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@lru_cache(maxsize=1)
def _driver_function() -> Any:
    """`cuStreamGetCaptureInfo_v2`, which drivers since CUDA 11.3 have, or None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def position_of(stream: torch.cuda.Stream) -> tuple[int, ...] | None:
    """What the next work on a stream that is captured would wait for.

    Args:
        stream: the stream.

    Returns:
        The capture, and the nodes of its graph: the same as long as nothing is issued. None if the
        stream is not captured, or if the driver does not tell.
    """
    function = _driver_function()
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
