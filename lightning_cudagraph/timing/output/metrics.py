"""Times for loggers that take numbers only, such as those of MLflow and Weights & Biases."""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol

from lightning_cudagraph.timing.readings.sinks import Sink
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.readings.windows import WindowSummary

__all__ = ["MetricNames", "MetricsWriter", "TakesMetrics"]

_SECONDS_WITHOUT_PAUSE = 60.0


class TakesMetrics(Protocol):
    """The part of a logger that is used."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log the metrics of a step."""


class MetricNames:
    """Names of spans that trackers of experiments allow.

    MLflow allows letters, digits, spaces and ``_/.-``. Weights & Biases sorts and filters only by names
    of letters, digits and ``_``, and makes no difference between upper and lower case; it shows what
    stands before a slash as a section.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, tag: str) -> str:
        """The name of a span, the same each time, and that of no other."""
        if (known := self._names.get(tag)) is not None:
            return known
        name = first = re.sub(r"[^a-zA-Z0-9_/]", "_", tag)
        number = 1
        while name.lower() in self._taken:
            number += 1
            name = f"{first}_{number}"
        self._taken.add(name.lower())
        self._names[tag] = name
        return name


class MetricsWriter(Sink):
    """Hands medians over a window to loggers: few numbers, since theirs may go through a network.

    That is done in pauses, off the step's path. Where none comes, it is done in between, no more often
    than once a minute. What is handed over is the last window, at the step that the loggers are at:
    there are some that want no step twice, or none that is over.
    """

    def __init__(
        self,
        loggers: Sequence[TakesMetrics],
        window_steps: int,
        step_now: Callable[[], int],
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._loggers = list(loggers)
        self._window_steps = window_steps
        self._step_now = step_now
        self._now_s = now_s
        self._names = MetricNames()
        self._readings: deque[Reading] = deque(maxlen=window_steps)
        self._n_new = 0
        # What comes with the next window, and does not follow from readings.
        self._beside: dict[str, float] = {}
        self._written_at_s = now_s()

    def add(self, reading: Reading) -> None:
        self._readings.append(reading)
        self._n_new += 1
        if (
            self._n_new >= self._window_steps
            and self._now_s() - self._written_at_s >= _SECONDS_WITHOUT_PAUSE
        ):
            self._write()

    def add_beside(self, values: Mapping[str, float]) -> None:
        """Take numbers that are handed over with the next window, by tag."""
        self._beside.update(values)

    def pause(self) -> None:
        """Hand over the last window, if all of it is new."""
        if self._n_new >= self._window_steps:
            self._write()

    def close(self) -> None:
        """Hand over what is left."""
        if self._n_new or self._beside:
            self._write()

    def _write(self) -> None:
        self._written_at_s = self._now_s()
        n_new, self._n_new = min(self._n_new, len(self._readings)), 0
        if not self._loggers:
            return
        summary = WindowSummary(list(self._readings)[len(self._readings) - n_new :])
        values_ms = {self._names.of(tag): times.p50_ms for tag, times in summary.times.items()}
        values_ms |= {self._names.of(tag): value for tag, value in self._beside.items()}
        self._beside = {}
        step = self._step_now()
        self._loggers = [logger for logger in self._loggers if self._hand(logger, values_ms, step)]

    def _hand(self, logger: TakesMetrics, values_ms: dict[str, float], step: int) -> bool:
        """Log the values; False, with a warning, if the logger raised."""
        try:
            logger.log_metrics(dict(values_ms), step=step)
        except Exception as error:  # whatever the client of a tracker raises
            warnings.warn(
                f"lightning_cudagraph: `{type(logger).__qualname__}` could not take times:"
                f" {type(error).__name__}: {error}. It is given no more; training goes on.",
                stacklevel=2,
            )
            return False
        return True
