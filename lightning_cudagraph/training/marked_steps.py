"""Where the parts of a step begin and end: told to its marks by Lightning's own code.

For a step that is captured, and for one that runs eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult

from lightning_cudagraph.capture.stand_ins import in_place
from lightning_cudagraph.support import is_overridden, scaler_of
from lightning_cudagraph.timing.marks import Stage, StepMarks

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
def timed_optimizers(marks: StepMarks, optimizers: Sequence[Any]) -> Iterator[None]:
    """Tell the marks of an eager step where it has optimizers step, as manual optimization does.

    Args:
        marks: those of the step.
        optimizers: those of torch's kind are followed, whoever has them step.
    """
    under_way: list[AbstractContextManager[None]] = []  # a class may call the step of its base

    def timed(argument: Any) -> Any:
        """What a closure does is no part of the optimizer's time."""
        if argument is do_nothing_closure or not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure(*args: Any, **kwargs: Any) -> Any:
            with marks.stage("forward"):
                marks.forward_began()
                return argument(*args, **kwargs)

        return closure

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        under_way.append(marks.stage("optimizer"))
        under_way[-1].__enter__()
        return tuple(map(timed, args)), {name: timed(value) for name, value in kwargs.items()}

    def behind(*_: Any) -> None:
        under_way.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for optimizer in optimizers:
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
