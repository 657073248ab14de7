"""One more replay in the place of `_AutomaticOptimization.run`, where that is all there is to do.

Lightning makes a closure of each batch and hands it down to the strategy, through hooks that nobody has
overridden; there it is a step with all that can become of one. For a batch that is plainly one more,
what has an effect is done here: counters, the comparison of what the graph has baked in, the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product, starmap
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.tensors.batch import copied_leaf, map_leaves
from lightning_cudagraph.timing.events.clock import FitClock
from lightning_cudagraph.trainer.logs.recorder import Logs
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.replicas import Replicas
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepOutputs
from lightning_cudagraph.trainer.training.closures import GraphedOptimization
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks

__all__ = ["NOT_PLAIN", "PlainReplay"]

NOT_PLAIN = object()

# Of the optimization; what somebody else has put in the place of one would be called.
_METHODS = ("run", "_make_closure", "_optimizer_step")


class PlainReplay:
    """The steps of one run that are plainly one more replay.

    Args:
        trainer: the trainer.
        engine: which replays.
        part: the optimizer's part of the steps.
        hooks: those inside the steps.
        metrics: those in the graph.
        logs: what the steps log.
        clock: says which steps are timed.
        replicas: of the module, in the processes of the run.
        account: told of each replay, and whether the optimizer has taken its step in it; does what the
            host does after any replay, but for the logs.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        engine: StepEngine[StepOutputs],
        part: OptimizerPart,
        hooks: InnerHooks,
        metrics: StepMetrics,
        logs: Logs,
        clock: FitClock,
        replicas: Replicas,
        account: Callable[[StepOutputs, bool], None],
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._part = part
        self._hooks = hooks
        self._metrics = metrics
        self._logs = logs
        self._clock = clock
        self._replicas = replicas
        self._account = account
        self._refreshes = {
            place: partial(self._refresh, place)
            for place in starmap(Place, product((False, True), repeat=3))
        }

    def place(self, drops: bool, steps: bool) -> Place:
        """Where a step stands that drops gradients, or in which the optimizer takes its step."""
        return Place(drops, steps, steps and bool(self._replicas.wrappers))

    def is_possible(self) -> bool:
        """Whether Lightning would do nothing of somebody else's on the way to the replay."""
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
        optimizer: LightningOptimizer = self._trainer.strategy._lightning_optimizers[0]
        return (
            type(optimization) is GraphedOptimization
            and vars(optimization).keys().isdisjoint(_METHODS)
            and "step" not in vars(optimizer)
            and optimizer._on_before_step is do_nothing_closure
            and optimizer._on_after_step is do_nothing_closure
            and not self._hooks.after_backward
        )

    def __call__(self, batch: Any, place: Place, wanted: bool) -> Any:
        """Do a step by a replay.

        Args:
            batch: what it is done on.
            place: in the window of batches whose gradients are accumulated.
            wanted: somebody is given the step's outputs.

        Returns:
            The outputs as callbacks are given them, or None if they are not wanted. `NOT_PLAIN`, if
            nothing has happened.
        """
        steps, part = place.steps, self._part
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
        if (
            part.behind is not None
            or optimization._skip_backward
            or not part.is_of(self._trainer.strategy.optimizers[0])
            or self._replicas.unlike_others(place)
        ):
            return NOT_PLAIN
        timed = self._clock.is_due(optimization.optim_progress.optimizer_steps)
        progress = optimization.optim_progress.optimizer.step
        total, current = progress.total, progress.current
        if steps:
            total.ready += 1
            current.ready += 1
        outputs = self._engine.again(batch, place, self._refreshes[place], timed, self._upcoming)
        if outputs is None:
            if steps:
                total.ready -= 1
                current.ready -= 1
            return NOT_PLAIN
        self._replicas.replayed(place)
        given: Any = None
        if wanted:
            # Copies, because callbacks keep outputs, and the next replay overwrites the static ones.
            extra = map_leaves(outputs.extra, copied_leaf)
            given = {"loss": outputs.logs.hand_over(self._trainer), **extra}
        else:
            self._logs.put_off(place, outputs.logs)
        self._account(outputs, steps)
        if steps:
            total.completed += 1
            current.completed += 1
        return given

    def _upcoming(self, outputs: StepOutputs) -> None:
        self._clock.upcoming(outputs.marks)

    def _refresh(self, place: Place) -> None:
        if place.steps:
            self._part.optimizer.refresh()
        self._metrics.adopt()
        self._logs.before_replay(place)
