"""The rate of timed steps, if the user gives none: all, or few where the events would slow the run.

Events in a graph take time on the host. A run that the device bounds does not wait for it; one that the
host bounds takes longer by all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG
from lightning_cudagraph.timing.readings.windows import ReadingWindow, WindowSummary

# The readings that decide, and what timings may take of the time of a step.
_READINGS = 200
_MOST = 0.03
# On an H100 steps that the host bounds took 1.1 to 2.2 times as long with times as without: if one in
# 50 is timed, that is 0.2 to 2.4 % of a run (`benchmarks.surroundings`).
_SELDOM = 50
# To read the events of a step and to record its times, in microseconds of the host, 25 and 10
# (docs/measured.md).
_READING_US = 35.0


class TimingRate(Sink):
    """The rate at which steps are timed, decided from the first readings of a run.

    Args:
        asked: the user's own rate; None to decide.
        event_host_us: host time of an event in a graph for each replay; 0 if that is no measure.
        on_change: called once, if steps are to be timed less often from now on.

    Attributes:
        every_n_steps: one in so many optimizer steps is timed; 0 for none.
        reason: why the rate is lower than at first, in words; empty if it is not.
    """

    def __init__(self, asked: int | None, event_host_us: float, on_change: Callable[[], None]) -> None:
        self.every_n_steps = 1 if asked is None else asked
        self.reason = ""
        self._event_host_us = event_host_us
        self._on_change = on_change
        self._left = _READINGS if asked is None and event_host_us else 0
        self._window = ReadingWindow(_READINGS)

    def add(self, reading: Reading) -> None:
        if not self._left:
            return
        self._window.add(reading)
        self._left -= 1
        if self._left:
            return
        share = self._share(self._window.summary())
        self._window = ReadingWindow(1)
        if share > _MOST:
            self.every_n_steps = _SELDOM
            self.reason = (
                f"each of the first {_READINGS} was: the host bounds the run, and events in each step"
                f" would take about {share:.0%} of it (`LayerTimings(every_n_steps=1)` times all)"
            )
            self._on_change()

    def _share(self, summary: WindowSummary) -> float:
        """The share of a step by which timings make it longer."""
        gap, period, typical = summary.get(GAP_TAG), summary.period, summary.typical()
        if gap is None or period is None or typical is None or period.p50_ms <= 0:
            return 0.0
        events_ms = 1e-3 * (_READING_US + self._event_host_us * typical.layout.n_marks)
        return min(gap.p50_ms, events_ms) / period.p50_ms
