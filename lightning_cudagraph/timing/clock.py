"""What a fit measures: the pace of its steps, and the times inside its replays."""

from __future__ import annotations

import time
from typing import Protocol

from lightning_cudagraph.capture.steps import Phase, StepCounts
from lightning_cudagraph.timing.marks import StepMarks
from lightning_cudagraph.timing.report import LayerTimes, StepPace, fit_report
from lightning_cudagraph.timing.spans import Reading
from lightning_cudagraph.timing.tensorboard import TensorBoardWriter

__all__ = ["FitClock", "Sink"]


class Sink(Protocol):
    """Where readings go: the aggregates of the report, TensorBoard, other loggers, a trace file.

    Readings come in the order of their steps. Not all have one layout: steps of a window of
    accumulation differ in it, and a step after a pause has no gap before it. A layout that comes up
    again is the same object, so that work done for it can be kept by its identity.
    """

    def add(self, reading: Reading) -> None:
        """Take what a step's marks said. On the step's path: no more than an append."""

    def pause(self) -> None:
        """Something that is not a training step comes now: the time to write and to draw."""

    def close(self) -> None:
        """No more comes, be it because the run failed: write what is left, put back what was changed."""


class FitClock:
    """Reads the events of replays, and writes what they say.

    Args:
        tensorboard: where the times of each replay are written.
        one_behind: the events of a replay are read when the next one has been launched, which has events
            of its own, so that the device never waits for the reading.
    """

    def __init__(self, tensorboard: TensorBoardWriter, one_behind: bool) -> None:
        self._tensorboard = tensorboard
        self._one_behind = one_behind
        self._pace = StepPace()
        self._times = LayerTimes()
        # The replay whose events have not been read yet, with its step.
        self._unread: tuple[StepMarks, int] | None = None

    def tick(self, phase: Phase) -> None:
        """A step of `phase` has ended."""
        self._pace.tick(phase)

    def pause(self) -> None:
        """Something that is not a training step comes now (validation, a checkpoint)."""
        self._pace.pause()

    def replayed(self, marks: StepMarks, step_number: int) -> None:
        """A replay with events has been launched.

        Args:
            marks: its events.
            step_number: the step as the trainer's loggers count it.
        """
        if self._one_behind:
            self._read()
        self._unread = (marks, step_number)
        if not self._one_behind:
            self._read()

    def report(
        self,
        description: str,
        counts: StepCounts,
        notes: list[str],
        evaluation: StepCounts | None,
        step_number: int,
    ) -> str:
        """Read what is left to read, and write the report.

        Args:
            description: what the graphs ran on.
            counts: what became of the steps.
            notes: what the user should know besides.
            evaluation: what became of the batches of validation, if they had graphs.
            step_number: the last step as the trainer's loggers count it.
        """
        self._read()
        text = fit_report(description, counts, self._pace, self._times, notes, evaluation)
        self._tensorboard.add_text("cudagraph/report", text, step_number)
        return text

    def close(self) -> None:
        """Write what is left; events that have not been read are left alone."""
        self._unread = None
        self._tensorboard.close()

    def _read(self) -> None:
        if self._unread is None:
            return
        marks, step_number = self._unread
        self._unread = None
        reading = Reading(marks.layout, step_number, time.time(), marks.read())
        times_ms = reading.durations_ms.tolist()
        self._times.add(marks.layout.tags, times_ms)
        self._tensorboard.add(marks.layout.tags, times_ms, step_number)
