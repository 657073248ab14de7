"""Host work after a replay and at its graph breaks: the effects that an eager step has on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_cudagraph.capture.steps import AccumulationPhase, Phase
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.optim.optimizers import EagerOptimizer
from lightning_cudagraph.tensors.batch import copied_leaf, map_leaves
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepOutputs
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.run_times import batch_of_step, step_number


class AfterReplay:
    """After-replay work: logs, hooks, counters, gradients and outputs, as an eager step leaves them."""

    def __init__(self, run: TrainingRun) -> None:
        self._trainer = run.trainer
        self._optimization = run.optimization
        self._replicas = run.replicas
        self._metrics = run.metrics
        self._hooks = run.hooks
        self._guards = run.guards
        self._logs = run.logs
        self._clock = run.times.clock
        self._pace = run.times.pace

    def in_the_middle(
        self, outputs: StepOutputs, index: int, closure: GraphClosure, optimizer: EagerOptimizer
    ) -> None:
        """Call the hooks of one graph break, where an eager step calls them."""
        at_break = outputs.breaks[index]
        at_break.logs.hand_over(self._trainer)
        self._count_zero_grads(at_break.zero_grads)
        for attribute in at_break.recomputed:
            attribute.hand_over()
        at_break.run(closure)
        optimizer.note_moves()
        self._metrics.adopt()
        if change := self._guards.changed():
            raise HookError(
                f"In the middle of a step that is replayed, after {at_break.whose}, {change}; the rest"
                " of the graph holds what was there at the capture.",
                "Change it in `on_train_batch_start` or `on_train_batch_end`.",
            )

    def after(
        self, outputs: StepOutputs, accumulation: AccumulationPhase, timed: bool, wanted: bool
    ) -> dict[str, Any] | None:
        """Leave the state that Lightning has at the end of an eager step.

        Return copies of the outputs, as hooks get them, with the loss, if they are `wanted` at once. If
        not, what was logged waits until it is asked for.
        """
        self._replicas.replayed(accumulation)
        given: dict[str, Any] | None = None
        if wanted:
            loss = outputs.logs.hand_over(self._trainer)
            assert loss is not None
            given = _copied(loss, outputs)
        else:
            self._logs.put_off(outputs.logs)
        self._count_zero_grads(outputs.zero_grads)
        for attribute in outputs.recomputed:
            attribute.hand_over()
        self._metrics.count_references()
        if outputs.after_backward:
            self._hooks.run_after_backward()
        marks = outputs.marks if timed else None
        is_next_due = self._clock.is_due(
            self._optimization.optim_progress.optimizer_steps + accumulation.steps
        )
        batch_idx, is_last = batch_of_step(self._trainer)
        self._clock.ended(marks, step_number(self._trainer), is_next_due, batch_idx, is_last)
        if not outputs.is_measured:
            self._pace.pause()
        elif accumulation.steps:
            self._pace.tick(Phase.CAPTURED)
        return given

    def outputs(self, outputs: StepOutputs) -> dict[str, Any]:
        """The outputs of the last replay as hooks get them, if `after` was not asked for them."""
        return _copied(outputs.loss.clone(), outputs)

    def _count_zero_grads(self, number: int) -> None:
        """Count the `zero_grad` calls inside a replay, as Lightning counts its own."""
        zero_grad: Any = self._optimization.optim_progress.optimizer.zero_grad
        for counts in (zero_grad.total, zero_grad.current):
            counts.ready += number
            counts.started += number
            counts.completed += number


def _copied(loss: Tensor, outputs: StepOutputs) -> dict[str, Any]:
    # Copies, because callbacks keep outputs, and the next replay overwrites the static ones.
    return {"loss": loss, **map_leaves(outputs.extra, copied_leaf)}
