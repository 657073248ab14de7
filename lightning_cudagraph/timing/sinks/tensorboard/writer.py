"""Sinks for a trainer's loggers: times, charts and texts in TensorBoard, medians elsewhere.

The times of a step cost the training loop an append. Every few seconds, the new readings are put into
the queue of TensorBoard's own writer: its thread makes records of them, many at once, and writes them in
order, among the events of other code, into the same file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.sinks.tensorboard.charts import Charts
from lightning_cudagraph.timing.sinks.tensorboard.logger_writer import LoggerWriter
from lightning_cudagraph.timing.sinks.tensorboard.records import behind, curves_of

_READINGS_PER_FLUSH = 128
_SECONDS_BETWEEN_FLUSHES = 5.0
# Steps of half a millisecond would fill a disk in a day, and TensorBoard shows a thousand points of a
# curve. So each time that this much has been written, the share of steps that are written is halved.
_BYTES_BEFORE_THINNING = 256 * 2**20
_BYTES_PER_SPAN = 45  # about, with its tag and its part of the record
_TEXT_COLUMNS = 110


class TensorBoardWriter(Sink):
    """Sink that writes the times of each step to TensorBoard; other values, and charts of them.

    There is a point for each timed replay, at the trainer's step. With accumulation that is one point
    for each micro-batch: several share a step, as those of `self.log` do, and the optimizer's time is in
    the last. A long run has fewer points later on, and says so in ``cudagraph/events``. Loggers that are
    not for TensorBoard are passed over, and so are spans of layers that are `inner`.
    """

    def __init__(self, loggers: Sequence[Logger], inner: frozenset[str] = frozenset()) -> None:
        self._curves = curves_of(inner)
        self._writers = [
            LoggerWriter(x, self._curves) for x in loggers if isinstance(x, TensorBoardLogger)
        ]
        if getattr(rank_zero_only, "rank", 0) != 0:
            self._writers = []
        self._readings: list[Reading] = []
        self._flush_at_s = 0.0
        self._n_bytes = 0  # written so far
        self._thin_at_bytes = _BYTES_BEFORE_THINNING
        self._every_n_steps = 1
        self._charts = [Charts() for _ in self._writers]
        self._tags: set[str] = set()  # of values that do not come from readings

    @property
    def is_shown(self) -> bool:
        """True if there is a logger to write to; otherwise texts and figures need not be made."""
        return bool(self._writers)

    def add(self, reading: Reading) -> None:
        readings = self._readings
        readings.append(reading)
        if len(readings) >= _READINGS_PER_FLUSH or reading.walltime_s >= self._flush_at_s:
            self.flush()

    def pause(self) -> None:
        self.flush()

    def flush(self) -> None:
        readings, self._readings = self._readings, []
        if not readings or not self._writers:
            return
        last = readings[-1]
        self._flush_at_s = last.walltime_s + _SECONDS_BETWEEN_FLUSHES
        n = self._every_n_steps
        shown = readings if n == 1 else [reading for reading in readings if (reading.step + 1) % n == 0]
        for writer in self._writers:
            writer.write(shown)
        n_spans = sum(len(self._curves(reading.layout).tags) for reading in shown)
        self._n_bytes += _BYTES_PER_SPAN * n_spans
        if self._n_bytes >= self._thin_at_bytes:
            self._thin(last.step)

    def _thin(self, step: int) -> None:
        self._thin_at_bytes += _BYTES_BEFORE_THINNING
        self._every_n_steps *= 2
        self.add_event(
            f"About {_BYTES_BEFORE_THINNING // 2**20} MiB of times are written. From here on, the curves"
            f" have at most one step in {self._every_n_steps}; bands and tables have all that are timed."
            " `LayerTimings(every_n_steps=...)` times fewer.",
            step,
        )

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write values that do not come from readings, and the charts of them."""
        for tag, value in values.items():
            for writer in self._writers:
                writer.attempt(lambda to: to.add_scalar(behind(tag), value, step))  # noqa: B023
        if not self._tags.issuperset(values):
            self._tags.update(values)
            for writer, charts in zip(self._writers, self._charts, strict=True):
                writer.attempt(lambda to: charts.write(to, self._tags))  # noqa: B023

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write a text in a fixed-width font."""
        for writer in self._writers:
            writer.attempt(lambda to: to.add_text(behind(tag), f"```\n{text}\n```", step))

    def add_event(self, text: str, step: int) -> None:
        """Write a sentence about the graphs, or about the curves."""
        self.add_text("cudagraph/events", textwrap.fill(text, _TEXT_COLUMNS), step)

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Write a picture; its errors are raised."""
        for writer in self._writers:
            writer.draw(lambda to: to.add_figure(behind(tag), figure, step))

    def close(self) -> None:
        """Write the remaining readings, and restore the loggers' writers."""
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
            self.flush()
