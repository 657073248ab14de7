"""Calls of the hooks around a step on the fast path: the same calls as Lightning's, in the same order.

Callbacks come first, then the module. Only a hook that reads the outputs gets copies of them, and only
one that reads the batch gets a batch that no replay overwrites.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy

from lightning_cudagraph.trainer.common.profilers import draws_late
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepOutputs
from lightning_cudagraph.trainer.training.hooks.current_hook import CurrentHook
from lightning_cudagraph.trainer.training.hooks.hook_arguments import ignores
from lightning_cudagraph.trainer.training.hooks.user_hooks import BEFORE_ARGUMENTS, is_known
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.steps import TrainingSteps

_NOTHING = nullcontext()
START, END = "on_train_batch_start", "on_train_batch_end"
# Those that do nothing.
_EMPTY = frozenset(
    getattr(kind, name) for kind in (Callback, pl.LightningModule) for name in (START, END)
) | {Strategy.on_train_batch_start}


class BatchHooks:
    """The hooks `on_train_batch_start` and `on_train_batch_end` of callbacks and module.

    They are looked up for each call, so that hooks can set and remove others. The profiler is
    `PassThroughProfiler`, so no action is named.

    Attributes:
        current: the name of the hook that runs.
    """

    def __init__(self, run: TrainingRun, steps: TrainingSteps) -> None:
        self._trainer = run.trainer
        self._module = run.module
        self.current = CurrentHook(run.module, run.guards)
        self._shown = run.shown
        self._host = run.times.host
        self._steps = steps

    def has(self, name: str) -> bool:
        """True if a callback or the module has a hook of this name."""
        owners = (*callbacks_of(self._trainer), self._module)
        return any(_does_something(getattr(owner, name)) for owner in owners)

    def start(self, batch: Any, batch_idx: int) -> tuple[Any, Any]:
        """Call the hooks before a step; return its batch, and the answer of the module's hook."""
        trainer, module, host = self._trainer, self._module, self._host
        self.current.begin(START)
        for callback in callbacks_of(trainer):
            hook: Any = callback.on_train_batch_start
            if _does_something(hook):
                batch = self._readable(batch, hook, BEFORE_ARGUMENTS)
                with host.of_hook(callback, START):
                    hook(trainer, module, batch, batch_idx)
        response = None
        if _does_something(hook := module.on_train_batch_start):
            self.current.set(START)
            batch = self._readable(batch, hook, 0)
            with host.of_hook(module, START):
                response = hook(batch, batch_idx)
        # One that these hooks have just set: with another, Lightning's own loop runs.
        if _does_something(hook := trainer.strategy.on_train_batch_start):
            batch = self._readable(batch, hook, 0)
            hook(batch, batch_idx)
        self.current.end()
        return batch, response

    def end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer, module, host = self._trainer, self._module, self._host
        self.current.begin(END)
        for callback in callbacks_of(trainer):
            hook: Any = callback.on_train_batch_end
            if _does_something(hook):
                outputs = self._copied(outputs, hook, BEFORE_ARGUMENTS)
                batch = self._readable(batch, hook, BEFORE_ARGUMENTS + 1)
                drawn = self._shown.drawn() if draws_late(callback) else _NOTHING
                with host.of_hook(callback, END), drawn:
                    hook(trainer, module, _given(outputs), batch, batch_idx)
        if _does_something(hook := module.on_train_batch_end):
            self.current.set(END)
            outputs = self._copied(outputs, hook, 0)
            batch = self._readable(batch, hook, 1)
            with host.of_hook(module, END):
                hook(_given(outputs), batch, batch_idx)
        self.current.end()

    def _readable(self, batch: Any, hook: Any, position: int) -> Any:
        """The batch, or one that no replay overwrites, if the hook reads it and may keep it."""
        if self._steps.graphs_of(batch) is None or ignores(hook, position) or is_known(hook):
            return batch
        own = self._steps.own(batch)
        self._trainer.fit_loop.epoch_loop._results.batch = own
        return own

    def _copied(self, outputs: Any, hook: Any, position: int) -> Any:
        if not isinstance(outputs, StepOutputs) or ignores(hook, position):
            return outputs
        return self._steps.outputs(outputs)


def _does_something(hook: Any) -> bool:
    return getattr(hook, "__func__", None) not in _EMPTY and callable(hook)


def _given(outputs: Any) -> Any:
    return None if isinstance(outputs, StepOutputs) else outputs
