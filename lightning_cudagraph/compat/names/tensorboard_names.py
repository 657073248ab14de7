"""Private names of TensorBoard's event file writers, which torch's `SummaryWriter` uses."""

from __future__ import annotations

from lightning_cudagraph.compat.probes import members

_FILE_WRITER = "tensorboard.summary.writer.event_file_writer"

# Looked for where they are used. Without them each time of a layer is written as an event of its own,
# and our layout of custom scalars takes the place of the user's.
TENSORBOARD = (
    members(f"{_FILE_WRITER}.EventFileWriter", "_async_writer _file_name"),
    members(f"{_FILE_WRITER}._AsyncWriter", "_writer write"),
    members("tensorboard.summary.writer.record_writer.RecordWriter", "_writer write"),
)
