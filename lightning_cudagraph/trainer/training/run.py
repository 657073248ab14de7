"""Shared state of one `fit` with graphs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from lightning_cudagraph.checks.guards.guards import GuardedValues, OutsideModel
from lightning_cudagraph.checks.guards.hooks import roots_of_comm_hooks
from lightning_cudagraph.compat.names.lightning_names import _AutomaticOptimization
from lightning_cudagraph.trainer.common.captured_run import CapturedRun
from lightning_cudagraph.trainer.logs.shown import ShownValues
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.closures import Call, GraphClosure
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.times.run_times import RunTimes


@dataclass
class TrainingRun(CapturedRun):
    """Shared state of one `fit` with graphs.

    Attributes:
        optimization: the loop's own automatic optimization.
        is_in_step: a step is under way; hooks inside the step see that.
        untimed: layers and stages that no captured timed step has times of, with the reason; None until
            one was captured.
        with_gradients: the ids of parameters that had gradients at the end of a warm-up step.
    """

    times: RunTimes
    part: OptimizerPart
    optimization: _AutomaticOptimization = field(init=False)
    hooks: InnerHooks = field(init=False)
    shown: ShownValues = field(init=False, default_factory=ShownValues)
    is_in_step: bool = field(init=False, default=False)
    untimed: dict[str, str] | None = field(init=False, default=None)
    with_gradients: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.optimization = self.trainer.fit_loop.epoch_loop.automatic_optimization
        self.hooks = InnerHooks(self.trainer, self.module, lambda: self.part.eager_reason is not None)
        super().__post_init__()

    def closure_for(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int, call: Call
    ) -> GraphClosure:
        """Make a closure that can be captured or replayed."""
        make_closure = _AutomaticOptimization._make_closure  # below the patch
        closure = make_closure(self.optimization, kwargs, optimizer, batch_idx)
        return GraphClosure(closure, kwargs, batch_idx, call)

    def count_zero_grads(self, number: int) -> None:
        """Count the `zero_grad` calls inside a replay, as Lightning counts its own."""
        zero_grad: Any = self.optimization.optim_progress.optimizer.zero_grad
        for counts in (zero_grad.total, zero_grad.current):
            counts.ready += number
            counts.started += number
            counts.completed += number

    @property
    def steps_before(self) -> int:
        """Number of optimizer steps before the one that the current batch belongs to."""
        return self.optimization.optim_progress.optimizer_steps

    def progress(self) -> Any:
        return self.optimization.optim_progress.optimizer.step.total

    def guarded_values(self) -> GuardedValues:
        part, metrics, hooks, replicas = self.part, self.metrics, self.hooks, self.replicas
        return GuardedValues(
            lambda: {
                **part.cheap_state(),
                **metrics.state.described(),
                **replicas.described(),
                "the hooks inside the step": hooks.named(),
            },
            lambda: {**part.optimizer.addresses(), **self.precision()},
            lambda: (*part.quick_state(), *hooks.quick(), metrics.state.fits(), replicas.settings()),
        )

    def outside(self) -> OutsideModel:
        part, outside = self.part, super().outside()
        return replace(
            outside,
            parameters=lambda: part.optimizer.named_parameters(),
            containers=lambda: part.optimizer.places(),
            callees=lambda: [part.optimizer.optimizer, *outside.callees()],
            read=lambda: [
                *(part.optimizer.read() if part.optimizer.is_inspected else []),
                *roots_of_comm_hooks(self.replicas.own_hooks),
            ],
        )
