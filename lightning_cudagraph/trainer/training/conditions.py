"""Conditions of the fast path, compared after user code has run.

They are found once, after a replay. User code between two steps can add a callback, set a hook on an
instance, or replace a method: then a list, a dictionary or one of some values is another, which a few
comparisons in C show.
"""

from __future__ import annotations

import operator
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.trainer.config.support import callbacks_of

# Methods that the epoch loop calls around `advance`; one set on the instance has to be called.
AROUND = ("run", "done", "on_advance_end", "on_iteration_done", "update_lr_schedulers")

# Methods of the automatic optimization; one set on the instance has to be called.
OF_OPTIMIZATION = ("run", "_make_closure", "_optimizer_step")

# Methods of the strategy that this package patches; a patch of other code on top has to be called.
PATCHED = ("batch_to_device", "optimizer_step")

_OF_MODULE = (
    *("_automatic_optimization", "optimizer_step", "training_step", "on_before_batch_transfer"),
    *("transfer_batch_to_device", "on_after_batch_transfer", "on_after_backward"),
)


class Conditions:
    """A record of what the fast path depends on."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._callbacks = [*callbacks_of(trainer)]
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        optimization = loop.automatic_optimization
        (optimizer,) = strategy._lightning_optimizers
        data = getattr(trainer, "datamodule", None)
        # In these a hook is a new name; other names are replaced in every step.
        owners = (module, loop, strategy, optimization, optimizer, data, *self._callbacks)
        self._dicts = [vars(owner) for owner in owners if owner is not None]
        self._sizes = [*map(len, self._dicts)]
        picked: list[tuple[Any, tuple[str, ...]]] = [
            (trainer, ("profiler", "datamodule")),
            (module, _OF_MODULE),
            (loop, ("advance", "automatic_optimization", "_results", *AROUND)),
            (strategy, ("on_train_batch_start", "_lightning_module", "_lightning_optimizers", *PATCHED)),
            (optimization, OF_OPTIMIZATION),
            (optimizer, ("step", "_on_before_step", "_on_after_step")),
        ]
        self._spaces = [vars(owner) for owner, names in picked for _ in names]
        self._names = [name for _, names in picked for name in names]
        self._values = [*map(dict.get, self._spaces, self._names)]

    def changed(self) -> bool:
        return (
            self._trainer.strategy is not self._strategy
            or callbacks_of(self._trainer) != self._callbacks
            or [*map(len, self._dicts)] != self._sizes
            or not all(map(operator.is_, map(dict.get, self._spaces, self._names), self._values))
        )
