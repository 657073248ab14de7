"""Detection of user hooks between two steps, and of those that see batches or gradients."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.trainer.config.support import callbacks_of

__all__ = ["batches_unseen", "gradients_unseen", "undisturbed"]

# Hooks that Lightning calls between two steps in the middle of an epoch, or at graph breaks. After those
# at the ends of an epoch, and around validation and checkpoints, all guards are compared anyway.
_INSIDE_OF_CALLBACKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_INSIDE_OF_MODULES = ("on_before_zero_grad",)
_OPTIMIZER_METHODS = ("optimizer_zero_grad", "optimizer_step", "lr_scheduler_step")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# Of these, the hooks that get a batch on the device, and may keep it.
_ARRIVED = ("transfer_batch_to_device", "on_after_batch_transfer")
_KNOWN = ("lightning.", "lightning_cudagraph.", "lightning_utilities.", "torch.")


def undisturbed(trainer: pl.Trainer, module: pl.LightningModule, stage: str = "train") -> bool:
    """True if no user code runs between two steps; `stage` is as in the names of their hooks."""
    hooks = _hooks(trainer, module, stage, _TRANSFERS)
    if stage == "train":
        hooks += [getattr(module, name) for name in _OPTIMIZER_METHODS]
        hooks += [config.scheduler.step for config in getattr(trainer, "lr_scheduler_configs", ())]
    return _all_known(hooks)


def gradients_unseen(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """True if no user hook or logger runs between two steps, which could keep gradients."""
    loggers = [logger.log_metrics for logger in trainer.loggers]
    return undisturbed(trainer, module) and _all_known(loggers)


def batches_unseen(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """True if no user hook gets a batch on the device."""
    return _all_known(_hooks(trainer, module, "train", _ARRIVED))


def _hooks(
    trainer: pl.Trainer, module: pl.LightningModule, stage: str, transfers: tuple[str, ...]
) -> list[Any]:
    around = (f"on_{stage}_batch_start", f"on_{stage}_batch_end")
    of_module, of_callbacks = (
        ((*around, *_INSIDE_OF_MODULES), (*around, *_INSIDE_OF_CALLBACKS))
        if stage == "train"
        else (around, around)
    )
    hooks = [getattr(module, name) for name in (*of_module, *transfers)]
    hooks += [getattr(callback, name) for callback in callbacks_of(trainer) for name in of_callbacks]
    if (datamodule := getattr(trainer, "datamodule", None)) is not None:
        hooks += [getattr(datamodule, name) for name in transfers]
    return hooks


def _all_known(hooks: list[Any]) -> bool:
    # By the function and not by the class, so that lambdas and attributes of an instance count.
    return all(_is_known(getattr(hook, "__func__", hook)) for hook in hooks)


def _is_known(function: Any) -> bool:
    # `functools.wraps` copies the name of the module, and not the globals of the code; a decorator of
    # torch's has torch's globals. So both must be known, and those of the wrapped function too.
    if not isinstance(function, FunctionType):
        return False
    own = (function.__module__, function.__globals__.get("__name__"))
    wrapped = getattr(function, "__wrapped__", None)
    return all(str(name).startswith(_KNOWN) for name in own) and (
        wrapped is None or _is_known(getattr(wrapped, "__func__", wrapped))
    )
