"""The training step of a module, compiled for one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_cudagraph.compat.method_patches import StandIn, replace_method

__all__ = ["compile_step", "is_step_compiled", "logging_uncompiled"]

_STEP = "training_step"
_LOGGING = ("log", "log_dict")


class _CompiledStep(StandIn):
    """In the place of a step; Lightning looks at the parameters of what it wraps."""

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        super().__init__(owner, name, call)
        self.__wrapped__ = getattr(owner, name)


def is_step_compiled(module: pl.LightningModule) -> bool:
    """Whether the training step is compiled as a whole, for one run or by `torch.compile(module)`."""
    return module._compiler_ctx is not None or type(vars(module).get(_STEP)) is _CompiledStep


def compile_step(module: pl.LightningModule, device: torch.device, patches: ExitStack) -> None:
    """Compile the training step of a module, unless it is compiled.

    Args:
        module: the module.
        device: where it is trained. On a CPU, an emulator has to see its ops, of which the kernels of
            torch's own compiler do not consist.
        patches: puts the step back when it is closed.
    """
    if is_step_compiled(module):
        return
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    compiled = torch.compile(getattr(module, _STEP), backend=backend)
    replace_method(module, _STEP, compiled, patches, _CompiledStep)


class _LoggingUncompiled:
    """torch.compile kept out of `self.log`, as long as somebody needs that."""

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
    """Keep torch.compile out of `self.log`, whose insides are different in every call."""
    _logging_uncompiled.enter()
    try:
        yield
    finally:
        _logging_uncompiled.leave()
