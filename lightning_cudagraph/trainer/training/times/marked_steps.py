"""Patches that mark where the parts of a step begin and end, in captured and in eager steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
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
    if not module.automatic_optimization:
        places.append((module, "clip_gradients", "clipping"))  # called by the step itself
    elif trainer.gradient_clip_val or is_overridden(clip, module, pl.LightningModule):
        places.append((module, clip, "clipping"))
    if scaler is not None:
        places += [(scaler, "unscale_", "scaler"), (scaler, "update", "scaler")]
    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(in_place(owner, name, _timed(getattr(owner, name), marks, stage)))
        yield


@contextmanager
def timed_optimizers(marks: StepMarks, trainer: pl.Trainer) -> Iterator[None]:
    """Mark the optimizer steps in an eager step of manual optimization.

    User code calls the wrapped optimizer, which steps through the strategy with scaler and hooks, or
    the raw optimizer. The time of a closure is not the optimizer's.
    """
    by_strategy = False
    raw_steps: list[AbstractContextManager[None]] = []  # a class may call the step of its base

    def timed(closure: Any) -> Any:
        if closure is do_nothing_closure or not callable(closure):
            return closure

        @functools.wraps(closure)
        def forward() -> Any:
            with marks.stage("forward"):
                marks.forward_began()
                return closure()

        return forward

    original = trainer.strategy.optimizer_step

    def through_strategy(optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal by_strategy
        around, by_strategy = by_strategy, True
        try:
            with marks.stage("optimizer"):
                return original(optimizer, timed(closure), *args, **kwargs)
        finally:
            by_strategy = around  # the closure of one optimizer may step another one

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if by_strategy or torch.compiler.is_compiling():
            return None
        raw_steps.append(marks.stage("optimizer"))
        raw_steps[-1].__enter__()
        itself, *rest = args
        if "closure" in kwargs:
            kwargs = kwargs | {"closure": timed(kwargs["closure"])}
        return (itself, *map(timed, rest[:1]), *rest[1:]), kwargs

    def behind(*_: Any) -> None:
        if raw_steps and not by_strategy and not torch.compiler.is_compiling():
            raw_steps.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        stack.enter_context(in_place(trainer.strategy, "optimizer_step", through_strategy))
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(behind).remove)
        yield


def _timed(function: Callable[..., Any], marks: StepMarks, stage: Stage) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with marks.stage(stage):
            return function(*args, **kwargs)

    return timed
