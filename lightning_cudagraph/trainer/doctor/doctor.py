"""The doctor: a few steps of a fit that is thrown away, and all that was found in them."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.device.lines.shown_frames import leave_users_frames
from lightning_cudagraph.device.refusals.grouping import grouped
from lightning_cudagraph.errors import ConfigurationError, Finding, UnsupportedError
from lightning_cudagraph.tensors.signatures import NotCaptured
from lightning_cudagraph.timing.output.stages import AFTER_PAUSES
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.doctor.diagnosis_report import DiagnosisReport
from lightning_cudagraph.trainer.doctor.estimate import Estimate, StepMeter
from lightning_cudagraph.trainer.doctor.module_copy import copy_of
from lightning_cudagraph.trainer.doctor.saved_state import SavedState
from lightning_cudagraph.trainer.doctor.stand_ins import use_stand_ins

# Warm-up, the capture and the replays that are verified, and some more, in which a graph can go stale.
_STEPS = 24


class Examined(Protocol):
    """The part of the callback that is needed here."""

    @property
    def summary(self) -> RunSummary:
        """The summary of the run."""


def examine(
    callback: Examined, module: pl.LightningModule, batches: Any, trainer: pl.Trainer | None
) -> DiagnosisReport:
    """Run a few steps of a copy of a module, list what was found, and put back all else.

    Raises:
        ConfigurationError: if the trainer runs no step.
        KeyboardInterrupt: if it is interrupted.
        Exception: of the user's code, with a traceback of the user's frames.
    """
    try:
        with TemporaryDirectory() as folder:
            return _examine(callback, module, batches, trainer, folder)
    except Exception as error:
        leave_users_frames(error, of_any=True)
        raise


def _examine(
    callback: Examined, module: pl.LightningModule, batches: Any, trainer: pl.Trainer | None, folder: str
) -> DiagnosisReport:
    assert isinstance(callback, Callback)
    if trainer is None:
        with _quiet():
            trainer = pl.Trainer(devices=1, enable_model_summary=False, default_root_dir=folder)
    _shorten(trainer, type(callback))
    not_called = use_stand_ins(trainer, folder)
    if isinstance(batches, (Tensor, list, tuple, dict)):
        # A copy each time, because a step may write into its batch.
        batches = DataLoader([batches] * _STEPS, batch_size=None, collate_fn=deepcopy)  # type: ignore[arg-type]
    found: tuple[Finding, ...] = ()
    ended = ""
    with _quiet(), isolate_rng(), _SavedStates(batches) as saved:
        meter = _measured(trainer, module, batches, saved, folder)
        try:
            _fit(trainer, saved, callback, module, batches, _STEPS, meter.has_run)
        except UnsupportedError as error:
            found = error.findings
            is_of_setting = not callback.summary.fit.warmed_up  # it was raised before the first step
            ended = error.reason if is_of_setting else error.search_ended_by
    fit = callback.summary.fit
    estimate = meter.estimate(fit.replay_ms, fit.memory_bytes)
    others = [*not_called, *saved.notes]
    return _report(module, found, ended, others, callback.summary, estimate)


def _measured(
    trainer: pl.Trainer, module: pl.LightningModule, batches: Any, saved: _SavedStates, folder: str
) -> StepMeter:
    """Measure steps of a plain run, by a copy of a trainer; nothing of manual optimization."""
    meter = StepMeter(trainer.strategy.root_device)
    if not module.automatic_optimization:
        return meter  # its steps may have graphs of their own, which refuse the meter's hook
    loggers, trainer.loggers = trainer.loggers, []
    try:
        plain = deepcopy(trainer)
    except (TypeError, NotImplementedError, pickle.PicklingError) as error:
        saved.notes = (*saved.notes, f"no estimate: the trainer cannot be copied: {error}")
        return meter
    finally:
        trainer.loggers = loggers
    plain.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    plain.loggers = loggers
    use_stand_ins(plain, folder)  # a logger changes in a fit
    with isolate_rng():
        try:
            _fit(plain, saved, meter, module, batches, meter.most_steps)
        finally:
            meter.close()
        saved.put_back()
    return meter


def _fit(
    trainer: pl.Trainer,
    saved: _SavedStates,
    callback: Callback,
    module: pl.LightningModule,
    batches: Any,
    steps: int,
    is_after_estimate: bool = False,
) -> None:
    """Let a trainer take a few steps with a copy of a module."""
    trainer.callbacks = [saved, callback, *callbacks_of(trainer)]  # type: ignore[attr-defined]
    trainer.fit_loop.epoch_loop.max_steps = steps
    named = "datamodule" if isinstance(batches, pl.LightningDataModule) else "train_dataloaders"
    copied, shared = copy_of(module)
    saved.keep(shared)
    progress = trainer.fit_loop.epoch_loop.batch_progress.total
    before = progress.ready
    try:
        trainer.fit(copied, **{named: batches})
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning ends the process, with 1
            raise ended.__context__ from None
        raise
    if progress.ready == before:
        if is_after_estimate:
            raise ConfigurationError(
                "No batch is left for the check: the loader yields its batches once, and the steps of"
                " the estimate have taken them. Pass one that can be iterated again, or more batches."
            )
        raise ConfigurationError(
            "The trainer ran no step: expected a training loader with batches, and a `Trainer` whose"
            " arguments, callbacks and earlier steps let it train."
        )


class _SavedStates(Callback):
    """Callback that puts back the loaders of runs, and what a copy of a module shares with it.

    The loaders are those that are given, and those of a trainer.
    """

    def __init__(self, given: Any) -> None:
        self._given = [] if given is None else [SavedState(given, _name_of(given))]
        self._made: list[SavedState] = []
        self._steps_before = 0
        self.notes: tuple[str, ...] = ()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record the loaders that the trainer will ask for: at its next hook it has begun to read."""
        source = getattr(trainer, "datamodule", None) or pl_module
        make = source.train_dataloader

        @wraps(make)
        def noted(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            self._made.append(SavedState(made, _name_of(made)))
            return made

        source.train_dataloader = noted  # type: ignore[method-assign]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps_before = trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End with an epoch without batches: epochs of an iterable that is used up would never end."""
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self._steps_before:
            trainer.should_stop = True

    def keep(self, shared: list[Any]) -> None:
        """Record values, to be put back."""
        self._made += [SavedState(value, _name_of(value)) for value in shared]

    def put_back(self) -> None:
        """Put all of it back; `notes` tells what could not be."""
        left = [words for state in [*reversed(self._made), *self._given] for words in state.put_back()]
        self._made.clear()
        self.notes = tuple(
            dict.fromkeys((*self.notes, *(f"not put back after the check: {words}" for words in left)))
        )

    def __enter__(self) -> _SavedStates:
        return self

    def __exit__(self, *error: object) -> None:
        self.put_back()


def _name_of(given: Any) -> str:
    return f"the `{type(given).__name__}`"


def _report(
    module: pl.LightningModule,
    found: tuple[Finding, ...],
    ended: str,
    others: list[str],
    summary: RunSummary,
    estimate: Estimate | None,
) -> DiagnosisReport:
    fit = summary.fit
    stale: list[str] = []
    unstable = fit.unstable()
    for what, reasons in fit.recaptures_of().items():
        remedy = unstable.get(what, "")
        if remedy and not remedy.startswith(AFTER_PAUSES):
            found += (_unstable(what, reasons, remedy),)
        else:
            times = f" {len(reasons)} times" * (len(reasons) > 1)
            told = f"{reasons[0]}. {remedy}" if remedy else reasons[0]
            stale.append(f"the graph was captured again{times}, because {told}")
    eager = [f"{steps} step(s) ran eagerly: {reason}" for reason, steps in fit.eager.items()]
    if isinstance(why := fit.not_captured, NotCaptured) and not fit.captures:
        what = f"In {_STEPS} steps nothing was captured: {why.what}."
        found += (Finding(what, why.remedy, why.location),)
    return DiagnosisReport(
        step=f"{type(module).__qualname__}.training_step",
        backend=summary.backend,
        findings=tuple(sorted(grouped(found), key=lambda each: each.place)),
        search_ended_by=ended,
        notes=(*summary.notes, *stale, *([] if found else eager), *others),
        replayed_steps=fit.replayed,
        estimate=estimate,
    )


def _unstable(what: str, reasons: list[str], remedy: str) -> Finding:
    """The finding of a graph that goes stale again and again, and would be given up in a run."""
    return Finding(
        f"Between steps {what}, {len(reasons)} times in {_STEPS} steps: each time the graph is captured"
        " again, and given up in the end.",
        remedy,
        next((reason.location for reason in reasons if isinstance(reason, Change)), None),
    )


def _shorten(trainer: pl.Trainer, left_out: type[Callback]) -> None:
    """Let a trainer show nothing, and run no validation, as Lightning's tuner does."""
    trainer.fit_loop.max_epochs = -1
    trainer.limit_val_batches = 0
    trainer.num_sanity_val_steps = 0
    trainer.callbacks = [  # type: ignore[attr-defined]
        other
        for other in callbacks_of(trainer)
        if not isinstance(other, (ModelSummary, ProgressBar, left_out))
        and (isinstance(other, ModelCheckpoint) or not isinstance(other, Checkpoint))
    ]


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
