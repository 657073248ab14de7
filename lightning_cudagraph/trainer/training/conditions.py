"""Conditions of the fast path, compared after user code has run.

They are found once, after a replay. User code between two steps can add a callback, or give an object or
its class another hook or method: then a list, a method or one of some values is another, which a few
comparisons in C show.
"""

from __future__ import annotations

import operator
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.hooks.user_hooks import OF_BATCHES, TRANSFERS

# Methods that the epoch loop calls around `advance`; one set on the instance has to be called.
AROUND = (
    *("run", "done", "on_advance_end", "on_iteration_done"),
    *("update_lr_schedulers", "_update_learning_rates", "_should_accumulate"),
)

# Methods of the automatic optimization; one set on the instance has to be called.
OF_OPTIMIZATION = ("run", "_optimizer_step")
# That which this package patches.
MAKE_CLOSURE = "_make_closure"

# Methods of the strategy that this package patches; a patch of other code on top has to be called.
TRANSFER = "batch_to_device"
PATCHED = (TRANSFER, "optimizer_step")

# The hook that calls a scheduler of learning rates.
SCHEDULER_STEP = "lr_scheduler_step"

# Hooks and methods that are called between two steps, or instead of which the fast path does something.
_OF_MODULE = (
    *(*OF_BATCHES, *TRANSFERS, "training_step", "on_before_zero_grad", "optimizer_zero_grad"),
    *("optimizer_step", "on_after_backward", SCHEDULER_STEP, "validation_step"),
)


class Conditions:
    """A record of what the fast path depends on."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._callbacks = [*callbacks_of(trainer)]
        self._loggers = [*trainer.loggers]
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        optimization = loop.automatic_optimization
        (optimizer,) = strategy._lightning_optimizers
        data = getattr(trainer, "datamodule", None)
        called: list[tuple[Any, tuple[str, ...]]] = [
            (module, _OF_MODULE),
            *((callback, OF_BATCHES) for callback in self._callbacks),
            *((owner, TRANSFERS) for owner in (data,) if owner is not None),
        ]
        one: list[tuple[Any, str]] = [
            (strategy, "on_train_batch_start"),
            (type(strategy), TRANSFER),  # below the patch
            (optimizer, "step"),
            *((logger, "log_metrics") for logger in self._loggers),
            *((config.scheduler, "step") for config in trainer.lr_scheduler_configs),
        ]
        # Methods as they are found: of objects and of their classes. Bound ones are equal if they have
        # the same function and object.
        self._getters = [(operator.attrgetter(*names), owner) for owner, names in called]
        self._getters += [(operator.attrgetter(name), owner) for owner, name in one]
        self._methods = self._methods_now()
        # Other values that make a difference, and patches of this package that other code can undo.
        picked: list[tuple[Any, tuple[str, ...]]] = [
            (trainer, ("profiler", "datamodule")),
            (module, ("_automatic_optimization",)),
            (loop, ("advance", "automatic_optimization", "_results", *AROUND)),
            (strategy, ("_lightning_module", "_lightning_optimizers", *PATCHED)),
            (optimization, (*OF_OPTIMIZATION, MAKE_CLOSURE)),
            (optimizer, ("_on_before_step", "_on_after_step")),
        ]
        self._spaces = [vars(owner) for owner, names in picked for _ in names]
        self._names = [name for _, names in picked for name in names]
        self._values = [*map(dict.get, self._spaces, self._names)]

    def _methods_now(self) -> list[Any]:
        return [get(owner) for get, owner in self._getters]

    def changed(self) -> bool:
        return (
            self._trainer.strategy is not self._strategy
            or callbacks_of(self._trainer) != self._callbacks
            or self._trainer.loggers != self._loggers
            or not all(map(operator.is_, map(dict.get, self._spaces, self._names), self._values))
            or self._methods_now() != self._methods
        )
