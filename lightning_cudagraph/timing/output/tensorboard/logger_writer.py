"""The writer of a TensorBoard logger, and the way into its queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cudagraph.compat.features import EVENT_QUEUE
from lightning_cudagraph.compat.method_patches import replace_method
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.timing.output.tensorboard.records import ReadingRecords
from lightning_cudagraph.timing.readings.spans import Reading

__all__ = ["LoggerWriter", "innards"]


class _Queued(NamedTuple):
    """Readings among the records in a writer's queue."""

    readings: Sequence[Reading]


class LoggerWriter:
    """The writer of a logger. After an error no more is written to it, and training goes on.

    It may be closed by its owner at any time, and makes a new file then when something is
    written.
    """

    def __init__(self, logger: TensorBoardLogger) -> None:
        self._logger = logger
        self._made = ReadingRecords()
        self._has_way_in = available(EVENT_QUEUE)
        self._failed = False
        self._patches = ExitStack()
        # The part of the writer with a method that is replaced.
        self._records: Any = None
        # What went wrong in the writer's thread.
        self._error: Exception | None = None

    def attempt(self, write: Callable[[Any], None]) -> None:
        """Call `write` with the writer; an error is said once."""
        if not self._failed:
            self._try(write)

    def draw(self, write: Callable[[Any], None]) -> None:
        """Call `write` with the writer; an error is the caller's, since a picture can fail by itself."""
        if not self._failed:
            write(self._logger.experiment)

    def write(self, readings: Sequence[Reading]) -> None:
        """Hand readings to the writer."""
        self.attempt(lambda writer: self._write(writer, readings))

    def close(self) -> None:
        """Leave the writer as it was."""
        if self._records is not None:
            # What is in its queue needs what is taken away now.
            self._try(self._drain)
        self._records = None
        self._patches.close()

    def _drain(self, writer: Any) -> None:
        if writer.file_writer is not None:  # not closed, with all that was in its queue
            writer.flush()
        if self._error is not None:
            raise self._error

    def _try(self, write: Callable[[Any], None]) -> None:
        try:
            write(self._logger.experiment)
        except Exception as error:  # a full disk, or whatever a file system or a subclass raises
            failed, self._failed = self._failed, True
            if not failed:
                rank_zero_warn(
                    f"lightning_cudagraph: `{type(self._logger).__qualname__}` could not write times:"
                    f" {type(error).__name__}: {error}. It is given no more; training goes on."
                )

    def _write(self, writer: Any, readings: Sequence[Reading]) -> None:
        if getattr(writer, "file_writer", self) is None:
            # Closed. The public way opens it again.
            _write_values(writer, readings[:1])
            readings = readings[1:]
        if (put := self._way_in(writer)) is None:
            _write_values(writer, readings)
        else:
            put(_Queued(readings))

    def _way_in(self, writer: Any) -> Callable[[Any], None] | None:
        """The function that puts readings into the writer's queue; None if it is built differently."""
        if self._error is not None:
            raise self._error
        if not self._has_way_in:
            return None
        _, _, queue, records, file = innards(writer)
        ways = [getattr(queue, "write", None), getattr(records, "write", None)]
        if not all(map(callable, [*ways, getattr(file, "write", None)])):
            return None
        if records is not self._records:
            self._records = records
            by_tensorboard = records.write

            def write(data: Any) -> None:
                if type(data) is not _Queued:
                    by_tensorboard(data)
                    return
                try:
                    made = b"".join(self._made.of(data.readings))
                except Exception as error:  # ours, and no reason for TensorBoard's thread to end
                    self._error = error
                    return
                if made:
                    file.write(made)

            replace_method(records, "write", write, self._patches)
        put: Callable[[Any], None] = queue.write
        return put


def _write_values(writer: Any, readings: Sequence[Reading]) -> None:
    """Write by the public method, which makes an event of each value."""
    for reading in readings:
        for tag, value_ms in zip(reading.layout.tags, reading.durations_ms.tolist(), strict=True):
            writer.add_scalar(tag, value_ms, reading.step, walltime=reading.walltime_s)


def innards(writer: Any) -> list[Any]:
    """The parts of a writer of torch's: its file, that of its events, the queue, records, bytes."""
    found = []
    for name in ("file_writer", "event_writer", "_async_writer", "_writer", "_writer"):
        writer = getattr(writer, name, None)
        found.append(writer)
    return found
