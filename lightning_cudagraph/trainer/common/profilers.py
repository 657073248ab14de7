"""Lightning's profilers and progress bars in a run with graphs: their view and their cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    ProgressBar,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.hooks.user_hooks import is_known

# A progress bar with at least this refresh rate costs little.
_OFTEN = 20

# `PyTorchProfiler` advances its schedule after actions with the suffix `training_step`.
_ACTION = "[CUDAGraphCallback]replay.training_step"


def _profiler_of(trainer: pl.Trainer) -> Profiler | None:
    """Return the user's profiler, or None; Lightning does not declare the attribute."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return None if isinstance(profiler, PassThroughProfiler) else profiler


def unprofiled(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Disable the profiler in a capture or rehearsal.

    In a capture it would disable the audit's hook of the interpreter (`AdvancedProfiler`), or start a
    trace, which needs an idle device (`PyTorchProfiler`). Rehearsals are no steps of the run.
    """
    if _profiler_of(trainer) is None:
        return nullcontext()
    return setting(trainer, profiler=PassThroughProfiler())


def around_replays(trainer: pl.Trainer) -> Callable[[], AbstractContextManager[object]]:
    """Return the context manager for replays: an action of the trainer's profiler, if it has one."""
    profiler = _profiler_of(trainer)
    return nullcontext if profiler is None else partial(profiler.profile, _ACTION)


def profiler_notes(trainer: pl.Trainer) -> list[str]:
    """Return notes for the user of a profiler or of `ThroughputMonitor`."""
    notes = []
    if (profiler := _profiler_of(trainer)) is not None:
        name = type(profiler).__qualname__
        notes.append(
            f"`{name}` sees each replay as `{_ACTION}`; the actions inside are those of eager steps"
        )
    if any(isinstance(callback, ThroughputMonitor) for callback in callbacks_of(trainer)):
        notes.append(
            "`ThroughputMonitor` waits for the GPU after every batch, which reduces the gain of a graph"
        )
    return notes


def delay_notes(trainer: pl.Trainer) -> list[str]:
    """Return a note for the report if torch's profiler distorts the times of layers in a graph."""
    if not isinstance(_profiler_of(trainer), PyTorchProfiler):
        return []
    if trainer.strategy.root_device.type != "cuda":
        return []
    note = (
        "`torch.profiler` delays the first events of a graph, also when it is off again: the times of a"
        " step's first layers can be too short or too long. For their times, leave out `PyTorchProfiler`"
    )
    return [note]


def draws_late(callback: Callback) -> bool:
    """True for a bar of Lightning's own that is drawn often: no user code reads its values."""
    return (
        isinstance(callback, ProgressBar)
        # One that is drawn seldom waits for an exact value. The rate of Rich's bar is one of a second.
        and not (isinstance(callback, TQDMProgressBar) and callback.refresh_rate >= _OFTEN)
        and is_known(callback.on_train_batch_end)
        and is_known(callback.get_metrics)
    )


def progress_bar_notes(trainer: pl.Trainer) -> list[str]:
    """Return a note for the report if a progress bar of the user's waits for the device."""
    bar = trainer.progress_bar_callback
    if not (isinstance(bar, (TQDMProgressBar, RichProgressBar)) and bar.is_enabled):
        return []
    if draws_late(bar) or not trainer._logger_connector._progress_bar_metrics:
        return []
    name = type(bar).__qualname__
    every_n_steps = bar.refresh_rate if isinstance(bar, TQDMProgressBar) else 1
    if every_n_steps >= _OFTEN:
        return []
    how_often = "every step" if every_n_steps == 1 else f"one step in {every_n_steps}"
    note = (
        f"`{name}` reads logged values in {how_often}, and waits for the device, which reduces the gain"
        " of a graph. `TQDMProgressBar(refresh_rate=50)` reads them less often"
    )
    return [note]
