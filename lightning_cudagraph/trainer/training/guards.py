"""What a captured training step bakes in, and its guards compare before each replay."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.trainer.host_rules import OWN_ATTRIBUTES, RUN_STATE, outside_of_model
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.replicas import Replicas
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks

__all__ = ["training_guards"]


def training_guards(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    part: OptimizerPart,
    hooks: InnerHooks,
    metrics: StepMetrics,
    replicas: Replicas,
    harmless: frozenset[str],
) -> Guards:
    """The guards of a `fit`.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        part: the optimizer's part of the steps.
        hooks: those inside the steps.
        metrics: the metrics of the module.
        replicas: what averages its gradients, or shards its weights.
        harmless: names that the user says may be frozen, or not repeated.
    """
    return Guards(
        module,
        lambda: {
            **part.cheap_state(),
            **metrics.described(),
            **replicas.described(),
            "the hooks inside the step": hooks.named(),
        },
        part.thorough_state,
        OWN_ATTRIBUTES | harmless,
        lambda: (*part.quick_state(), *hooks.quick(), metrics.fits(), replicas.settings()),
        metrics.stays_on_host,
        lambda: part.optimizer.places(),
        {"trainer": trainer},
        metrics.host_names,
        lambda: {
            f"parameter {index} in param group {group_idx} of the optimizer": parameter
            for group_idx, group in enumerate(part.optimizer.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        },
        lambda: [part.optimizer.optimizer, trainer.strategy, trainer.precision_plugin],
        RUN_STATE,
        lambda: outside_of_model(trainer),
    )
