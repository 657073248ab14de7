"""The fast path of Lightning's training loop: from one replay to the next, a hook costs what it does.

Around a replay of a few hundred microseconds, most of the host's time is Lightning's own: for every
batch it looks up, announces and times some ten hooks that are not overridden, inspects the signature of
`training_step`, asks repeatedly which loop is active, and collects values that no code reads. The fast
path does the rest, in the same order. It calls the hooks of user code where Lightning calls them, and
compares afterwards if they have changed what it depends on (`conditions.py`); guards find all else.

It is correct only for a loop equivalent to the one that it repeats (`compat/lightning_source.py`).
With another loop, which the report then names, and for every batch that needs more than a replay,
Lightning's own code runs.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy

from lightning_cudagraph.capture.steps import AccumulationPhase, Phase
from lightning_cudagraph.compat.features import FAST_PATH
from lightning_cudagraph.compat.method_patches import MethodPatch, Original
from lightning_cudagraph.compat.names.lightning_names import (
    _DataLoaderIterDataFetcher,
    _TrainingEpochLoop,
)
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.trainer.config.support import described_hook, is_overridden
from lightning_cudagraph.trainer.training.conditions import (
    AROUND,
    PATCHED,
    SCHEDULER_STEP,
    TRANSFER,
    Conditions,
)
from lightning_cudagraph.trainer.training.hooks.averages import Averages
from lightning_cudagraph.trainer.training.hooks.batch_hooks import END, START, BatchHooks
from lightning_cudagraph.trainer.training.hooks.user_hooks import gradients_unseen, is_known, undisturbed
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from lightning_cudagraph.trainer.training.times.host_times import LOADER, LOGGERS, SCHEDULERS


@dataclass
class _Fetched:
    """Replacement for a data fetcher whose batch has already been taken."""

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
_PREPARES = "on_before_batch_transfer"
_SIGTERM = "_broadcast_sigterm_tensor"


class FastPath:
    """Patch of `_TrainingEpochLoop.advance`; one call takes batches until more than a replay is due."""

    def __init__(self, run: TrainingRun, steps: TrainingSteps) -> None:
        self._run = run
        self._trainer = run.trainer
        self._module = run.module
        self._steps = steps
        self._loop = run.trainer.fit_loop.epoch_loop
        self._original = Original(self._loop, "advance")
        self._is_known = available(FAST_PATH)
        # Found once, after a replay, and valid until something other than a replay happens.
        self._looked = False
        self._can = False
        self._hooks = BatchHooks(run, steps)
        self.averages = Averages(run)
        self._host = run.times.host
        self._disturbed = self._starts = self._ends = self._prepares = False
        self._validates = self._accumulates = False
        self._conditions: Conditions
        # Steps that were replayed with Lightning's own loop around them, by the reason.
        self.avoided: Counter[str] = Counter()
        self._reason = ""
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
            self.averages.find()
            self._can = self._look(data_fetcher)
        if not (self._looked and self._can) or self._loop.restarting:
            if self._looked and self._reason:
                self.avoided[self._reason] += 1
            self._original(data_fetcher)
            return
        try:
            self._advance(data_fetcher)
            while self._goes_on(data_fetcher):
                self._between()
                self._advance(data_fetcher)
        finally:
            self._host.abandon()
            self._settle()

    def _look(self, data_fetcher: Any) -> bool:
        trainer, module, loop = self._trainer, self._module, self._loop
        self._reason = self._obstacle(data_fetcher)
        if self._reason or not self._is_known:
            return False
        self._disturbed = not undisturbed(trainer, module)
        self._starts = self._hooks.has(START)
        # One that runs in the middle of a step may set one that ends it.
        self._ends = self._disturbed or self._hooks.has(END)
        owners = (module, getattr(trainer, "datamodule", None))
        self._prepares = any(
            not is_known(getattr(owner, _PREPARES)) or is_overridden(_PREPARES, owner, DataHooks)
            for owner in owners
            if owner is not None
        )
        self._steps.is_state_unread = gradients_unseen(trainer, module)
        self._validates = loop._should_check_val_epoch()
        self._validation = self._validation_now()
        self._conditions = Conditions(trainer, module)
        return True

    def _obstacle(self, data_fetcher: Any) -> str:
        """The reason why Lightning's own loop has to run; empty if there is none."""
        trainer, module, loop = self._trainer, self._module, self._loop
        strategy, profiler = trainer.strategy, vars(trainer)["profiler"]
        if type(profiler) is not PassThroughProfiler:
            return f"`{type(profiler).__qualname__}` records the actions of that loop"
        if not is_known(module.optimizer_step):
            return f"{described_hook(module, 'optimizer_step')} gets a closure in every step"
        if not is_known(strategy.on_train_batch_start) or is_overridden(
            "on_train_batch_start", strategy, Strategy
        ):
            return f"{described_hook(strategy, 'on_train_batch_start')} is a hook of a strategy"
        if not self._steps.is_plain():
            return "the optimizer's step or `on_after_backward` calls other code"
        advance = self._original.now
        if not (
            getattr(advance, "__func__", None) is _TrainingEpochLoop.advance
            and is_known(advance)
            and type(vars(loop).get("advance")) is MethodPatch
            and type(loop) is _TrainingEpochLoop
            and vars(loop).keys().isdisjoint(AROUND)
            and (trainer.world_size == 1 or type(vars(loop).get(_SIGTERM)) is MethodPatch)
            and not strategy.handles_gradient_accumulation
            and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
            and module.automatic_optimization
            and all(type(vars(strategy).get(name)) is MethodPatch for name in PATCHED)
        ):
            return "methods of Lightning's loop or of its strategy are replaced"
        return ""

    def _validation_now(self) -> tuple[Any, Any]:
        trainer: Any = self._trainer  # which sets attributes without declaring them
        return trainer.check_val_every_n_epoch, trainer.limit_val_batches

    def _advance(self, data_fetcher: Any) -> None:
        """Do what `advance` of lightning 2.6 does, without the calls that are known to do nothing."""
        loop, trainer, results = self._loop, self._trainer, self._loop._results
        progress, connector = loop.batch_progress, trainer._logger_connector
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        host = self._host
        host.begin()
        with host.of(LOADER):
            fetched = next(data_fetcher)
        if self._look_again():
            host.abandon()
            self._settle()
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
        skips = False
        if batch is None:
            loop._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            if self._starts or not self._looked:
                batch, response = self._hooks.start(batch, batch_idx)
                skips = response == -1
                self._look_again()
            if skips:
                progress.increment_by(0, is_last_batch=True)
                is_last = True
            else:
                total.started += 1
                current.started += 1
                output = self._step(batch, batch_idx, is_last)
        total.processed += 1
        current.processed += 1
        if trainer.lr_scheduler_configs:
            with host.of(SCHEDULERS):
                self._step_schedulers(batch_idx, is_last)
        if skips:
            raise StopIteration
        if self._ends or not self._looked:
            self._hooks.end(output, batch, batch_idx)
        # As in the connector's `on_batch_end`, but for the values.
        results.batch = results.batch_size = None
        self._owes = True
        total.completed += 1
        current.completed += 1
        self._accumulates = not is_last and current.ready % trainer.accumulate_grad_batches != 0
        if not self._accumulates and self._shows_metrics():
            with host.of(LOGGERS):
                self._settle()
                connector.update_train_step_metrics()
        elif _are_kept(connector):
            self._settle()

    def _step_schedulers(self, batch_idx: int, is_last: bool) -> None:
        """Do what `update_lr_schedulers` does for intervals of steps, and of epochs if one ends."""
        loop, module = self._loop, self._module
        if is_last:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            return
        if loop._should_accumulate():
            return
        for config in self._trainer.lr_scheduler_configs:
            is_due = config.interval == "step" and (batch_idx + 1) % config.frequency == 0
            if is_due and not config.reduce_on_plateau:
                loop.scheduler_progress.increment_ready()
                self._hooks.current.begin(SCHEDULER_STEP)
                module.lr_scheduler_step(config.scheduler, None)
                self._hooks.current.end()
                loop.scheduler_progress.increment_completed()

    def _moved(self, batch: Any) -> Any:
        if self._prepares:
            with self._host.of_hook(self._module, _PREPARES):
                batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
            self._look_again()
        if (static := self._steps.to_static(batch)) is not None:
            return static
        self._hooks.current.begin(TRANSFER)
        batch = self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        self._hooks.current.end()
        if self._disturbed:
            self._look_again()
        return batch

    def _step(self, batch: Any, batch_idx: int, is_last: bool) -> Any:
        """Do the step. Returns the static outputs of a replay, or Lightning's of another step."""
        trainer, loop = self._trainer, self._loop
        window = trainer.accumulate_grad_batches
        steps = is_last or (batch_idx + 1) % window == 0
        if self._looked:
            self._host.look()
            syncs = steps and bool(self._run.replicas.wrappers)
            accumulation = AccumulationPhase(batch_idx % window == 0, steps, syncs)
            outputs = self._steps.replay(batch, batch_idx, accumulation)
            if outputs is not None:
                return outputs
        self._host.abandon()
        self._settle()
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        if self._module.automatic_optimization:
            output = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        else:
            output = loop.manual_optimization.run(kwargs)
        self._look_again()  # the step may have run eagerly
        return output

    def _give_way(self) -> None:
        """Compare everything, and look for hooks again: user code has changed some of them."""
        self._looked = False
        self._run.guards.suspect()  # but not the clock, which goes on measuring
        self._steps.suspect()

    def _shows_metrics(self) -> bool:
        """True if loggers may be due; the connector decides."""
        trainer: Any = self._trainer  # which sets attributes without declaring them
        n_steps = trainer.log_every_n_steps
        is_due = n_steps != 0 and (self._loop._batches_that_stepped + 1) % n_steps == 0
        return bool(is_due or trainer.should_stop or trainer.fast_dev_run)

    def _settle(self) -> None:
        """Let the connector collect the values of the last batch before the next ones replace them.

        Other code than that of the fast path may follow, and read the optimizer's counters.
        """
        self._run.part.optimizer.outcomes.settle()
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
            # Those step once more code could stop the loop.
            or any(c.reduce_on_plateau and c.interval == "step" for c in trainer.lr_scheduler_configs)
            or self._steps.phase is not Phase.CAPTURED
            or (self._disturbed and self._look_again())
        )

    def _look_again(self) -> bool:
        """Give way if user code has changed something."""
        if changed := self._conditions.changed():
            self._give_way()
        return changed

    def _between(self) -> None:
        """Do what `on_advance_end` of lightning 2.6 does without validation, and end the iteration."""
        loop = self._loop
        if not self._accumulates:
            loop._batches_that_stepped += 1
        loop.on_iteration_done()
