"""Begins and ends of the parts of a step, which Lightning's own code passes to its marks.

For a step that is captured, and for one that runs eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult

from lightning_cudagraph.compat.method_patches import in_place
from lightning_cudagraph.timing.events.marks import Stage, StepMarks
from lightning_cudagraph.trainer.config.support import is_overridden, scaler_of

__all__ = ["timed_closure", "timed_forward", "timed_optimizers", "timed_stages"]


def timed_forward(step: Callable[[], ClosureResult], marks: StepMarks) -> Callable[[], ClosureResult]:
    """A call of `training_step` that tells the marks of the forward pass.

    Args:
        step: that of a closure.
        marks: those of the step.
    """

    def timed() -> ClosureResult:
        marks.forward_began()
        result = step()
        marks.forward_ended(result.closure_loss)
        return result

    return timed


@contextmanager
def timed_closure(closure: Closure, marks: StepMarks) -> Iterator[None]:
    """Around an eager call of a closure: tell the marks of forward and backward pass."""
    before = closure._step_fn
    closure._step_fn = timed_forward(before, marks)
    try:
        yield
    finally:
        closure._step_fn = before
    marks.backward_ended()


@contextmanager
def timed_stages(marks: StepMarks, trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Tell the marks what of that which comes after the backward pass is clipping, or the scaler's."""
    scaler = scaler_of(trainer)
    clip = "configure_gradient_clipping"
    places: list[tuple[Any, str, Stage]] = []
    if not module.automatic_optimization:
        places.append((module, "clip_gradients", "clipping"))  # which the step calls itself
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
    """Tell the marks of an eager step where manual optimization has optimizers step.

    They step by their wrappers, through the strategy, with the scaler and hooks around them; or by
    themselves. What a closure does is no part of it.

    Args:
        marks: those of the step.
        trainer: the trainer, with its optimizers.
    """
    by_strategy = False
    by_themselves: list[AbstractContextManager[None]] = []  # a class may call the step of its base

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
            by_strategy = around  # it may be the step of another one's closure

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if by_strategy or torch.compiler.is_compiling():
            return None
        by_themselves.append(marks.stage("optimizer"))
        by_themselves[-1].__enter__()
        itself, *rest = args
        if "closure" in kwargs:
            kwargs = kwargs | {"closure": timed(kwargs["closure"])}
        return (itself, *map(timed, rest[:1]), *rest[1:]), kwargs

    def behind(*_: Any) -> None:
        if by_themselves and not by_strategy and not torch.compiler.is_compiling():
            by_themselves.pop().__exit__(None, None, None)

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
