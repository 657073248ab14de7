"""Autocast inside composite ops, as without the dispatch modes of a capture.

Below a dispatch mode, torch excludes all dispatch keys above it, autocast too
(aten/src/ATen/core/PythonFallbackKernel.cpp). So an op that reaches the mode whole and calls other ops
is computed in fp32, and without the mode in bf16. torch keeps the state at the entry of the dispatcher,
from which autocast is restored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import CodeType
from typing import Any

import torch

from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.compat.names.torch_names import OpOverload, OpOverloadPacket

# Ops of torch that call ops with autocast kernels; and the op that calls them, if there is one.
_CALL_OTHERS = {
    "aten::_foreach_mm": None,
    "aten::_transformer_encoder_layer_fwd": None,
    "aten::_trilinear": "aten::bilinear",
    "aten::affine_grid_generator": None,
    "aten::linalg_pinv": "aten::pinverse",
}
_TORCHS = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "quantized"})


def reaching(
    func: Any, device_type: str, unknown: Callable[[str], None] = lambda name: None
) -> AbstractContextManager[Any]:
    """Switch autocast on for an op below a mode if it would be on without the mode.

    Args:
        unknown: called with the name of an op if the state of autocast is unknown, because the Python
            code of another op, which may have switched autocast off, calls this one.
    """
    if not _calls_others(func, device_type) or not _is_on(device_type):
        return nullcontext()
    name = func._schema.name
    for frame in frames(sys._getframe(2)):
        if frame.f_code in _calls_of_ops():
            caller = frame.f_locals["self"]
            if getattr(caller, "overloadpacket", caller)._qualified_op_name != name:
                unknown(name)
        elif frame.f_code.co_name == "__torch_dispatch__" and not frame.f_code.co_filename.startswith(
            PACKAGE_DIR
        ):
            return nullcontext()  # below a mode of the user's or torch's, autocast is off anyway
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


@cache
def _calls_of_ops() -> tuple[CodeType, CodeType]:
    return OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__


def _calls_others(func: Any, device_type: str) -> bool:
    """True if an op may call other ops under the autocast state around it."""
    if func.namespace not in _TORCHS:
        caller = None
    elif (name := func._schema.name) in _CALL_OTHERS:
        caller = _CALL_OTHERS[name]
    else:
        return False
    # Inside an op with an autocast kernel, autocast is off anyway.
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return not known(caller or func.name(), f"Autocast{device_type.upper()}")


def _is_on(device_type: str) -> bool:
    """True if autocast was on at the entry of the dispatcher."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return torch.is_autocast_enabled(device_type)
