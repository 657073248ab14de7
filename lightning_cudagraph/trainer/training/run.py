"""Shared state of one `fit` with graphs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cudagraph.checks.guards.guards import GuardedValues, OutsideModel
from lightning_cudagraph.checks.guards.hooks import roots_of_comm_hooks
from lightning_cudagraph.trainer.common.captured_run import CapturedRun
from lightning_cudagraph.trainer.logs.shown import ShownValues
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.closures import GraphedOptimization
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.times.run_times import RunTimes


@dataclass
class TrainingRun(CapturedRun):
    """Shared state of one `fit` with graphs.

    Attributes:
        is_in_step: a step is under way; hooks inside the step see that.
    """

    times: RunTimes
    part: OptimizerPart
    optimization: GraphedOptimization = field(init=False, default_factory=GraphedOptimization)
    hooks: InnerHooks = field(init=False)
    shown: ShownValues = field(init=False, default_factory=ShownValues)
    is_in_step: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.hooks = InnerHooks(self.trainer, self.module, lambda: self.part.eager_reason is not None)
        super().__post_init__()

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
