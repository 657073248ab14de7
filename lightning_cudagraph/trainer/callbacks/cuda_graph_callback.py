"""`CUDAGraphCallback`: its arguments, the hooks that Lightning calls, and the report of each run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_cudagraph.capture.decisions.stream_choice import AskedStreams, streams_for
from lightning_cudagraph.capture.signatures.warm_ups import WARMUP_STEPS
from lightning_cudagraph.checks.verify.settings import DEFAULT_CHECKS, NO_CHECKS, Verification
from lightning_cudagraph.compat.features import CAPTURES, LOOPS
from lightning_cudagraph.compat.installed import gpu_without_cuda
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.compat.tested_versions import newer_than_tested
from lightning_cudagraph.device.backend_for import BackendName
from lightning_cudagraph.device.lines.shown_frames import leave_users_frames
from lightning_cudagraph.errors import HookError, UnsupportedError
from lightning_cudagraph.tensors.buckets import Buckets
from lightning_cudagraph.timing.layers.layer_selection import AUTOMATIC_LAYERS, LayerTimings
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.trainer.callbacks.arguments import (
    check_arguments,
    check_instance,
    check_trainer,
)
from lightning_cudagraph.trainer.callbacks.runs import CapturedRuns, Training
from lightning_cudagraph.trainer.config.padding import Padding
from lightning_cudagraph.trainer.config.settings import Scope, Settings
from lightning_cudagraph.trainer.config.support import Stage
from lightning_cudagraph.trainer.doctor.diagnosis_report import DiagnosisReport
from lightning_cudagraph.trainer.doctor.doctor import examine
from lightning_cudagraph.trainer.evaluation import GraphedEvaluation
from lightning_cudagraph.trainer.training.loop import is_in_fit


class CUDAGraphCallback(Callback):
    """Callback that trains with one CUDA graph: forward, backward, clipping and optimizer step.

    The first batches are the warm-up: training steps on a side stream. Then the step is captured, and
    every later batch of the same shape is copied into static inputs and replayed. The numbers are those
    of a run without this callback; a step that is known to differ is refused with the reason, or runs
    eagerly. On a CPU an emulator replaces the GPU.

    TensorBoard shows for each timed replay, in milliseconds, behind the tags of other code:

    - ``~layer_forward_ms/{module}`` and ``~layer_backward_ms/{module}``;
    - ``~step_ms/{forward,backward,clipping,scaler,optimizer,total}``;
    - ``~step_ms/{copy,gap}``: the copy of the batch, and the rest of the time since the replay before,
      which is long if the device waits for the host;
    - under DDP, ``~step_ms/{all_reduce,all_reduce_exposed}``: the time of the all-reduces of gradients,
      including the wait for other processes, and the part of it that the step waits for.

    In pauses it shows ``~step_count/{replayed,eager}``, the steps so far; those of the warm-up are
    eager. For up to fifty steps each it shows ``~step_time_ms/{replayed,eager}``, their mean time on the
    host beside that of the measured plain steps, and for each window
    ``~step_band_ms/{stage}/{p05,p50,p95}``, both with charts among the custom scalars. Under DDP it
    shows ``~ranks_ms/work_{fastest,median,slowest,spread}``, the step times of the processes without
    waits for each other, and ``~ranks/slowest``, the rank with the longest. As texts it shows captures
    and invalidations, ``~cudagraph/events``, and at the end of `fit` the ``~cudagraph/report``. Other
    loggers get the medians of each window, without the ``~``, and a `CSVLogger` nothing.

    Args:
        scope: the captured part of a step. ``"step"``: everything from forward to the optimizer step.
            ``"forward_backward"``: clipping and the optimizer step run eagerly after the replay.
            ``"modules"``: the calls of `modules` in `training_step`, with their backward passes; the
            rest of the step runs eagerly. ``"auto"``: ``"step"`` if possible, else
            ``"forward_backward"``, else ``"modules"`` if any are named, with the reasons in the report.
        modules: the names of the modules that ``scope="modules"`` captures, or ``"auto"`` where whole
            steps cannot be, as in `named_modules()`.
        warmup_steps: number of training steps before the capture. None: 3, and in a `fit` of 1500 steps
            or more, on one GPU and without accumulation, up to 10 further steps as without this
            callback, measured for the first line of the report. With `DDPStrategy`, warm-up goes on
            until gradients have been averaged eleven times, as the wrapper needs.
        on_unsupported: ``"raise"`` an error if the first capture of the run fails, or train on without a
            graph (``"eager"``) and give the reason in the report. A later capture that fails leaves only
            its own steps eager.
        timings: the layers that are timed by events in the graph; None for none.
        verify: the replays that are compared, bit for bit, with an eager step from the same state on the
            same batch; None for none.
        evaluation: capture `validation_step`, `test_step` and `predict_step` too, each after its own
            warm-up batches. The sanity check runs as without this callback.
        max_graphs: the most batch signatures (shapes, for example) with graphs, in training and in each
            kind of evaluation; other batches run eagerly. In training, each after the first is warmed up
            and captured when it has come eight times, and can replace the least recently used.
        pad_to: the buckets to which batches of different lengths are padded, or a list of buckets for
            several dimensions: in training, and with ``evaluation=True`` also there. The run pads with
            every backend, even ``"off"``.
        compile: compile the training step with `torch.compile` in its default mode during `fit` (on the
            emulator, with ``backend="aot_eager"``). Replays are compared with compiled steps, and their
            numbers differ from those of steps that are not compiled. Layers are not timed.
        harmless: names, as the errors give them, of host code in the step that may be frozen by the
            capture and left out of replays, such as ``["counter", "print", "global_step"]``.
        backend: ``"auto"``: CUDA on a GPU, the emulator on a CPU. ``"cuda"`` and ``"emulator"`` require
            that backend. ``"off"``: a run as without this callback.
        streams: the number of streams for independent ops in a capture, so that small kernels run side
            by side in a replay. Each stream has its own workspaces. ``"auto"``: 1 to 8, by the data
            flow of the step and a short trial from the state before the first capture, which is
            restored. Several streams must gain 3 % over one. Processes choose together.
            ``AutoStreams(memory_bytes=...)``: the same, with a bound on the memory beyond one stream.

    Attributes:
        summary: summary of the present run or the last one. Its `str` is the report, which is printed at
            the end of a run, also after an error.

    Raises:
        ConfigurationError: if an argument is invalid.

    Example::

        trainer = Trainer(callbacks=[CUDAGraphCallback()])
    """

    def __init__(
        self,
        *,
        scope: Scope = "auto",
        modules: Sequence[str] = (),
        warmup_steps: int | None = None,
        on_unsupported: Literal["raise", "eager"] = "raise",
        timings: LayerTimings | None = AUTOMATIC_LAYERS,
        verify: Verification | None = DEFAULT_CHECKS,
        evaluation: bool = False,
        max_graphs: int = 16,
        pad_to: Buckets | Sequence[Buckets] | None = None,
        compile: bool = False,
        harmless: Sequence[str] = (),
        backend: BackendName = "auto",
        streams: AskedStreams = "auto",
    ) -> None:
        check_arguments(
            scope=scope,
            modules=modules,
            warmup_steps=warmup_steps,
            on_unsupported=on_unsupported,
            timings=timings,
            verify=verify,
            evaluation=evaluation,
            max_graphs=max_graphs,
            pad_to=pad_to,
            compile=compile,
            harmless=harmless,
            backend=backend,
            streams=streams,
        )
        self.scope = scope
        self.modules = tuple(modules)
        self.warmup_steps = warmup_steps
        self.on_unsupported = on_unsupported
        self.timings = timings
        self.verify = verify
        self.evaluation = evaluation
        self.max_graphs = max_graphs
        self.pad_to = (pad_to,) if isinstance(pad_to, Buckets) else tuple(pad_to or ())
        self.compile = compile
        self.harmless = tuple(harmless)
        self.backend = backend
        self.streams = streams
        self._summary = RunSummary()
        self._is_printed = True
        self._runs = CapturedRuns()
        self._padding = Padding()
        self._is_examined = False
        self._interrupted: RunSummary | None = None  # of a `fit` interrupted by a hook

    def __getstate__(self) -> dict[str, Any]:
        """Keep the summary of a run under way, whose objects are bound to a trainer and stay here."""
        return {**self.__dict__, "_summary": self.summary}

    @property
    def summary(self) -> RunSummary:
        """Summary of the present run or the last one."""
        found, training, evaluation = self._summary, self._runs.training, self._runs.evaluation
        if training is not None:
            found = found.with_stage("fit", training.stage)
        if evaluation is not None:
            found = found.with_stage(evaluation.stage_name, evaluation.stage)
        return found

    def check(
        self, module: pl.LightningModule, batches: Any = None, trainer: pl.Trainer | None = None
    ) -> DiagnosisReport:
        """List all that keeps the training step of a module from being captured, with these arguments.

        A copy of the module trains for a few steps, on the emulator where there is no GPU. The module,
        the dataloaders and the random states are as before; what the step prints or writes is printed
        and written.

        Args:
            module: the module.
            batches: a dataloader, a datamodule, or one batch; None for the module's own dataloader.
            trainer: a trainer with the arguments of the run, which is of no use afterwards: it takes a
                few steps, with stand-ins for loggers and checkpoints. None for one with Lightning's
                defaults.

        Returns:
            The report, with `findings`, `notes`, `estimate` and `is_captured`; `str` of it is what the
            command line prints.

        Example::

            report = CUDAGraphCallback().check(module, train_loader)
            print(report)
        """
        check_instance(self, CUDAGraphCallback)
        examined = copy(self)
        examined._is_examined = True
        examined.on_unsupported, examined.timings = "raise", None
        return examine(examined, module, batches, trainer)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        training = self._runs.training
        if stage != TrainerFn.FITTING and training is not None and is_in_fit(trainer):
            self._interrupt(trainer, training, stage)
        self._runs.close()  # a run that ended in an exception of another callback, before our hooks
        check_trainer(trainer, CUDAGraphCallback, is_off=self.backend == "off")
        self._padding.begin(trainer, stage, self.pad_to, self.evaluation)
        if stage == TrainerFn.FITTING:
            self._begin()  # now, because the run may end before its first step
        if stage != TrainerFn.FITTING or self.backend == "off":
            return
        require(CAPTURES, LOOPS)
        self._runs.connect(trainer, self.backend)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        runs = self._runs
        processes = runs.begin_fit(trainer)
        self._begin()
        self._interrupted = None
        if self.backend == "off":
            processes.compare(self._arguments())
            runs.leave_others()
            return
        try:
            training = runs.train(trainer, pl_module, self._settings(), self._arguments())
        except UnsupportedError as error:
            if self.on_unsupported == "raise":
                raise
            runs.leave_others()
            self._summary = RunSummary(refused=f"all steps eager. {error.reason}")
            self._is_printed = False
            rank_zero_warn(f"{self._summary} {error.remedy}")
            return
        training.install()
        processes.install()
        backend = runs.backend(trainer, self.backend)
        description, is_emulated = backend.description, backend.device.type == "cpu"
        self._summary = RunSummary(backend=description, is_emulated=is_emulated)
        missing = gpu_without_cuda(torch.version.cuda, torch.version.hip)
        lines = (description, newer_than_tested(), missing, *training.notes)
        for line in filter(None, lines):
            rank_zero_info(f"lightning_cudagraph: {line}")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._runs.training is not None:
            self._runs.training.suspect()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runs.settle()
        if self._runs.processes is not None:
            self._runs.processes.end_epoch()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._runs.settle()
        if self._runs.processes is not None:
            self._runs.processes.begin_validation()
        self._evaluate(trainer, pl_module, "validation")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluate(trainer, pl_module, "test")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluate(trainer, pl_module, "predict")

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._runs.processes is not None:
            self._runs.processes.pause()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runs.settle()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runs.settle()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runs.settle()
        if self._runs.training is not None:
            self._runs.training.suspect()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._runs.training is not None:
            self._runs.training.suspect()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._runs.settle()
        self._write_report()
        self._runs.close()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print_report()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._runs.fail(exception)
        try:
            self._write_report(exception)
            self._print_report(after_progress_bar=True)
        finally:
            self._runs.close()
            self._padding.close()
            leave_users_frames(exception)  # Lightning raises it again

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" and (evaluation := self._runs.evaluation) is not None:
            self._summary, self._is_printed = self._evaluated(evaluation), False
            self._print_report()
        self._runs.close()
        self._padding.end()

    def _write_report(self, exception: BaseException | None = None) -> None:
        """Make the report at the end of a run, which may be due to `exception`."""
        if (training := self._runs.training) is not None:
            self._summary = self._finished(training, exception=exception)
        elif self._interrupted is not None:
            self._summary, self._interrupted = self._interrupted, None
        elif (evaluation := self._runs.evaluation) is not None:  # without a `fit`, or one without graphs
            self._summary = self._evaluated(evaluation, exception)
        else:
            return
        self._is_printed = False

    def _print_report(self, after_progress_bar: bool = False) -> None:
        """Print the report once; after a progress bar, on a new line."""
        if not self._is_printed and not self._is_examined:
            rank_zero_info(f"\n{self._summary}" if after_progress_bar else str(self._summary))
        self._is_printed = True

    def _evaluated(
        self, evaluation: GraphedEvaluation, exception: BaseException | None = None
    ) -> RunSummary:
        """The summary of evaluations alone."""
        ended = "" if exception is None else type(exception).__name__
        return replace(self.summary, notes=tuple(evaluation.notes), ended=ended)

    def _begin(self) -> None:
        """Begin a run with an empty summary."""
        self._summary, self._is_printed = RunSummary(), True

    def _interrupt(self, trainer: pl.Trainer, training: Training, stage: str) -> None:
        """End the graphs of a `fit`, because one of its hooks has called another method of the trainer.

        Raises:
            HookError: if that hook runs in the middle of a step.
        """
        stage = TrainerFn(stage).value
        if training.is_in_step:
            raise HookError(
                f"In the middle of a step, a hook called `trainer.{stage}`, which tears the step down.",
                "Call it between two fits.",
            )
        note = (
            f"the graphs of a `fit` were released after step {trainer.global_step}, and its later steps"
            f" are eager: `trainer.{stage}` was called before its end"
        )
        self._interrupted = self._finished(training, note)
        rank_zero_warn(f"lightning_cudagraph: {note}. Call it between two fits.")

    def _finished(
        self,
        training: Training,
        *notes: str,
        exception: BaseException | None = None,
    ) -> RunSummary:
        """Return the summary of a `fit`, with its evaluations."""
        evaluation, refused = self._runs.evaluation, self._runs.not_evaluated
        all_notes = [*notes, *([] if evaluation is None else evaluation.notes)]
        all_notes += [] if refused is None else [refused.reason]
        return training.finish(self.summary, all_notes, exception)

    def _evaluate(self, trainer: pl.Trainer, module: pl.LightningModule, stage: Stage) -> None:
        """Begin an evaluation, in a `fit` or on its own."""
        runs = self._runs
        if not self.evaluation or self.backend == "off" or runs.not_evaluated is not None:
            return
        is_first, in_fit = runs.evaluation is None, trainer.state.fn == TrainerFn.FITTING
        if is_first and not in_fit:
            self._begin()
        try:
            runs.make_evaluation(trainer, module, self._arguments(), self._settings(), stage)
        except UnsupportedError as error:
            if self.on_unsupported == "raise":
                raise
            runs.not_evaluated = error
            refused = RunSummary(refused=f"all batches of {stage} eager. {error.reason}")
            if not in_fit:
                self._summary = refused
            rank_zero_warn(f"{refused} {error.remedy}")
            return
        runs.evaluate()
        if is_first:
            backend = runs.backend(trainer, self.backend)
            is_emulated = backend.device.type == "cpu"
            self._summary = replace(self._summary, backend=backend.description, is_emulated=is_emulated)
            if not in_fit:
                rank_zero_info(f"lightning_cudagraph: {backend.description}")

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments in a normal form, for the comparison of processes."""
        names = inspect.signature(CUDAGraphCallback).parameters
        return {name: getattr(self, name) for name in names} | {
            "warmup_steps": self.warmup_steps or WARMUP_STEPS,
            "streams": streams_for(self.streams),
            "harmless": sorted(set(self.harmless)),
        }

    def _settings(self) -> Settings:
        return Settings(
            scope=self.scope,
            modules=self.modules,
            warmup_steps=self.warmup_steps or WARMUP_STEPS,
            raise_unsupported=self.on_unsupported == "raise",
            timings=self.timings,
            verify=self.verify or NO_CHECKS,
            max_graphs=self.max_graphs,
            harmless=frozenset(self.harmless),
            streams=streams_for(self.streams),
            compile=self.compile,
            measures_plain_steps=self.warmup_steps is None and not self._is_examined,
            is_examined=self._is_examined,
        )
