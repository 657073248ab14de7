"""Checks of the callback's arguments, and of the other callbacks of its trainer."""

from __future__ import annotations

from typing import get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_cudagraph.capture.signatures.warm_ups import WARMUP_STEPS
from lightning_cudagraph.errors import ConfigurationError, wrong_argument
from lightning_cudagraph.graphed_step.arguments import check_shared_arguments
from lightning_cudagraph.tensors.buckets import Buckets
from lightning_cudagraph.timing.layers.layer_selection import LayerTimings
from lightning_cudagraph.trainer.callbacks.layer_timings_monitor import LayerTimingsMonitor
from lightning_cudagraph.trainer.config.settings import Scope
from lightning_cudagraph.trainer.config.support import callbacks_of

_CALLBACK = "CUDAGraphCallback"


def check_arguments(
    *,
    scope: object,
    modules: object,
    warmup_steps: object,
    timings: object,
    evaluation: object,
    pad_to: object,
    compile: object,
    **shared: object,
) -> None:
    """Raise `ConfigurationError` if an argument of `CUDAGraphCallback` is invalid."""
    if not (timings is None or isinstance(timings, LayerTimings)):
        expected = (
            'a `LayerTimings`, such as `LayerTimings(modules=["blocks.*"])`, or None for no timings'
        )
        raise _wrong("timings", timings, expected)
    if not isinstance(evaluation, bool):
        expected = "True, to capture the steps of validation, test and prediction too, or False"
        raise _wrong("evaluation", evaluation, expected)
    several = pad_to if isinstance(pad_to, (list, tuple)) else [pad_to]
    if not (pad_to is None or all(isinstance(each, Buckets) for each in several)):
        expected = 'a `Buckets`, such as `Buckets([32, 64], {"input_ids": 0})`, a list of them, or None'
        raise _wrong("pad_to", pad_to, expected)
    if not isinstance(compile, bool):
        expected = "True, to compile the training step, or False"
        raise _wrong("compile", compile, expected)
    if scope not in (scopes := get_args(Scope)):
        raise _wrong("scope", scope, f"one of {', '.join(map(repr, scopes))}")
    are_names = isinstance(modules, (list, tuple)) and all(isinstance(name, str) for name in modules)
    may_be_given = scope in ("auto", "modules")
    if not are_names or (scope == "modules" and not modules) or (modules and not may_be_given):
        expected = (
            'a list of names, such as `["encoder", "head"]`, with `scope="modules"` or `scope="auto"`;'
            " with another scope, none"
        )
        raise _wrong("modules", modules, expected)
    given = WARMUP_STEPS if warmup_steps is None else warmup_steps
    check_shared_arguments(_CALLBACK, warmup_steps=given, **shared)


def _wrong(name: str, value: object, expected: str) -> ConfigurationError:
    return wrong_argument(_CALLBACK, name, value, expected)


def check_instance(callback: object, kind: type[Callback]) -> None:
    """Raise `TypeError` if `check` was called on the class."""
    if not isinstance(callback, kind):
        raise TypeError(
            f"`{_CALLBACK}.check` was called on the class, with a `{type(callback).__qualname__}` in"
            " place of a callback; expected a call on an instance:"
            f" `{_CALLBACK}().check(module, loader)`."
        )


def check_trainer(trainer: pl.Trainer, kind: type[Callback], is_off: bool) -> None:
    """Refuse a trainer that is not of `lightning.pytorch`, or has incompatible callbacks."""
    foreign = [c for c in type(trainer).__mro__ if c.__module__.startswith("pytorch_lightning")]
    if foreign:
        raise ConfigurationError(
            f"The trainer is a `{foreign[0].__module__}.{foreign[0].__qualname__}`; expected one of"
            " `lightning.pytorch`. The two packages do not mix: import `Trainer` with"
            " `from lightning.pytorch import Trainer`, or leave this callback out."
        )
    ours = [callback for callback in callbacks_of(trainer) if isinstance(callback, kind)]
    if len(ours) > 1:
        raise ConfigurationError(
            f"The trainer has {len(ours)} `CUDAGraphCallback`s; expected one, since there is one"
            " training step to capture. Remove the others."
        )
    for monitor in callbacks_of(trainer):
        if isinstance(monitor, LayerTimingsMonitor) and not is_off:
            raise ConfigurationError(
                "The trainer has a `LayerTimingsMonitor` beside its `CUDAGraphCallback`; it times eager"
                " steps, and these are replays. Pass what it times as"
                f" `CUDAGraphCallback(timings={monitor.timings!r})`, or, to time the run without graphs,"
                ' pass `CUDAGraphCallback(backend="off")`.'
            )
