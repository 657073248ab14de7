"""Private names of TensorBoard's event file writers, which torch's `SummaryWriter` uses."""

from __future__ import annotations

from lightning_cudagraph.compat.features import CHARTS, EVENT_QUEUE
from lightning_cudagraph.compat.probes import members

_FILE_WRITER = "tensorboard.summary.writer.event_file_writer"

TENSORBOARD = (
    members(f"{_FILE_WRITER}.EventFileWriter", "_async_writer", EVENT_QUEUE),
    members(f"{_FILE_WRITER}.EventFileWriter", "_file_name", CHARTS),
    members(f"{_FILE_WRITER}._AsyncWriter", "_writer write", EVENT_QUEUE),
    members("tensorboard.summary.writer.record_writer.RecordWriter", "_writer write", EVENT_QUEUE),
)
