"""Notes on settings that would make the steps of a run faster, from their times."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, STEP_TAG
from lightning_cudagraph.timing.readings.windows import WindowSummary

# A smaller share of the step is not worth another setting.
_MIN_SHARE = 0.05
# Those with a fused kernel on a GPU.
_FUSED = (SGD, Adam, AdamW)


def bucket_notes(strategy: Strategy, graph: WindowSummary) -> list[str]:
    """Return a note for the report if steps wait for all-reduces of buckets of DDP's default size.

    That size is for eager steps, where the host launches each all-reduce. In a graph it launches
    none, and the first of many small ones begins earlier.
    """
    exposed = graph.get(EXPOSED_TAG)
    if exposed is None or exposed.share < _MIN_SHARE or not isinstance(strategy, DDPStrategy):
        return []
    if "bucket_cap_mb" in strategy._ddp_kwargs:
        return []
    note = (
        f"{exposed.share:.0%} of a step is the wait for all-reduces; smaller buckets begin earlier:"
        " `DDPStrategy(bucket_cap_mb=5, gradient_as_bucket_view=True)` (docs/several_gpus.md)"
    )
    return [note]


def fused_notes(trainer: pl.Trainer, graph: WindowSummary) -> list[str]:
    """Return a note for the report if a part of the step is that of an optimizer that could be fused.

    None if its fused form would step after the replay, or does not exist, or if Lightning refuses it:
    it does not clip gradients that a fused optimizer unscales.
    """
    if trainer.gradient_clip_val and isinstance(trainer.precision_plugin, MixedPrecision):
        return []
    optimizer = trainer.optimizers[0]
    times = graph.get(f"{STEP_TAG}optimizer")
    if times is None or times.share < _MIN_SHARE or type(optimizer) not in _FUSED:
        return []
    for group in optimizer.param_groups:
        # With a momentum that cycles, which fused kernels take only as a number, it would step eagerly.
        if group.get("fused") or group.get("differentiable") or "base_momentum" in group:
            return []
        if not all(map(_may_be_fused, group["params"])):
            return []
    note = (
        f"the optimizer takes {times.share:.0%} of a step; `{type(optimizer).__name__}(..., fused=True)`"
        " has fewer kernels; its numbers differ from those of the default form in the last place"
    )
    return [note]


def _may_be_fused(parameter: Tensor) -> bool:
    is_float = parameter.is_floating_point() and parameter.dtype != torch.float64
    return is_float and type(parameter) is nn.Parameter  # no fused SGD takes a `DTensor`
