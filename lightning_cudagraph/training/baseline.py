"""The plain steps of a `fit` that are measured before its capture, so that its report says the gain."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_cudagraph.capture.backend import Backend
from lightning_cudagraph.settings import Settings

__all__ = ["plain_steps"]

_MOST = 10
# Fewer are no measure.
_LEAST = 3
# They cost what a graph would have gained in them: no more than this share of the steps are plain.
_SHARE = 1 / 500


def plain_steps(trainer: pl.Trainer, backend: Backend, settings: Settings) -> int:
    """The number of warm-up steps that nothing watches, for a comparison with replays.

    None of a short run, nor where a step is not one batch in one process, nor where steps are compiled
    for the run alone, nor on the emulator, which has no speed.

    Args:
        trainer: the trainer, at the start of training.
        backend: where steps are captured.
        settings: what the user asked for; a number of warm-up steps is what is done.
    """
    is_one_batch = trainer.accumulate_grad_batches == 1 and trainer.world_size == 1
    if not (settings.measures_plain_steps and is_one_batch and has_speed(backend)) or settings.compile:
        return 0
    batches = float(trainer.num_training_batches)  # infinite, if the loader has no length
    epochs = _limit(trainer.max_epochs) - trainer.current_epoch
    steps = min(_limit(trainer.max_steps) - trainer.global_step, batches * epochs if epochs > 0 else 0)
    n = int(min(_MOST, steps * _SHARE))
    # A pause in the middle of them would spoil the measurement.
    return n if n >= _LEAST and batches > settings.warmup_steps + n else 0


def has_speed(backend: Backend) -> bool:
    """Tell if replays are faster than eager steps can be there."""
    return backend.device.type == "cuda"


def _limit(number: int | None) -> float:
    return float("inf") if number is None or number < 0 else number
