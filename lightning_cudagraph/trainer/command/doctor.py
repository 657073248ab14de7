"""The doctor: a few steps of a fit that is thrown away, and all that was found in them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cudagraph.errors import Finding, UnsupportedError
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.trainer.command.diagnosis_report import DiagnosisReport
from lightning_cudagraph.trainer.config.support import callbacks_of

__all__ = ["Examined", "examine"]

# Warm-up, the capture and the replays that are verified, and some more, in which a graph can go stale.
_STEPS = 12


class Examined(Protocol):
    """The part of the callback that is needed here."""

    @property
    def summary(self) -> RunSummary:
        """The summary of the run."""


def examine(
    callback: Examined, module: pl.LightningModule, batches: Any, trainer: pl.Trainer | None
) -> DiagnosisReport:
    """Run a few steps of a copy of a module, list what was found, and put random states back.

    Args:
        callback: the callback of the run, made for this examination.
        module: the module.
        batches: a dataloader, a datamodule, or one batch; None for the module's own dataloader.
        trainer: a trainer that will run nothing else; None for a plain one.
    """
    assert isinstance(callback, Callback)
    if trainer is None:
        trainer = pl.Trainer(devices=1, enable_model_summary=False, logger=False)
    _shorten(trainer, callback)
    if isinstance(batches, (Tensor, list, tuple, dict)):
        batches = DataLoader([batches] * _STEPS, batch_size=None)  # type: ignore[arg-type]
    module = deepcopy(module)
    found: tuple[Finding, ...] = ()
    ended = ""
    with _quiet(), isolate_rng():
        try:
            if isinstance(batches, pl.LightningDataModule):
                trainer.fit(module, datamodule=batches)
            else:
                trainer.fit(module, batches)
        except UnsupportedError as error:
            found = error.findings
            ended = error.search_ended_by and f"the search ended early: {error.search_ended_by}"
    return _report(module, found, ended, callback.summary)


def _report(
    module: pl.LightningModule, found: tuple[Finding, ...], ended: str, summary: RunSummary
) -> DiagnosisReport:
    fit = summary.fit
    reasons = dict.fromkeys(fit.recaptures)
    stale = [f"the graph was captured again, because {reason}" for reason in reasons]
    eager = [f"{steps} step(s) ran eagerly: {reason}" for reason, steps in fit.eager.items()]
    return DiagnosisReport(
        step=f"{type(module).__qualname__}.training_step",
        backend=summary.backend,
        findings=tuple(sorted(found, key=_line)),
        notes=(*summary.notes, *stale, *([] if found else eager), *filter(None, [ended])),
        replayed_steps=fit.replayed,
    )


def _line(finding: Finding) -> tuple[str, int]:
    return ("", 0) if finding.location is None else (finding.location.path, finding.location.line)


def _shorten(trainer: pl.Trainer, callback: Callback) -> None:
    """Let a trainer take a few steps, and write nothing, as Lightning's tuner does."""
    loop = trainer.fit_loop
    loop.epoch_loop.max_steps = _STEPS
    loop.max_epochs = -1
    trainer.limit_val_batches = 0
    trainer.num_sanity_val_steps = 0
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    others = [
        other
        for other in callbacks_of(trainer)
        if not isinstance(other, (Checkpoint, ModelSummary, ProgressBar, type(callback)))
    ]
    trainer.callbacks = [callback, *others]  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Lightning and the callback tell of a run, and Lightning's advice on it."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            yield
    finally:
        logger.setLevel(level)
