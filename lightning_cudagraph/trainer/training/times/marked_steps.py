"""Patches that mark where the parts of a step begin and end, in captured and in eager steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_cudagraph.compat.method_patches import in_place
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.readings.spans import Stage
from lightning_cudagraph.trainer.config.support import is_overridden, scaler_of


def timed_forward(step: Callable[[], ClosureResult], marks: StepMarks) -> Callable[[], ClosureResult]:
    """Wrap the `training_step` of a closure so that it marks the forward pass."""

    def timed() -> ClosureResult:
        marks.forward_began()
        result = step()
        marks.forward_ended(result.closure_loss)
        return result

    return timed


@contextmanager
def timed_stages(marks: StepMarks, trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Mark the stages after the backward pass: clipping, and the scaler's work."""
    scaler = scaler_of(trainer)
    clip = "configure_gradient_clipping"
    places: list[tuple[Any, str, Stage]] = []
    if trainer.gradient_clip_val or is_overridden(clip, module, pl.LightningModule):
        places.append((module, clip, "clipping"))
    if scaler is not None:
        places += [(scaler, "unscale_", "scaler"), (scaler, "update", "scaler")]
    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(in_place(owner, name, _timed(getattr(owner, name), marks, stage)))
        yield


def _timed(function: Callable[..., Any], marks: StepMarks, stage: Stage) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with marks.stage(stage):
            return function(*args, **kwargs)

    return timed
