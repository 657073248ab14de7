"""Shared state of one `fit` with graphs, and the guards of its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.checks.audit.frozen import moving_number
from lightning_cudagraph.checks.guards.guards import (
    GuardedValues,
    Guards,
    OutsideModel,
    Unguarded,
)
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.tensors.host_values import HostReads, HostValue
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
from lightning_cudagraph.trainer.training.closures import GraphedOptimization
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.times.run_times import RunTimes

__all__ = ["STEP_GETTERS", "TrainingRun"]

_INDEX, _STEP = "batch_idx", "self.global_step"
# The getters of the number of steps.
STEP_GETTERS = frozenset({_STEP, "trainer.global_step", "trainer.fit_loop.epoch_loop.global_step"})


@dataclass
class TrainingRun:
    """Shared state of one `fit` with graphs.

    Attributes:
        times: clocks of the run, and the output of their readings.
        part: the optimizer's part of the steps.
        replicas: of the module, in the processes of the run.
        shown: logged values for the progress bar.
        hooks: those inside a step that run on the host in every replay.
        guards: comparison of what the graphs have baked in.
        carried: rebound attributes: each step binds them to another tensor.
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
    shown: ShownValues = field(init=False, default_factory=ShownValues)

    def __post_init__(self) -> None:
        trainer, module, harmless = self.trainer, self.module, self.settings.harmless
        # Numbers that the user allows to be frozen.
        self._frozen = {_INDEX} & harmless
        if not harmless.isdisjoint({*STEP_GETTERS, "global_step"}):
            self._frozen |= {_STEP}
        self.replicas = Replicas(trainer.strategy)
        self.metrics = StepMetrics(module, trainer, self.backend, host_rules(trainer, harmless))
        self.hooks = InnerHooks(trainer, module, lambda: self.part.behind is not None)
        self.guards = _guards(self)
        self.carried = ReboundAttributes(
            module, self.backend.device, OWN_ATTRIBUTES | harmless, is_metric
        )
        self.logs = Logs(trainer, module, self.metrics, adds=True)

    @property
    def steps_before(self) -> int:
        """Number of optimizer steps before the one that the current batch belongs to."""
        return self.optimization.optim_progress.optimizer_steps

    def beside(self, batch_idx: int) -> dict[str, int]:
        """The numbers beside a batch that its step may read in part, by name."""
        numbers = {_INDEX: batch_idx, _STEP: self.steps_before}
        return numbers if not self._frozen else {n: numbers[n] for n in numbers if n not in self._frozen}

    def noted(self, reads: HostReads | None, batch_idx: int) -> int | HostValue:
        """The index of a batch for a capture of its step, which notes what is read of it."""
        return self._noted(reads, _INDEX, batch_idx)

    def _noted(self, reads: HostReads | None, name: str, number: int) -> int | HostValue:
        if reads is None or name in self._frozen:
            return number
        return moving_number(reads, name, number, self.settings.max_graphs)

    @contextmanager
    def noted_step(self, reads: HostReads | None) -> Iterator[None]:
        """Context of a capture of a step, which notes what is read of `global_step`."""
        total: Any = self.optimization.optim_progress.optimizer.step.total
        before = total.completed
        total.completed = self._noted(reads, _STEP, before)
        try:
            yield
        finally:
            total.completed = before


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
