"""Autocast, in what an op consists of, as it is without the modes of a capture.

Below a mode of the dispatcher, torch leaves all out that is above it, autocast too
(aten/src/ATen/core/PythonFallbackKernel.cpp). An op that comes whole to the mode, and calls others, is
then computed in fp32 where it is in bf16 without the mode. What was on where the dispatcher was entered,
torch remembers.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["PRIVATE_NAMES", "reaching"]

# Of torch.
PRIVATE_NAMES = ("_RestorePythonTLSSnapshot", "_dispatch_has_kernel_for_dispatch_key")

# Of torch's ops those that call others that autocast knows; and what calls them, if that is another op.
_CALL_OTHERS = {
    "aten::_foreach_mm": None,
    "aten::_trilinear": "aten::bilinear",
    "aten::affine_grid_generator": None,
    "aten::linalg_pinv": "aten::pinverse",
}
_TORCHS = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "quantized"})
_CALLS_OF_OPS = (OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__)


def reaching(func: Any, device_type: str) -> AbstractContextManager[Any]:
    """Inside, below a mode, an op is run with autocast on if it would be without the mode.

    Args:
        func: the op.
        device_type: the type of the device that is captured.
    """
    if not _calls_others(func, device_type) or not _is_on(device_type) or _is_in_another(func):
        return nullcontext()
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


def _calls_others(func: Any, device_type: str) -> bool:
    """Whether an op may call others, with autocast as it is around the op itself."""
    if func.namespace not in _TORCHS:
        caller = None
    elif (name := func._schema.name) in _CALL_OTHERS:
        caller = _CALL_OTHERS[name]
    else:
        return False
    # In an op that autocast knows it is off in any case.
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return not known(caller or func.name(), f"Autocast{device_type.upper()}")


def _is_on(device_type: str) -> bool:
    """Whether autocast was on where the dispatcher was entered."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return torch.is_autocast_enabled(device_type)


def _is_in_another(func: Any) -> bool:
    """Whether the op is called by the Python of another one, which may have switched autocast off."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _CALLS_OF_OPS:
            caller = frame.f_locals["self"]
            packet = getattr(caller, "overloadpacket", caller)
            if packet._qualified_op_name != func._schema.name:
                return True
        frame = frame.f_back
    return False
