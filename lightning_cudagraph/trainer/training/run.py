"""Shared state of one `fit` with graphs, and the guards of its graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

import lightning.pytorch as pl

from lightning_cudagraph.checks.guards.guards import (
    GuardedValues,
    Guards,
    OutsideModel,
    Unguarded,
)
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.host_rules import (
    OWN_ATTRIBUTES,
    RUN_STATE,
    host_rules,
    outside_of_model,
)
from lightning_cudagraph.trainer.logs.recorder import Logs
from lightning_cudagraph.trainer.logs.shown import ShownValues
from lightning_cudagraph.trainer.metrics.of_model import is_metric
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.replicas import Replicas
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.captured_step.step_numbers import StepNumbers
from lightning_cudagraph.trainer.training.closures import GraphedOptimization
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.times.run_times import RunTimes


@dataclass
class TrainingRun:
    """Shared state of one `fit` with graphs.

    Attributes:
        shown: logged values for the progress bar.
        hooks: those inside a step that run on the host in every replay.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    backend: Backend
    settings: Settings
    times: RunTimes
    part: OptimizerPart
    optimization: GraphedOptimization = field(init=False, default_factory=GraphedOptimization)
    replicas: Replicas = field(init=False)
    metrics: StepMetrics = field(init=False)
    hooks: InnerHooks = field(init=False)
    guards: Guards = field(init=False)
    carried: ReboundAttributes = field(init=False)
    logs: Logs = field(init=False)
    numbers: StepNumbers = field(init=False)
    shown: ShownValues = field(init=False, default_factory=ShownValues)

    def __post_init__(self) -> None:
        trainer, module, harmless = self.trainer, self.module, self.settings.harmless
        self.replicas = Replicas(trainer.strategy)
        self.metrics = StepMetrics(module, trainer, self.backend, host_rules(trainer, harmless))
        self.hooks = InnerHooks(trainer, module, lambda: self.part.behind is not None)
        self.guards = _guards(self)
        self.carried = ReboundAttributes(
            module, self.backend.device, OWN_ATTRIBUTES | harmless, is_metric
        )
        self.logs = Logs(trainer, module, self.metrics, adds=True)
        self.numbers = StepNumbers(
            lambda: self.optimization.optim_progress.optimizer.step.total, self.settings
        )

    @property
    def steps_before(self) -> int:
        """Number of optimizer steps before the one that the current batch belongs to."""
        return self.optimization.optim_progress.optimizer_steps


def _guards(run: TrainingRun) -> Guards:
    trainer, part, metrics = run.trainer, run.part, run.metrics
    hooks, replicas = run.hooks, run.replicas
    return Guards(
        run.module,
        GuardedValues(
            lambda: {
                **part.cheap_state(),
                **metrics.described(),
                **replicas.described(),
                "the hooks inside the step": hooks.named(),
            },
            part.thorough_state,
            lambda: (*part.quick_state(), *hooks.quick(), metrics.fits(), replicas.settings()),
        ),
        Unguarded(
            OWN_ATTRIBUTES | run.settings.harmless,
            metrics.stays_on_host,
            metrics.host_names,
            RUN_STATE,
        ),
        OutsideModel(
            around={"trainer": trainer},
            parameters=lambda: {
                f"parameter {index} in param group {group_idx} of the optimizer": parameter
                for group_idx, group in enumerate(part.optimizer.optimizer.param_groups)
                for index, parameter in enumerate(group["params"])
            },
            containers=lambda: part.optimizer.places(),
            callees=lambda: [part.optimizer.optimizer, trainer.strategy, trainer.precision_plugin],
            roots=lambda: outside_of_model(trainer),
        ),
    )
