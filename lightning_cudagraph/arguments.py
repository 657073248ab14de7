"""What the callback is given, checked: its arguments, and the trainer that it is put into."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_cudagraph.capture.checks.verify import is_share
from lightning_cudagraph.capture.streams.stream_choice import (
    MAX_STREAMS,
    are_streams,
    wrong_bound,
)
from lightning_cudagraph.errors import ConfigurationError
from lightning_cudagraph.layer_timings import LayerTimingsMonitor
from lightning_cudagraph.support import callbacks_of
from lightning_cudagraph.timing.layers import LayerTimings

__all__ = ["check_arguments", "check_company"]


def _is_whole(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def check_arguments(
    *,
    scope: object,
    warmup_steps: object,
    on_unsupported: object,
    timings: object,
    verify_replays: object,
    verify_every_n_steps: object,
    verify_budget: object,
    evaluation: object,
    compile: object,
    harmless: object,
    backend: object,
    streams: object,
    streams_memory_bytes: object,
) -> None:
    """Check the arguments of `CUDAGraphCallback`, which documents them.

    Raises:
        ConfigurationError: if one of them is not what it should be.
    """
    if not (timings is None or isinstance(timings, LayerTimings)):
        raise ConfigurationError(
            f"`CUDAGraphCallback(timings={timings!r})`: expected a `LayerTimings`, such as"
            ' `LayerTimings(modules=["blocks.*"])`, or None for no timings.'
        )
    if warmup_steps is not None and not _is_whole(warmup_steps, 1):
        raise ConfigurationError(
            f"`CUDAGraphCallback(warmup_steps={warmup_steps!r})`: expected an int of at least 1,"
            " because optimizers make their state in their first step. Leave it out for the default."
        )
    if not _is_whole(verify_replays, 0) or not (
        verify_every_n_steps is None or _is_whole(verify_every_n_steps, 1)
    ):
        raise ConfigurationError(
            f"`CUDAGraphCallback(verify_replays={verify_replays!r},"
            f" verify_every_n_steps={verify_every_n_steps!r})`: expected an int of at least 0, and"
            " an int of at least 1 or None."
        )
    if not is_share(verify_budget):
        raise ConfigurationError(
            f"`CUDAGraphCallback(verify_budget={verify_budget!r})`: expected a number from 0 to 1, the"
            " share of the run's time that later checks may take."
        )
    if not isinstance(evaluation, bool):
        raise ConfigurationError(
            f"`CUDAGraphCallback(evaluation={evaluation!r})`: expected True, to capture the steps of"
            " validation, test and prediction too, or False."
        )
    if not isinstance(compile, bool):
        raise ConfigurationError(
            f"`CUDAGraphCallback(compile={compile!r})`: expected True, to compile the training step,"
            " or False. For other modes and backends, compile the module, or a part of it, yourself."
        )
    if isinstance(harmless, str) or not (
        isinstance(harmless, Sequence) and all(isinstance(name, str) for name in harmless)
    ):
        raise ConfigurationError(
            f"`CUDAGraphCallback(harmless={harmless!r})`: expected a list of names, such as"
            ' `["counter", "print"]`.'
        )
    if streams is not None and not are_streams(streams):
        raise ConfigurationError(
            f"`CUDAGraphCallback(streams={streams!r})`: expected an int from 1 to {MAX_STREAMS},"
            ' "auto" for the fastest of 1, 2, 4 and 8, or None for the default.'
        )
    if expected := wrong_bound(streams, streams_memory_bytes):
        raise ConfigurationError(
            f"`CUDAGraphCallback(streams_memory_bytes={streams_memory_bytes!r})`: expected {expected}."
        )
    for name, value, allowed in (
        ("scope", scope, ("auto", "step", "forward_backward")),
        ("on_unsupported", on_unsupported, ("raise", "eager")),
        ("backend", backend, ("auto", "cuda", "emulator", "off")),
    ):
        if value not in allowed:
            raise ConfigurationError(
                f"`CUDAGraphCallback({name}={value!r})`: expected one of"
                f" {', '.join(map(repr, allowed))}."
            )


def check_company(trainer: pl.Trainer, kind: type[Callback], is_off: bool) -> None:
    """Check what the callback is put into, and beside what.

    Args:
        trainer: the trainer.
        kind: the class of the callback.
        is_off: the run is to be one as without it.

    Raises:
        ConfigurationError: if the trainer is not that of `lightning.pytorch`, or has callbacks that do
            not go together.
    """
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
