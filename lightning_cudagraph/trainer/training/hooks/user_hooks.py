"""Detection of user hooks between two steps, and of those that see batches or gradients."""

from __future__ import annotations

from functools import partial
from inspect import getclosurevars
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import lightning.pytorch as pl
from torch.optim.lr_scheduler import LRScheduler

from lightning_cudagraph.optim.supported_optimizers import attributes_and_items
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.hooks.hook_arguments import ignores

# Hooks that Lightning calls between two steps in the middle of an epoch, or at graph breaks. After those
# at the ends of an epoch, and around validation and checkpoints, all guards are compared anyway.
OF_BATCHES = ("on_train_batch_start", "on_train_batch_end")
_OF_CALLBACKS = (
    *OF_BATCHES,
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
# The hooks that get a batch on the device, and may keep it.
_ARRIVED = ("transfer_batch_to_device", "on_after_batch_transfer")
TRANSFERS = ("on_before_batch_transfer", *_ARRIVED)
_OF_MODULES = (
    *OF_BATCHES,
    "on_before_zero_grad",
    *TRANSFERS,
    "optimizer_zero_grad",
    "optimizer_step",
    "lr_scheduler_step",
)
# Trainer and module, which a hook of a callback gets before its other arguments.
BEFORE_ARGUMENTS = 2
_KNOWN = ("lightning.", "lightning_cudagraph.", "lightning_utilities.", "torch.")


def undisturbed(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """True if no user code runs between two steps."""
    schedulers = [config.scheduler for config in getattr(trainer, "lr_scheduler_configs", ())]
    hooks = [getattr(module, name) for name in _OF_MODULES]
    hooks += [getattr(callback, name) for callback in callbacks_of(trainer) for name in _OF_CALLBACKS]
    hooks += _of_datamodule(trainer, TRANSFERS)
    hooks += [scheduler.step for scheduler in schedulers]
    return all(map(_is_of_torch, schedulers)) and _all_known(hooks)


def _of_datamodule(trainer: pl.Trainer, names: tuple[str, ...]) -> list[Any]:
    datamodule = getattr(trainer, "datamodule", None)
    return [] if datamodule is None else [getattr(datamodule, name) for name in names]


def _is_of_torch(scheduler: Any) -> bool:
    """True if a scheduler runs no code but torch's, and functions that see only numbers."""
    classes = type(scheduler).__mro__[:-1]
    if not all(f"{cls.__module__}.".startswith((*_KNOWN, "abc.", "typing.")) for cls in classes):
        return False
    members = attributes_and_items(scheduler)
    inner = [member for member in members if isinstance(member, LRScheduler)]
    functions = [m for m in members if callable(m) and not isinstance(m, (type, LRScheduler))]
    return all(map(_is_of_torch, inner)) and all(is_known(f) or _sees_numbers(f) for f in functions)


def _sees_numbers(function: Any) -> bool:
    """True for a function that reaches nothing but numbers, strings, modules and C functions."""
    if isinstance(function, partial):
        given = [*function.args, *function.keywords.values()]
        return all(map(_is_plain, given)) and _sees_numbers(function.func)
    if not isinstance(function, FunctionType):
        return isinstance(function, BuiltinFunctionType)
    names = getclosurevars(function)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(map(_is_plain, [*names.nonlocals.values(), *names.globals.values(), *defaults]))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, type(None), ModuleType, BuiltinFunctionType))


def gradients_unseen(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """True if no user hook or logger runs between two steps, which could keep gradients."""
    loggers = [logger.log_metrics for logger in trainer.loggers]
    return undisturbed(trainer, module) and _all_known(loggers)


def batches_unseen(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """True if no user hook reads a batch on the device."""
    arrived = [getattr(module, name) for name in _ARRIVED] + _of_datamodule(trainer, _ARRIVED)
    around = [
        (getattr(owner, f"on_train_batch_{name}"), position + is_callback)
        for is_callback, owners in ((0, [module]), (BEFORE_ARGUMENTS, callbacks_of(trainer)))
        for owner in owners
        for name, position in (("start", 0), ("end", 1))
    ]
    return _all_known(arrived) and all(is_known(hook) or ignores(hook, at) for hook, at in around)


def _all_known(hooks: list[Any]) -> bool:
    return all(map(is_known, hooks))


def is_known(hook: Any) -> bool:
    """True if a hook is code of Lightning, torch or this package."""
    # By the function and not by the class, so that lambdas and attributes of an instance count.
    return _is_known(getattr(hook, "__func__", hook))


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
