"""A patch for the emulator: torch's optimizers with the option `capturable` run on the CPU too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from torch.optim import Optimizer

from lightning_cudagraph.compat.features import CAPTURABLE_ON_CPU
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import UnsupportedError

_DEVICES = "_get_capturable_supported_devices"


def allow_on_cpu(optimizer: Optimizer, patches: ExitStack) -> None:
    """Add the CPU to torch's devices for `capturable`, for the emulator, if the optimizer has it set."""
    if not any(group.get("capturable") for group in optimizer.param_groups):
        return
    require(CAPTURABLE_ON_CPU)
    for cls in type(optimizer).__mro__:
        module = sys.modules[cls.__module__]
        if cls is not Optimizer and hasattr(module, _DEVICES):
            patches.callback(setattr, module, _DEVICES, getattr(module, _DEVICES))
            setattr(module, _DEVICES, _and_cpu(getattr(module, _DEVICES)))
            return
    raise UnsupportedError(
        f"There is no `{_DEVICES}` beside `{type(optimizer).__qualname__}`, and the CPU emulator"
        " needs it to run capturable optimizers.",
        "Leave `capturable` out, or use an optimizer of `torch.optim`.",
    )


def _and_cpu(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *args, **kwargs: [*devices(*args, **kwargs), "cpu"]
