"""The fast path of Lightning's training loop: from one replay to the next without calls to empty hooks.

Around a replay of a few hundred microseconds, most of the host's time is Lightning's own: for every
batch it looks up, announces and times some ten hooks that are not overridden, inspects the signature of
`training_step`, asks repeatedly which loop is active, and collects values that no code reads. The fast
path does the rest, in the same order, as long as no user code runs between two replays.

It is correct only for a loop equivalent to the one that it repeats (`compat/lightning_source.py`).
With another loop, which the report then names, and for every batch that needs more than a replay,
Lightning's own code runs.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_cudagraph.capture.steps import Phase
from lightning_cudagraph.compat.features import SHORT_WAY
from lightning_cudagraph.compat.method_patches import MethodPatch
from lightning_cudagraph.compat.names.lightning_names import (
    _DataLoaderIterDataFetcher,
    _TrainingEpochLoop,
)
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.trainer.config.support import callbacks_of, is_overridden
from lightning_cudagraph.trainer.training.hooks.user_hooks import undisturbed
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.steps import NOT_PLAIN, TrainingSteps
from lightning_cudagraph.trainer.training.transfer import TRANSFER

__all__ = ["FastPath"]

# Methods that the epoch loop calls around `advance`; one set on the instance has to be called.
_AROUND = ("run", "done", "on_advance_end", "on_iteration_done", "update_lr_schedulers")

# Methods of the strategy that this package patches; a patch of other code on top has to be called.
_PATCHED = ("batch_to_device", "optimizer_step")


@dataclass
class _Fetched:
    """Replaces a data fetcher whose batch has already been taken."""

    fetched: Any
    done: bool

    def __next__(self) -> Any:
        return self.fetched


class _Holder:
    def __init__(self) -> None:
        self.held: dict[str, Any] = {}


def _references_of_attribute() -> int:
    """The reference count of an object that only one attribute refers to."""
    holder = _Holder()
    return sys.getrefcount(holder.held)


_REFERENCES_OF_ATTRIBUTE = _references_of_attribute()


def _are_kept(connector: Any) -> bool:
    """True if user code holds a dictionary of metrics, which Lightning updates in each step."""
    return (
        sys.getrefcount(connector._callback_metrics) > _REFERENCES_OF_ATTRIBUTE
        or sys.getrefcount(connector._logged_metrics) > _REFERENCES_OF_ATTRIBUTE
        or sys.getrefcount(connector._progress_bar_metrics) > _REFERENCES_OF_ATTRIBUTE
    )


# Called by the loop before each batch of several processes; the votes of this package replace it.
_SIGTERM = "_broadcast_sigterm_tensor"


class FastPath:
    """Patch of `_TrainingEpochLoop.advance`; one call takes batches until more than a replay is due."""

    def __init__(self, run: TrainingRun, steps: TrainingSteps) -> None:
        self._run = run
        self._trainer = run.trainer
        self._module = run.module
        self._steps = steps
        self._transfer = steps.transfer
        self._loop = run.trainer.fit_loop.epoch_loop
        self._original: Callable[[Any], None] = self._loop.advance
        self._is_known = available(SHORT_WAY)
        # Found once, after a replay, and valid until something other than a replay happens.
        self._looked = False
        self._can = False
        self._takes_batch_idx = False
        self._starts = self._ends = False
        self._validates = self._accumulates = False
        # Code of a dataloader can add a callback, or set a hook on an instance: then `vars` grows.
        self._callbacks: list[Callback] = []
        self._dicts: list[Any] = []
        self._sizes: list[int] = []
        # Settings of the validation in this epoch, which such code can change too.
        self._validation: tuple[Any, Any] = None, None
        # True while the logger connector has not yet collected the values of the last batch.
        self._owes = False

    def suspect(self) -> None:
        """Look for hooks again: code other than training steps has run."""
        self._looked = False

    def __call__(self, data_fetcher: Any) -> None:
        if self._steps.phase is not Phase.CAPTURED:
            self._looked = False
        elif not self._looked:
            self._looked = True
            self._can = self._look(data_fetcher)
        if not (self._looked and self._can) or self._loop.restarting:
            self._original(data_fetcher)
            return
        try:
            self._advance(data_fetcher)
            while self._goes_on(data_fetcher):
                self._between()
                self._advance(data_fetcher)
        finally:
            self._settle()

    def _look(self, data_fetcher: Any) -> bool:
        trainer, module, loop = self._trainer, self._module, self._loop
        strategy = trainer.strategy
        if not (
            self._is_known
            and getattr(self._original, "__func__", None) is _TrainingEpochLoop.advance
            and type(loop) is _TrainingEpochLoop
            and vars(loop).keys().isdisjoint(_AROUND)
            and type(vars(trainer)["profiler"]) is PassThroughProfiler
            and (trainer.world_size == 1 or type(vars(loop).get(_SIGTERM)) is MethodPatch)
            and not strategy.handles_gradient_accumulation
            and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
            and module.automatic_optimization
            and not is_overridden("on_train_batch_start", strategy, Strategy)
            and all(type(vars(strategy).get(name)) is MethodPatch for name in _PATCHED)
            and undisturbed(trainer, module)
            and self._steps.is_plain()
        ):
            return False
        self._takes_batch_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        callbacks = callbacks_of(trainer)
        self._starts, self._ends = (
            any(is_overridden(name, callback, Callback) for callback in callbacks)
            for name in ("on_train_batch_start", "on_train_batch_end")
        )
        self._validates = loop._should_check_val_epoch()
        self._validation = self._validation_now()
        self._callbacks = [*callbacks]
        self._dicts = [vars(module), *map(vars, callbacks)]
        self._sizes = [*map(len, self._dicts)]
        return True

    def _validation_now(self) -> tuple[Any, Any]:
        trainer: Any = self._trainer  # which sets attributes without declaring them
        return trainer.check_val_every_n_epoch, trainer.limit_val_batches

    def _advance(self, data_fetcher: Any) -> None:
        """Do what `advance` of lightning 2.6 does, without the calls that are known to do nothing."""
        loop, trainer, results = self._loop, self._trainer, self._loop._results
        progress, connector = loop.batch_progress, trainer._logger_connector
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        fetched = next(data_fetcher)
        if callbacks_of(trainer) != self._callbacks or [*map(len, self._dicts)] != self._sizes:
            self._looked = False
            self._settle()
            self._run.guards.suspect()  # but not the clock, which goes on measuring
            self._transfer.suspect()
            self._original(_Fetched(fetched, data_fetcher.done))
            return
        total: Any = progress.total
        current: Any = progress.current
        batch_idx = current.ready
        progress.is_last_batch = data_fetcher.done
        batch = self._moved(trainer.precision_plugin.convert_input(fetched[0]))
        total.ready += 1
        current.ready += 1
        is_last = progress.is_last_batch or current.ready == trainer.num_training_batches
        # As in the connector's `on_batch_start`.
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        output: Any = None
        if batch is None:
            loop._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            if self._starts:
                call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
            total.started += 1
            current.started += 1
            output = self._step(batch, batch_idx, is_last)
        total.processed += 1
        current.processed += 1
        if trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if is_last:
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self._ends:
            call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        # As in the connector's `on_batch_end`, but for the values.
        results.batch = results.batch_size = None
        self._owes = True
        total.completed += 1
        current.completed += 1
        self._accumulates = not is_last and current.ready % trainer.accumulate_grad_batches != 0
        if not self._accumulates and self._shows_metrics():
            self._settle()
            connector.update_train_step_metrics()
        elif _are_kept(connector):
            self._settle()

    def _moved(self, batch: Any) -> Any:
        """The batch on the device."""
        if (static := self._transfer.straight(batch, dataloader_idx=0)) is not None:
            return static
        names = vars(self._module)  # `nn.Module.__setattr__` is slow
        names["_current_fx_name"] = TRANSFER
        batch = self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        names["_current_fx_name"] = None
        return batch

    def _step(self, batch: Any, batch_idx: int, is_last: bool) -> Any:
        """Do the step. Returns the outputs for callbacks, or None if none of them takes outputs."""
        trainer, loop = self._trainer, self._loop
        window = trainer.accumulate_grad_batches
        steps = is_last or (batch_idx + 1) % window == 0
        output = self._steps.again(batch, batch_idx % window == 0, steps, wanted=self._ends)
        if output is NOT_PLAIN:
            self._settle()
            kwargs: OrderedDict[str, Any] = OrderedDict(batch=batch)
            if self._takes_batch_idx:
                kwargs["batch_idx"] = batch_idx
            output = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        return output

    def _shows_metrics(self) -> bool:
        """True if loggers may be due; the connector decides."""
        trainer: Any = self._trainer  # which sets attributes without declaring them
        n_steps = trainer.log_every_n_steps
        is_due = n_steps != 0 and (self._loop._batches_that_stepped + 1) % n_steps == 0
        return bool(is_due or trainer.should_stop or trainer.fast_dev_run)

    def _settle(self) -> None:
        """Let the connector collect the values of the last batch before the next ones replace them."""
        self._run.logs.settle()
        if self._owes:
            self._owes = False
            results = self._loop._results
            batch = results.batch, results.batch_size
            self._trainer._logger_connector.on_batch_end()
            results.batch, results.batch_size = batch

    def _goes_on(self, data_fetcher: Any) -> bool:
        """True if the loop would only count, and call `advance` again."""
        loop, trainer, progress = self._loop, self._trainer, self._loop.batch_progress
        return not (
            not self._looked
            or progress.is_last_batch
            or progress.current.ready == trainer.num_training_batches
            or trainer.should_stop
            or trainer.received_sigterm
            or loop._skip_next_val
            or (loop.max_steps != -1 and loop.global_step >= loop.max_steps)
            or self._validation_now() != self._validation
            or (self._validates and loop._should_check_val_fx(data_fetcher))
            or self._steps.phase is not Phase.CAPTURED
        )

    def _between(self) -> None:
        """Do what `on_advance_end` of lightning 2.6 does without validation, and end the iteration."""
        loop = self._loop
        if self._trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not self._accumulates:
            loop._batches_that_stepped += 1
        loop.on_iteration_done()
