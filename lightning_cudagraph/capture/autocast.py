"""Autocast, in what an op consists of, as it is without the modes of a capture.

Below a mode of the dispatcher, torch leaves all out that is above it, autocast too
(aten/src/ATen/core/PythonFallbackKernel.cpp). An op that comes whole to the mode, and calls others, is
then computed in fp32 where it is in bf16 without the mode. Inside the mode nothing says whether autocast
was on: that is noted before, where Python calls torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from lightning_cudagraph.capture.own_modes import OwnFunctionMode

__all__ = ["AutocastNoted"]

# Of torch's ops those that call others that autocast knows; and what calls them, if that is another op.
_CALL_OTHERS = {
    "aten::_trilinear": "aten::bilinear",
    "aten::affine_grid_generator": None,
    "aten::linalg_pinv": None,
}
_TORCHS = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "quantized"})


class AutocastNoted(OwnFunctionMode):
    """Knows whether autocast is on for the ops of a capture.

    Args:
        device_type: the type of the device that is captured.
    """

    not_in_compiled_code = True  # taken off while compiled code runs

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._is_on = torch.is_autocast_enabled(device_type)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Put back afterwards: what autograd's threads call ends inside of a call of `backward`.
        before, self._is_on = self._is_on, torch.is_autocast_enabled(self._device_type)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._is_on = before

    def reaching(self, func: Any) -> AbstractContextManager[Any]:
        """Inside, below a mode, an op is run with autocast on if it would be without the mode."""
        if not self._is_on or not _calls_others(func, self._device_type.upper()):
            return nullcontext()
        dtype = torch.get_autocast_dtype(self._device_type)
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=False)


@cache
def _calls_others(func: Any, device: str) -> bool:
    """Whether an op may call others, with autocast as it is around the op itself."""
    if func.namespace not in _TORCHS:
        caller = None
    elif (name := func._schema.name) in _CALL_OTHERS:
        caller = _CALL_OTHERS[name]
    else:
        return False
    # In an op that autocast knows it is off in any case.
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return not known(caller or func.name(), f"Autocast{device}")
