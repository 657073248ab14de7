"""Access to the writer of a TensorBoard logger, and to its queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cudagraph.compat.method_patches import patch_method
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.sinks.logged_medians import given_no_more
from lightning_cudagraph.timing.sinks.tensorboard.records import Curves, ReadingRecords


class LoggerWriter:
    """The writer of a logger. After an error it is not written to any more, and training goes on.

    The logger may close its writer at any time; the next write then opens a new file.
    """

    def __init__(self, logger: TensorBoardLogger, curves: Curves) -> None:
        self._logger = logger
        self._curves = curves
        self._made = ReadingRecords(curves)
        self._failed = False
        self._patches = ExitStack()
        # The part of the writer that has a patched method.
        self._records: Any = None
        # An error in the writer's thread.
        self._error: Exception | None = None

    def attempt(self, write: Callable[[Any], None]) -> None:
        """Call `write` with the writer; the first error is a warning, and the last call."""
        if not self._failed:
            self._try(write)

    def draw(self, write: Callable[[Any], None]) -> None:
        """Call `write` with the writer; its errors are raised, since a picture may fail by itself."""
        if not self._failed:
            write(self._logger.experiment)

    def write(self, readings: Sequence[Reading]) -> None:
        self.attempt(lambda writer: self._write(writer, readings))

    def close(self) -> None:
        if self._records is not None:
            # Readings in its queue need the patched method.
            self._try(self._drain)
        self._records = None
        self._patches.close()

    def _drain(self, writer: Any) -> None:
        if writer.file_writer is not None:  # otherwise it was closed, and its queue written
            writer.flush()
        if self._error is not None:
            raise self._error

    def _try(self, write: Callable[[Any], None]) -> None:
        try:
            write(self._logger.experiment)
        except Exception as error:  # a full disk, or an error of any kind by a subclass
            failed, self._failed = self._failed, True
            if not failed:
                rank_zero_warn(given_no_more(self._logger, "write", error))

    def _write(self, writer: Any, readings: Sequence[Reading]) -> None:
        if getattr(writer, "file_writer", self) is None:
            # Closed: a write by the public method opens it again.
            self._write_values(writer, readings[:1])
            readings = readings[1:]
        if (put := self._put_of(writer)) is None:
            self._write_values(writer, readings)
        elif readings:  # TensorBoard's thread counts nothing empty as done, and would be waited for
            put(list(readings))  # between the records of others

    def _put_of(self, writer: Any) -> Callable[[Any], None] | None:
        """The `put` of the writer's queue; None if the writer is built differently."""
        if self._error is not None:
            raise self._error
        _, _, queue, records, file = nested_parts(writer)
        if not all(callable(getattr(part, "write", None)) for part in (queue, records, file)):
            return None
        if records is not self._records:
            self._records = records
            by_tensorboard = records.write

            def write(data: Any) -> None:
                if not isinstance(data, list):
                    by_tensorboard(data)
                    return
                try:
                    made = b"".join(self._made.of(data))
                except Exception as error:  # our error must not end TensorBoard's thread
                    self._error = error
                    return
                if made:
                    file.write(made)

            patch_method(records, "write", write, self._patches)
        put: Callable[[Any], None] = queue.write
        return put

    def _write_values(self, writer: Any, readings: Sequence[Reading]) -> None:
        """Write by the public method, with an event for each value."""
        for reading in readings:
            shown = replace(reading, layout=self._curves(reading.layout))
            for tag, value_ms in zip(shown.layout.tags, shown.durations_ms.tolist(), strict=True):
                writer.add_scalar(tag, value_ms, reading.step, walltime=reading.walltime_s)


def nested_parts(writer: Any) -> list[Any]:
    """Nested parts of torch's `SummaryWriter` (file, events, queue, records, bytes), None if missing."""
    found = []
    for name in ("file_writer", "event_writer", "_async_writer", "_writer", "_writer"):
        writer = getattr(writer, name, None)
        found.append(writer)
    return found
