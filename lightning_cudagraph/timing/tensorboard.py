"""Times and texts in TensorBoard. The only file that knows TensorBoard."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

__all__ = ["TensorBoardWriter"]

# Rows kept before they are written: one event with all values of a step costs about as much as
# five single scalars, and the file itself is written by TensorBoard's own thread.
_ROWS_PER_FLUSH = 64


class TensorBoardWriter:
    """Collects the times of each replay, and writes them in bulk, off the step's path.

    Args:
        loggers: the trainer's loggers; those for TensorBoard are written to.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self._loggers = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._rows: list[tuple[int, float, dict[str, float]]] = []

    def add(self, times_ms: dict[str, float], step: int) -> None:
        """Take the times of one replay.

        Args:
            times_ms: tag and milliseconds.
            step: the step as the trainer's loggers count it.
        """
        if not self._loggers:
            return
        self._rows.append((step, time.time(), times_ms))
        if len(self._rows) >= _ROWS_PER_FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write what has been taken."""
        rows, self._rows = self._rows, []
        for logger in self._loggers:
            writer = logger.experiment
            for step, walltime_s, times_ms in rows:
                self._write_row(writer, step, walltime_s, times_ms)

    @staticmethod
    def _write_row(writer: Any, step: int, walltime_s: float, times_ms: dict[str, float]) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

            file_writer = writer.file_writer
            add_summary = file_writer.add_summary
        except (ImportError, AttributeError):
            # tensorboardX, or a writer that somebody else made: one call a value.
            for tag, value_ms in times_ms.items():
                writer.add_scalar(tag, value_ms, step, walltime=walltime_s)
            return
        values = [Summary.Value(tag=tag, simple_value=value_ms) for tag, value_ms in times_ms.items()]
        add_summary(Summary(value=values), step, walltime_s)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write a text in a fixed-width font.

        Args:
            tag: where it is shown.
            text: plain text; its columns stay aligned.
            step: the step as the trainer's loggers count it.
        """
        for logger in self._loggers:
            logger.experiment.add_text(tag, f"```\n{text}\n```", step)
