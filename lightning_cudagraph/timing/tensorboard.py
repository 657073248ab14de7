"""Times and texts in TensorBoard. The only file that knows TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_cudagraph.timing.crc32c import masked_crc32c
from lightning_cudagraph.timing.spans import Reading

__all__ = ["TensorBoardWriter"]

# Few, so that writing them fits into the time that the device takes for a step.
_ROWS_PER_FLUSH = 8
# The tables of the quick checksum take a kilobyte for each byte of the longest record: enough for the
# times of several hundred layers, and not for pictures.
_LONGEST_QUICK_RECORD_BYTES = 16_384


class TensorBoardWriter:
    """Collects the times of each replay, and writes them in bulk: one event for all times of a step.

    Args:
        loggers: the trainer's loggers; those for TensorBoard are written to.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._rows: list[tuple[int, float, tuple[str, ...], list[float]]] = []
        self._patches = ExitStack()
        self._quickened: set[int] = set()

    def add(self, reading: Reading) -> None:
        """Take the times of one replay."""
        if not self._loggers:
            return
        times_ms = reading.durations_ms.tolist()
        self._rows.append((reading.step, reading.walltime_s, reading.layout.tags, times_ms))
        if len(self._rows) >= _ROWS_PER_FLUSH:
            self.flush()

    def pause(self) -> None:
        """Write what has been taken."""
        self.flush()

    def flush(self) -> None:
        """Write what has been taken."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        for logger in self._loggers:
            writer = logger.experiment
            if id(writer) not in self._quickened:
                self._quickened.add(id(writer))
                self._patches.callback(_quicken(writer))
            write = _row_writer(writer)
            for row in rows:
                write(*row)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write a text in a fixed-width font.

        Args:
            tag: where it is shown.
            text: plain text; its columns stay aligned.
            step: the step as the trainer's loggers count it.
        """
        for logger in self._loggers:
            logger.experiment.add_text(tag, f"```\n{text}\n```", step)

    def close(self) -> None:
        """Write what is left, and leave the loggers' writers as they were."""
        self.flush()
        self._patches.close()
        self._quickened.clear()


def _row_writer(writer: Any) -> Callable[[int, float, tuple[str, ...], list[float]], None]:
    """How a row is written: one event, or one call a value where the writer is not torch's."""

    def value_by_value(
        step: int, walltime_s: float, tags: tuple[str, ...], times_ms: list[float]
    ) -> None:
        for tag, value_ms in zip(tags, times_ms, strict=True):
            writer.add_scalar(tag, value_ms, step, walltime=walltime_s)

    file_writer: Any = getattr(writer, "file_writer", None)
    if not hasattr(file_writer, "add_summary"):
        return value_by_value
    try:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    except ImportError:
        return value_by_value
    summaries: dict[tuple[str, ...], Any] = {}

    def one_event(step: int, walltime_s: float, tags: tuple[str, ...], times_ms: list[float]) -> None:
        if tags not in summaries:
            summaries[tags] = Summary(value=[Summary.Value(tag=tag) for tag in tags])
        summary = summaries[tags]
        for value, value_ms in zip(summary.value, times_ms, strict=True):
            value.simple_value = value_ms
        file_writer.add_summary(summary, step, walltime_s)

    return one_event


def _quicken(writer: Any) -> Callable[[], None]:
    """Let a writer's records be checksummed quickly; returns what undoes it.

    Where a version of TensorBoard is built differently, nothing is changed.
    """
    records: Any = writer
    for name in ("file_writer", "event_writer", "_async_writer", "_writer"):
        records = getattr(records, name, None)
    file = getattr(records, "_writer", None)
    if not callable(getattr(records, "write", None)) or file is None or "write" in vars(records):
        return lambda: None

    by_tensorboard = records.write

    def write(data: bytes) -> None:
        if len(data) > _LONGEST_QUICK_RECORD_BYTES:
            by_tensorboard(data)
            return
        length = struct.pack("<Q", len(data))
        file.write(
            length
            + struct.pack("<I", masked_crc32c(length))
            + data
            + struct.pack("<I", masked_crc32c(data))
        )

    records.write = write
    return lambda: vars(records).pop("write", None)
