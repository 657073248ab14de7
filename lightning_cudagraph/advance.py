"""One training batch in Lightning's loop, without the calls that lead nowhere.

Around a replay of a few hundred microseconds, most of the host's time is Lightning's own: for every
batch it looks up, announces and times some ten hooks that nobody has overridden, and inspects the
signature of `training_step`. From one replay to the next, if no code of the user's comes in between, the
same is done here in the same order, without those.

That is only right for the source that was read when this was written, so it is compared, by digest; with
any other, and for every batch that is not plainly one more replay, Lightning's own `advance` runs.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_cudagraph.hooks import undisturbed
from lightning_cudagraph.support import callbacks_of, is_overridden
from lightning_cudagraph.transfer import TRANSFER

__all__ = ["QuickAdvance"]

# What `_digest` gives for the source that was read: the same in lightning 2.6.0 to 2.6.6.
_KNOWN = frozenset({"0831600d4250fc910c2b96f0ff428c2b6e8c4269b3b87ccdb5f58b7a2540e53b"})


def _digest() -> str:
    """SHA-256 of the source of what is stood in for."""
    functions = (_TrainingEpochLoop.advance, _TrainingEpochLoop._build_kwargs)
    try:
        source = "".join(inspect.getsource(function) for function in functions)
    except OSError:  # an installation without sources
        return ""
    return hashlib.sha256(source.encode()).hexdigest()


@dataclass
class _Fetched:
    """In the place of a data fetcher from which the batch has been taken already."""

    fetched: Any
    done: bool

    def __next__(self) -> Any:
        return self.fetched


class QuickAdvance:
    """In the place of `_TrainingEpochLoop.advance`.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        is_steady: whether the batch before was a replay.
        on_hooks: called if there can be other hooks than before, in the middle of an epoch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        is_steady: Callable[[], bool],
        on_hooks: Callable[[], None],
    ) -> None:
        self._on_hooks = on_hooks
        self._trainer = trainer
        self._module = module
        self._is_steady = is_steady
        self._loop = trainer.fit_loop.epoch_loop
        self._original: Callable[[Any], None] = self._loop.advance
        self._is_known = _digest() in _KNOWN
        # Looked at once, after a replay, and valid until something else than replays happens.
        self._looked = False
        self._can = False
        self._takes_batch_idx = False
        self._starts = self._ends = False
        # Where a hook is put that has not been there when it was looked: the code of a dataloader can.
        self._places: list[Any] = []
        self._sizes: list[int] = []

    def suspect(self) -> None:
        """Something other than training steps has happened, and can have changed the hooks."""
        self._looked = False

    def __call__(self, data_fetcher: Any) -> None:
        if not self._is_steady():
            self._looked = False
        elif not self._looked:
            self._looked = True
            self._can = self._look(data_fetcher)
        if self._looked and self._can and not self._loop.restarting:
            self._advance(data_fetcher)
        else:
            self._original(data_fetcher)

    def _look(self, data_fetcher: Any) -> bool:
        trainer, module = self._trainer, self._module
        if not (
            self._is_known
            and getattr(self._original, "__func__", None) is _TrainingEpochLoop.advance
            and type(vars(trainer)["profiler"]) is PassThroughProfiler
            and trainer.world_size == 1
            and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
            and module.automatic_optimization
            and not is_overridden("on_train_batch_start", trainer.strategy, Strategy)
            and undisturbed(trainer, module)
        ):
            return False
        self._takes_batch_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._starts, self._ends = (
            any(is_overridden(name, callback, Callback) for callback in callbacks_of(trainer))
            for name in ("on_train_batch_start", "on_train_batch_end")
        )
        callbacks = callbacks_of(trainer)
        self._places = [vars(module), callbacks, *map(vars, callbacks)]
        self._sizes = [*map(len, self._places)]
        return True

    def _advance(self, data_fetcher: Any) -> None:
        """As in lightning 2.6, without what is known to do nothing."""
        loop, trainer = self._loop, self._trainer
        progress, connector = loop.batch_progress, trainer._logger_connector
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        fetched = next(data_fetcher)
        if [*map(len, self._places)] != self._sizes:
            self._looked = False
            self._on_hooks()
            self._original(_Fetched(fetched, data_fetcher.done))
            return
        batch, _, _ = fetched
        batch_idx = loop.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = trainer.precision_plugin.convert_input(batch)
        names = vars(self._module)  # the `__setattr__` of modules takes its time
        names["_current_fx_name"] = TRANSFER
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        names["_current_fx_name"] = None
        progress.increment_ready()
        connector.on_batch_start(batch)
        output: Any = None
        if batch is None:
            loop._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            if self._starts:
                call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
            progress.increment_started()
            kwargs: OrderedDict[str, Any] = OrderedDict(batch=batch)
            if self._takes_batch_idx:
                kwargs["batch_idx"] = batch_idx
            output = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self._ends:
            call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        connector.on_batch_end()
        progress.increment_completed()
        connector.update_train_step_metrics()
