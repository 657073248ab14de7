"""Baseline of a `fit`: unwatched eager steps before the capture, for the gain in the report."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.timing.readings.step_time import Plain
from lightning_cudagraph.trainer.config.settings import Settings

_MOST = 10
# Fewer steps give no reliable time.
_LEAST = 3
# Each costs the gain of one replay, so at most this share of the steps is measured.
_SHARE = 1 / 500


class PlainSteps:
    """Selection of the unwatched steps, between the last but one and the last step of the warm-up.

    A step is a whole accumulation window. There are none in a short run or one of unknown length, on the
    emulator, or if the user sets the number of warm-up steps. One of several processes may have others:
    for all of them they are warm-up steps.
    """

    def __init__(self, trainer: pl.Trainer, backend: Backend, settings: Settings) -> None:
        self._window = trainer.accumulate_grad_batches
        self._watched_before = (settings.warmup_steps - 1) * self._window
        self._left = _number(trainer, backend, settings)
        self._looks: list[Any] | None = None
        self._has_begun = False

    def next(self, counts: StepCounts, batch: Any, begins: bool = True, steps: bool = True) -> Plain:
        """Classify the next batch, which may begin its accumulation window, and step at its end."""
        if not self._left:
            return Plain.NOT
        looks = [
            (path, leaf.shape, leaf.dtype)
            for path, leaf in flatten_batch(batch)
            if isinstance(leaf, Tensor)
        ]
        if counts.eager or counts.captures or (self._looks is not None and looks != self._looks):
            self._left = 0  # steps that differ do not compare with those that are replayed
        self._looks = looks
        if not self._left:
            return Plain.NOT
        begins = begins or self._window == 1
        self._has_begun |= begins and counts.warmed_up >= self._watched_before
        if not self._has_begun:
            return Plain.NOT
        self._left -= steps
        return Plain.ONE if self._left else Plain.LAST


def has_speed(backend: Backend) -> bool:
    """True if replays run on a GPU, so that their times mean something."""
    return backend.device.type == "cuda"


def _number(trainer: pl.Trainer, backend: Backend, settings: Settings) -> int:
    if not (settings.measures_plain_steps and has_speed(backend)):
        return 0
    max_steps = _limit(trainer.max_steps)
    # Infinite, if the loader has no length.
    in_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    if in_epoch == max_steps == float("inf"):
        return 0  # it may end at any step
    epochs = _limit(trainer.max_epochs) - trainer.current_epoch
    steps = min(max_steps - trainer.global_step, in_epoch * epochs if epochs > 0 else 0)
    n = int(min(_MOST, steps * _SHARE))
    # A pause in the middle of them would spoil the measurement.
    return n if n >= _LEAST and in_epoch > settings.warmup_steps + n else 0


def _limit(number: int | None) -> float:
    return float("inf") if number is None or number < 0 else number
