"""Times for loggers that take numbers only, such as those of MLflow and Weights & Biases."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Protocol

from lightning_cudagraph.timing.spans import Reading
from lightning_cudagraph.timing.windows import WindowSummary

__all__ = ["MetricNames", "MetricsWriter", "TakesMetrics"]


class TakesMetrics(Protocol):
    """What a logger has to have."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep the metrics of a step."""


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


class MetricsWriter:
    """Hands medians over a window to loggers: few numbers, since theirs may go through a network.

    Args:
        loggers: who is given them.
        window_steps: how many readings make a window.
    """

    def __init__(self, loggers: Sequence[TakesMetrics], window_steps: int) -> None:
        self._loggers = list(loggers)
        self._window_steps = window_steps
        self._names = MetricNames()
        self._readings: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """Take the times of one step."""
        if not self._loggers:
            return
        self._readings.append(reading)
        if len(self._readings) >= self._window_steps:
            self._write()

    def pause(self) -> None:
        """Nothing: a window does not end with an epoch."""

    def close(self) -> None:
        """Write what is left."""
        self._write()

    def _write(self) -> None:
        readings, self._readings = self._readings, []
        if not readings or not self._loggers:
            return
        values_ms = {
            self._names.of(tag): times.p50_ms for tag, times in WindowSummary(readings).times.items()
        }
        self._loggers = [
            logger for logger in self._loggers if self._hand(logger, values_ms, readings[-1])
        ]

    def _hand(self, logger: TakesMetrics, values_ms: dict[str, float], last: Reading) -> bool:
        """Whether a logger took the values; an error is said, and ends with that."""
        try:
            logger.log_metrics(dict(values_ms), step=last.step)
        except Exception as error:  # whatever the client of a tracker raises
            warnings.warn(
                f"lightning_cudagraph: `{type(logger).__qualname__}` could not take times:"
                f" {type(error).__name__}: {error}. It is given no more; training goes on.",
                stacklevel=2,
            )
            return False
        return True
