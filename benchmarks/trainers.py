"""The Trainer of the benchmarks: one device, one epoch, no output on the screen."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.fits import ON_GPU
from benchmarks.models import Workload

__all__ = ["quiet_trainer", "trainer_for"]


@contextlib.contextmanager
def quiet_trainer(
    callbacks: Sequence[Callback], tensorboard: bool = True, **arguments: Any
) -> Iterator[pl.Trainer]:
    """A Trainer in a temporary folder, with `TensorBoardLogger` if asked for."""
    settings: dict[str, Any] = {
        "accelerator": "gpu" if ON_GPU else "cpu",
        "devices": 1,
        "max_epochs": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        settings["default_root_dir"] = folder
        logger = TensorBoardLogger(folder) if tensorboard else False
        yield pl.Trainer(logger=logger, callbacks=list(callbacks), **(settings | arguments))


def trainer_for(
    workload: Workload, callbacks: Sequence[Callback], **arguments: Any
) -> contextlib.AbstractContextManager[pl.Trainer]:
    """The Trainer of a model, with TensorBoard; further arguments are passed to it."""
    settings = {"precision": workload.precision, "gradient_clip_val": workload.clip}
    return quiet_trainer(callbacks, **(settings | arguments))
