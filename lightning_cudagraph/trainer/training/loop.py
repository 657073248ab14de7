"""Installation in Lightning's training loop, for one `fit`.

Lightning's loop stays in charge. Patched are a method of its automatic optimization, for closures that
hold their batch (`closures.py`), two methods of the strategy, which move a batch and step the optimizer
(`steps.py`), and the loop's `advance` (`fast_path.py`). All patches go through one `ExitStack`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.capture.context import RunContext
from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.steps import Step, StepCounts
from lightning_cudagraph.compat.features import FAST_PATH, HELD_GRADIENTS
from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.compat.method_patches import patch_method
from lightning_cudagraph.compat.tables import notes
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.timing.layers.layer_selection import untimed_notes
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.timing.readings.rank_times import SharedRun
from lightning_cudagraph.trainer.common.captured_run import announce
from lightning_cudagraph.trainer.common.profilers import (
    around_replays,
    profiler_notes,
    progress_bar_notes,
)
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.config.support import described_hook
from lightning_cudagraph.trainer.training.captured_step.compiled_step import (
    compile_step,
    is_step_compiled,
    logging_uncompiled,
)
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepOutputs
from lightning_cudagraph.trainer.training.fast_path import FastPath
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from lightning_cudagraph.trainer.training.times.run_times import RunTimes, ended_by


def is_in_fit(trainer: pl.Trainer) -> bool:
    """True if the loop of `fit` is on the call stack."""
    loop: Any = trainer.fit_loop
    code = inspect.unwrap(type(loop).run).__code__
    return any(
        frame.f_code is code and frame.f_locals.get("self") is loop for frame in frames(sys._getframe(1))
    )


class GraphedTraining:
    """One `fit` with graphs."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        settings: Settings,
        narrow: Callable[[UnsupportedError], bool],
        agreement: Agreement | None = None,
        shared: SharedRun | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._times = RunTimes(trainer, module, backend, settings.timings, shared)
        if settings.compile or is_step_compiled(module):
            self._times.names = []  # a hook in compiled code would change what is compiled
        self._patches = ExitStack()
        self._part = OptimizerPart(
            trainer,
            module,
            backend,
            settings.scope,
            lambda reason: self._engine.invalidation.drop(reason),
            self._announce,
        )
        self._times.host.waits.append(lambda: self._part.optimizer.outcomes.waited_s)
        run = self._run = TrainingRun(trainer, module, backend, settings, self._times, self._part)
        context = RunContext(
            backend,
            settings,
            run.carried,
            self._announce,
            agreement=agreement,
            earns_graphs=True,
            tries_streams_together=True,
            is_examined=settings.is_examined,
            learning_rates=lambda: self._part.optimizer.learning_rates(),
            narrow=lambda error: self._part.step_eagerly(error) or narrow(error),
            on_give_up=self._part.let_go,
            around_replays=around_replays(trainer),
            on_capture=self._captured,
            replicas=run.replicas,
        )
        self._engine: StepEngine[StepOutputs] = StepEngine(
            context,
            run.guards,
            lambda: self._part.is_settled() and run.hooks.is_settled(),
        )
        self._steps = TrainingSteps(run, self._engine)
        # Last, because it changes the optimizer: nothing after it may fail.
        self._part.prepare(trainer.optimizers[0])

    @property
    def counts(self) -> StepCounts:
        return self._engine.counts

    @property
    def notes(self) -> list[str]:
        """Notes on changes made for the capture, and on features that are off."""
        off = notes(HELD_GRADIENTS, FAST_PATH)
        return [*self._part.notes, *profiler_notes(self._trainer), *off]

    @property
    def optimizer_is_eager(self) -> str:
        """The reason why the optimizer steps eagerly; empty if it does not."""
        return self._part.eager_reason or ""

    def agree(self, agreement: Agreement) -> None:
        """Capture the same parts of a step in all processes; called in all before the first step."""
        self._part.agree(agreement)

    def install(self) -> None:
        run, patches = self._run, self._patches
        patches.enter_context(run.replicas.unobserved())
        if run.settings.compile or is_step_compiled(self._module):
            patches.enter_context(logging_uncompiled())
        if run.settings.compile:
            compile_step(self._module, run.backend.device, patches)
        self._steps.install(patches)
        loop = self._trainer.fit_loop.epoch_loop
        self._advance = FastPath(run, self._steps)
        patch_method(loop, "advance", self._advance, patches)
        patches.callback(self._advance.averages.close)
        metrics = loop._results.metrics

        def settled_metrics(on_step: bool) -> Any:
            shown = run.shown
            if shown.is_drawing and not run.logs.is_any_on_bar():
                return {"callback": {}, "log": {}, "pbar": {}}  # and no copies of what is logged
            run.logs.settle()
            if shown.is_drawing and (found := shown.metrics(loop._results.values())) is not None:
                return found
            read = metrics(on_step)
            shown.were_read(read["pbar"])
            return read

        # Lightning and user code that reads the trainer's metrics get them from here.
        patch_method(loop._results, "metrics", settled_metrics, patches)

    def close(self) -> None:
        with ExitStack() as stack:  # closes every part, even if one of them fails
            stack.callback(self._run.logs.close)
            stack.callback(self._engine.close)
            stack.callback(self._times.close)
            stack.callback(self._part.optimizer.restore)
            stack.callback(self._patches.close)

    @property
    def is_in_step(self) -> bool:
        """True while a step is under way; hooks inside the step see that."""
        return self._run.is_in_step

    def suspect(self) -> None:
        """Compare everything before the next replay: code other than training steps has run."""
        self._engine.pause()
        self._steps.suspect()
        self._advance.suspect()
        self._times.pause()
        self._count()

    def leave(self) -> None:
        """Prepare for graphs of evaluation, which may write where those of training keep gradients."""
        self._engine.invalidation.leave()

    @property
    def stage(self) -> StageSummary:
        """Counts and times of the steps so far."""
        remedy = self._engine.admission.remedy
        return StageSummary.of(self.counts, self._engine.verifier.checked, self._times.pace, remedy)

    def finish(
        self, summary: RunSummary, notes: Sequence[str] = (), exception: BaseException | None = None
    ) -> RunSummary:
        """Complete the summary of the run with times and notes, and show it.

        After an exception no value on the device is read.
        """
        said = [*self._notes(), *notes]
        # A read would block on a device that has failed or hangs.
        if self._part.scaler is not None and exception is None:
            skipped = int(self._part.scaler.skipped_steps)
            said.append(f"{skipped} step(s) skipped, because a gradient overflowed")
        ended = ended_by(self._trainer, exception)
        finished = self._times.finish(replace(summary, notes=tuple(said), ended=ended))
        self._count()
        return finished

    def _count(self) -> None:
        counts = self.counts
        eager = counts.warmed_up + sum(counts.eager.values())
        self._times.count(counts.replayed, eager)

    def _notes(self) -> list[str]:
        notes = [
            *self._engine.verifier.notes,
            *self._engine.notes,
            *self.notes,
            *self._run.metrics.notes,
        ]
        untimed = self._run.untimed or {}
        is_timed = self._run.settings.timings is not None
        if is_timed and is_step_compiled(self._module):
            untimed = untimed | {"layers": "the step is compiled as a whole"}
        if is_timed and self._part.eager_reason is not None:
            untimed = untimed | {
                "what comes after the backward pass": (
                    "it runs eagerly after the replay; shares are of the work before it"
                )
            }
        notes += untimed_notes(untimed)
        if (
            self._run.settings.timings is not None
            and self._run.backend.streams > 1
            and self.counts.captures
        ):
            notes.append(
                "on several streams layers overlap; the time of one is from when all before it has"
                " finished to when it has, too"
            )
        if (count := self._steps.n_apart) and self.counts.captures:
            notes.append(
                f"the optimizer steps eagerly in {count} step(s), because"
                f" {described_hook(self._module, 'optimizer_step')} calls the closure before it;"
                " `optimizer.step(closure=closure)` is captured"
            )
        notes += progress_bar_notes(self._trainer)
        notes += self._advance.averages.notes
        notes += [
            f"Lightning's own loop ran around {count} step(s), which takes the host longer, because"
            f" {reason}"
            for reason, count in self._advance.avoided.items()
        ]
        return notes

    def _announce(self, text: str) -> None:
        announce(text)
        self._times.happened(text)

    def _captured(self, step: Step[StepOutputs], capture_ms: float) -> None:
        self._part.captured()
        taken_mib = self.counts.memory_bytes / 2**20
        text = f"Captured in {capture_ms:.0f} ms: {step.description}. {taken_mib:.1f} MiB taken so far."
        self._times.happened(text)
