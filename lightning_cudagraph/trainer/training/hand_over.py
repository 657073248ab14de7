"""What the host does after a replay, and in the middle of one: what an eager step would have left."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from lightning_cudagraph.capture.steps import Phase
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.tensors.batch import copied_leaf, map_leaves
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepBody, StepOutputs
from lightning_cudagraph.trainer.training.closures import GraphClosure, GraphedOptimization
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.times.run_times import RunTimes, batch_of_step, step_number

__all__ = ["HandOver"]


class HandOver:
    """Hands on what the replays of a run leave.

    Args:
        trainer: the trainer.
        optimization: Lightning's loop, in our form.
        guards: what a graph bakes in.
        hooks: those that are left out of the graph, and run on the host.
        metrics: the metrics of the module.
        times: what is measured of the run.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        optimization: GraphedOptimization,
        guards: Guards,
        hooks: InnerHooks,
        metrics: StepMetrics,
        times: RunTimes,
    ) -> None:
        self._trainer = trainer
        self._optimization = optimization
        self._guards = guards
        self._hooks = hooks
        self._metrics = metrics
        self._times = times
        self._clock = times.clock

    def host_turn(self, outputs: StepOutputs, index: int, closure: GraphClosure, body: StepBody) -> None:
        """Call the hooks in the middle of a replay, where they are called in an eager step."""
        turn = outputs.turns[index]
        turn.logs.hand_over(self._trainer)
        self._count_zero_grads(turn.zero_grads)
        for attribute in turn.recomputed:
            attribute.hand_over()
        turn.run(closure)
        body.optimizer.refresh()
        self._metrics.adopt()
        if change := self._guards.changed():
            raise HookError(
                f"In the middle of a step that is replayed, after {turn.whose}, {change}; the rest of"
                " the graph holds what was there at the capture.",
                "Change it in `on_train_batch_start` or `on_train_batch_end`.",
            )

    def take_outputs(self, outputs: StepOutputs, closure: GraphClosure) -> Tensor:
        """After a replay: hand on what Lightning would have had from an eager step.

        Returns:
            The loss.
        """
        # Copies, because callbacks keep outputs, and the next replay overwrites the static ones.
        result = ClosureResult(None, extra=map_leaves(outputs.extra, copied_leaf))
        loss = outputs.logs.hand_over(self._trainer)
        assert loss is not None
        result.loss = loss
        closure._result = result
        self._account(outputs)
        return loss

    def account_plain(self, outputs: StepOutputs, has_optimizer: bool) -> None:
        """After a replay that did not come by way of a closure: all but the logs.

        Args:
            outputs: its static outputs.
            has_optimizer: the optimizer has taken its step in it.
        """
        self._account(outputs)
        steps_before = self._optimization.optim_progress.optimizer_steps
        is_next_due = self._clock.is_due(steps_before + has_optimizer)
        batch = batch_of_step(self._trainer)
        self._clock.ended(outputs.marks, step_number(self._trainer), is_next_due, *batch)
        if has_optimizer:
            self._times.pace.tick(Phase.CAPTURED)

    def _account(self, outputs: StepOutputs) -> None:
        """After a replay: do what the host does after any, but for the logs."""
        self._count_zero_grads(outputs.zero_grads)
        for attribute in outputs.recomputed:
            attribute.hand_over()
        self._metrics.count_references()
        if outputs.after_backward:
            self._hooks.run_after_backward()

    def _count_zero_grads(self, number: int) -> None:
        """Count the drops of gradients that a replay has done, as Lightning counts its own."""
        zero_grad = self._optimization.optim_progress.optimizer.zero_grad
        for _ in range(number):
            zero_grad.increment_ready()
            zero_grad.increment_started()
            zero_grad.increment_completed()
