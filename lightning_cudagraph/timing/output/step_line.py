"""Step times on the host as curves: of replays, and of the plain steps before the capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_cudagraph.timing.readings.sinks import Sink
from lightning_cudagraph.timing.readings.spans import STEP_TIME_TAG, Reading
from lightning_cudagraph.timing.readings.step_time import StepTime

__all__ = ["StepLine"]

# TensorBoard fits the axis to less than the highest and the lowest point, and shows nothing of two. So
# the first points come sooner, for short runs.
_FIRST_READINGS, _MOST_READINGS = 10, 50


class StepLine(Sink):
    """Sink that shows the mean time of up to fifty steps, beside that of the plain steps.

    The latter is measured once, in long runs on a GPU, and repeated, so that it is a line in a chart.
    Both are from the end of a step to the end of the next, as in the report.
    """

    def __init__(self, pace: StepTime, show: Callable[[Mapping[str, float], int], None]) -> None:
        self._pace = pace
        self._show = show
        self._n_new = 0
        self._n_due = _FIRST_READINGS
        self._step = 0

    def add(self, reading: Reading) -> None:
        self._step = reading.step
        self._n_new += 1
        if self._n_new >= self._n_due:
            self._write()
            self._n_due = min(2 * self._n_due, _MOST_READINGS)

    def close(self) -> None:
        """Show the rest."""
        if self._n_new:
            self._write()

    def _write(self) -> None:
        self._n_new = 0
        times_ms = {"replayed": self._pace.since_last_ms(), "eager": self._pace.plain_ms}
        values = {f"{STEP_TIME_TAG}{name}": ms for name, ms in times_ms.items() if ms is not None}
        self._show(values, self._step)
