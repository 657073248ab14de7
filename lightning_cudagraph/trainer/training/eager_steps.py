"""Steps that run eagerly in a `fit` with graphs; the last one of a warm-up is timed like replays."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from torch import Tensor

from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.tensors.recomputed import detach_recomputed
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.trainer.logs.recorder import Logs
from lightning_cudagraph.trainer.replicas import Replicas
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.times.marked_steps import timed_closure, timed_stages
from lightning_cudagraph.trainer.training.times.run_times import RunTimes, batch_of_step, step_number

__all__ = ["EagerSteps"]


class EagerSteps:
    """Runs steps without a graph.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        logs: what the steps log.
        replicas: of the module, in the processes of the run.
        times: what is measured of the run.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        logs: Logs,
        replicas: Replicas,
        times: RunTimes,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._logs = logs
        self._replicas = replicas
        self._times = times
        self._marks: StepMarks | None = None  # of a step that is under way

    def run(self, step: Callable[[], object], place: Place) -> None:
        """Run a step.

        Args:
            step: does it.
            place: in the window of batches whose gradients are accumulated.
        """
        detach_recomputed(self._module)
        with self._logs.noted():
            step()
        self._replicas.ran()

    def run_marked(self, step: Callable[[], object], place: Place) -> None:
        """Run a step, and time its parts.

        Args:
            step: does it.
            place: in the window of batches whose gradients are accumulated.
        """
        self._marks = self._times.eager_marks(has_optimizer=place.steps)
        try:
            with self._marks.recording(), timed_stages(self._marks, self._trainer, self._module):
                self.run(step, place)
            self._times.eager_clock.ended(
                self._marks, step_number(self._trainer), False, *batch_of_step(self._trainer)
            )
        finally:
            self._marks = None

    def call(self, closure: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
        """Call the closure of a step that is under way.

        Args:
            closure: the closure.
            plain: what Lightning's own does.
        """
        if self._marks is None:
            return plain()
        with timed_closure(closure, self._marks):
            return plain()
