"""Times of a `fit` without graphs: the same marks as in a captured step.

Lightning's hooks tell where the parts of a step begin and end. Modules, gradient scaler and strategy are
patched during a timed step only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.compat.method_patches import Original, in_place, patch_method
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.backend_for import backend_for
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.layers.layer_selection import LayerTimings, never_timed
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.timing.readings.rank_times import SharedRun
from lightning_cudagraph.trainer.training.conditions import TRANSFER
from lightning_cudagraph.trainer.training.times.marked_steps import timed_stages
from lightning_cudagraph.trainer.training.times.run_times import (
    RunTimes,
    batch_of_step,
    ended_by,
    step_number,
)

_runs = 0


class EagerTimes:
    """The clock of a `fit` without graphs, in automatic optimization."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, choice: LayerTimings) -> None:
        self._trainer = trainer
        self._module = module
        self._backend = _clock_of(trainer)
        global _runs
        _runs += 1
        choice = replace(choice, every_n_steps=choice.every_n_steps or 1)  # no graph has its events
        self._times = RunTimes(trainer, module, self._backend, choice, SharedRun(f"eager/{_runs}"))
        self._clock = self._times.clock
        self._marks: StepMarks | None = None
        self._is_recording = False
        # The marks of a step that has ended, until its batch ends.
        self._finished: StepMarks | None = None
        # Patches during a timed step.
        self._step = ExitStack()
        self._untimed: dict[str, str] | None = None  # until a step was timed
        self._patches = ExitStack()
        self._move = Original(trainer.strategy, TRANSFER)
        patch_method(trainer.strategy, TRANSFER, self._batch_to_device, self._patches)

    def batch_starts(self) -> None:
        self._abandon()
        if not self._is_due:
            return
        # Without the optimizer, unless the batch is the last of its accumulation window.
        marks = self._marks = self._times.marks(not self._trainer.fit_loop._should_accumulate())
        self._patch("training_step", partial(self._forwards, marks))
        self._patch("optimizer_step", self._steps)

    def _patch(self, name: str, instead: Callable[..., Any]) -> None:
        """Patch a method of the strategy until the step ends; `instead` is given the original."""
        strategy = self._trainer.strategy
        self._step.enter_context(in_place(strategy, name, partial(instead, getattr(strategy, name))))

    def forward_ended(self, loss: Any) -> None:
        """Mark the end of the forward pass: the backward pass from this loss begins."""
        if self._marks is not None and self._is_recording:
            self._marks.forward_ended(loss)

    def backward_ended(self) -> None:
        if self._marks is not None and self._is_recording:
            self._marks.backward_ended()

    def batch_ended(self) -> None:
        self._end_marks()
        marks, self._finished, self._marks = self._finished, None, None
        step = step_number(self._trainer)
        self._clock.ended(marks, step, self._is_due, *batch_of_step(self._trainer))
        if marks is not None:
            self._untimed = never_timed(self._untimed, marks.untimed)

    def pause(self) -> None:
        """Pause the clocks for work that is no training step, even in the middle of a step."""
        self._times.pause()

    def epoch_changes(self) -> None:
        """Abandon an open step and pause the clocks: an epoch begins or ends."""
        self._abandon()  # a batch that a hook has skipped has no end
        self._times.pause()

    def finish(self, exception: BaseException | None = None) -> RunSummary:
        """Read the remaining events, and return the summary; `exception` is what ended the run."""
        return self._times.finish_eager(self._untimed or {}, ended_by(self._trainer, exception))

    def close(self) -> None:
        """Undo all patches, and write the remaining readings."""
        with ExitStack() as stack:  # closes every part, even if one of them fails
            stack.callback(self._times.close)
            stack.callback(self._patches.close)
            stack.callback(self._abandon)

    @property
    def _is_due(self) -> bool:
        """True if the batches of the next step of the optimizer are timed."""
        return self._clock.is_due(self._trainer.global_step)

    def _forwards(
        self, marks: StepMarks, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Patch of `Strategy.training_step`, with which a timed step begins, as in a graph."""
        if self._is_recording:  # LBFGS calls it several times in a step
            marks.forward_began()
        else:
            self._is_recording = True
            self._step.enter_context(marks.recording())
            self._step.enter_context(timed_stages(marks, self._trainer, self._module))
        return original(*args, **kwargs)

    def _steps(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Patch of `Strategy.optimizer_step`, with which a timed step ends."""
        result = original(*args, **kwargs)
        self._end_marks()
        return result

    def _batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Patch of `Strategy.batch_to_device`, which times the copy of a batch."""
        by_loop = self._trainer.training and self._module._current_fx_name == TRANSFER
        if not (by_loop and self._is_due):
            return self._move(batch, *args, **kwargs)
        with self._clock.copying():
            return self._move(batch, *args, **kwargs)

    def _end_marks(self) -> None:
        """End the marks of a step, if it has begun. The rest of the batch is not timed."""
        self._step.close()
        if self._is_recording:
            self._finished, self._is_recording = self._marks, False

    def _abandon(self) -> None:
        self._step.__exit__(GeneratorExit, GeneratorExit(), None)
        self._marks = self._finished = None
        self._is_recording = False


def _clock_of(trainer: pl.Trainer) -> Backend:
    try:
        return backend_for(trainer.strategy.root_device)
    except UnsupportedError:  # neither CUDA nor a CPU: times of the host
        return EmulatorBackend()
