"""Compilation of a module's training step for one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import lightning.pytorch as pl
import torch

from lightning_cudagraph.compat.method_patches import MethodPatch, in_place, patch_method

_STEP = "training_step"
_LOGGING = ("log", "log_dict")


class _CompiledStep(MethodPatch):
    """Patch of `training_step` by its compiled form."""


def is_step_compiled(module: pl.LightningModule) -> bool:
    """True if the training step is compiled as a whole, for one run or by `torch.compile(module)`."""
    return module._compiler_ctx is not None or type(vars(module).get(_STEP)) is _CompiledStep


def compile_step(module: pl.LightningModule, device: torch.device, patches: ExitStack) -> None:
    """Compile the training step of a module until `patches` is closed, unless it is compiled already."""
    if is_step_compiled(module):
        return
    # On a CPU the emulator records torch's ops, which Inductor's kernels do not call.
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    compiled = torch.compile(getattr(module, _STEP), backend=backend)
    patch_method(module, _STEP, compiled, patches, _CompiledStep)


@contextmanager
def uncompiled(module: pl.LightningModule) -> Iterator[None]:
    """Undo `compile_step` in the `with` block."""
    step = vars(module).get(_STEP)
    with in_place(module, _STEP, step.__wrapped__) if type(step) is _CompiledStep else nullcontext():
        yield


class _LoggingUncompiled:
    """`self.log` excluded from torch.compile for as long as it has users (reference count)."""

    def __init__(self) -> None:
        self._users = 0
        self._patches = ExitStack()

    def enter(self) -> None:
        self._users += 1
        if self._users > 1:
            return
        for name in _LOGGING:
            method = vars(pl.LightningModule)[name]
            self._patches.callback(setattr, pl.LightningModule, name, method)
            setattr(pl.LightningModule, name, torch.compiler.disable(method))

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._patches.close()


_logging_uncompiled = _LoggingUncompiled()


@contextmanager
def logging_uncompiled() -> Iterator[None]:
    """Exclude `self.log` from torch.compile: its host state differs in every call."""
    _logging_uncompiled.enter()
    try:
        yield
    finally:
        _logging_uncompiled.leave()
