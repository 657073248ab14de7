"""Eager steps in a `fit` with graphs; the last one of a warm-up is timed like a replay."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.marked_steps import timed_closure, timed_stages
from lightning_cudagraph.trainer.training.times.run_times import batch_of_step, step_number


class EagerSteps:
    """Runs steps without a graph."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._marks: StepMarks | None = None  # of the timed step that is under way

    def run(self, eagerly: Callable[[], object]) -> None:
        with self._run.logs.noted():
            eagerly()
        self._run.replicas.ran()

    def run_marked(self, eagerly: Callable[[], object], has_optimizer: bool) -> None:
        trainer, times = self._run.trainer, self._run.times
        self._marks = marks = times.marks(has_optimizer)
        try:
            with marks.recording(), timed_stages(marks, trainer, self._run.module):
                self.run(eagerly)
            times.eager_clock.ended(marks, step_number(trainer), False, *batch_of_step(trainer))
        finally:
            self._marks = None

    def call(self, closure: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
        """Call the closure of the step that is under way; `plain` is the call of Lightning's own."""
        if self._marks is None:
            return plain()
        with timed_closure(closure, self._marks):
            return plain()
