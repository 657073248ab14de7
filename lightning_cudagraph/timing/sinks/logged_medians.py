"""Medians for loggers of plain numbers, such as MLflow's and Weights & Biases'."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from time import monotonic
from typing import Any

from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.readings.windows import ReadingWindow, WindowSummary
from lightning_cudagraph.timing.sinks.curves import tags_without_curves

_SECONDS_WITHOUT_PAUSE = 60.0


class MetricNames(dict[str, str]):
    """Names of spans, by tag, in the characters that experiment trackers allow.

    MLflow allows letters, digits, spaces and ``_/.-``. Weights & Biases sorts and filters only by names
    of letters, digits and ``_``, is not case-sensitive, and shows the part before a slash as a section.
    """

    def __missing__(self, tag: str) -> str:
        plain = re.sub(r"[^a-zA-Z0-9_/]", "_", tag)
        taken = {name.lower() for name in self.values()}
        numbered = (f"{plain}_{number}" for number in count(2))
        self[tag] = next(name for name in chain([plain], numbered) if name.lower() not in taken)
        return self[tag]


class MediansWriter(ReadingWindow):
    """Sink that logs the medians of a window: few numbers, because loggers may send them over a network.

    It logs in pauses, off the critical path, and without pauses once a minute at most. It logs the last
    window, at the loggers' current step, because some loggers reject a repeated or an earlier step.
    """

    def __init__(
        self,
        loggers: Sequence[Any],
        window_steps: int,
        step_now: Callable[[], int],
        inner: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(window_steps)
        self._loggers = list(loggers)
        self._step_now = step_now
        self._inner = inner
        self._names = MetricNames()
        # Values for the next window that do not come from readings.
        self._beside: dict[str, float] = {}
        self._written_at_s = monotonic()

    def add(self, reading: Reading) -> None:
        super().add(reading)
        if self.is_all_new and monotonic() - self._written_at_s >= _SECONDS_WITHOUT_PAUSE:
            self._write()

    def add_beside(self, values: Mapping[str, float]) -> None:
        """Add values, by tag, that are logged with the next window."""
        self._beside.update(values)

    def pause(self) -> None:
        if self.is_all_new:
            self._write()

    def close(self) -> None:
        if self.n_new or self._beside:
            self._write()

    def _write(self) -> None:
        self._written_at_s = monotonic()
        n_new, self.n_new = min(self.n_new, len(self)), 0
        if not self._loggers:
            return
        summary = WindowSummary(list(self._readings)[len(self) - n_new :])
        without = tags_without_curves(summary.times, self._inner)
        values_ms = {
            self._names[tag]: times.p50_ms for tag, times in summary.times.items() if tag not in without
        }
        values_ms |= {self._names[tag]: value for tag, value in self._beside.items()}
        self._beside = {}
        step = self._step_now()
        self._loggers = [logger for logger in self._loggers if self._log(logger, values_ms, step)]

    def _log(self, logger: Any, values_ms: dict[str, float], step: int) -> bool:
        try:
            logger.log_metrics(dict(values_ms), step=step)
        except Exception as error:  # of any kind, depending on the tracker's client
            warnings.warn(given_no_more(logger, "take", error), stacklevel=2)
            return False
        return True


def given_no_more(logger: object, verb: str, error: Exception) -> str:
    """The warning of a sink that its logger has raised an error."""
    return (
        f"lightning_cudagraph: `{type(logger).__qualname__}` could not {verb} times:"
        f" {type(error).__name__}: {error}. It is given no more; training goes on."
    )
