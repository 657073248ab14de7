"""The cost of writing the times of each step to TensorBoard, for the training loop.

    python -m benchmarks.bulk_writing

The readings are made beforehand. Between two of them the loop simulates a step: some Python, which holds
the interpreter, and then a wait for the device, in which TensorBoard's thread can work.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_cudagraph.timing.readings.sink import Sinks
from lightning_cudagraph.timing.readings.spans import FORWARD_TAG, STEP_TAG, Reading, Span, SpanLayout
from lightning_cudagraph.timing.sinks.tensorboard.charts import StepBand
from lightning_cudagraph.timing.sinks.tensorboard.records import ReadingRecords, curves_of
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter

__all__ = ["compare_writers", "measure"]

_LOOPS_OF_PYTHON = 4000
_WAIT_S = 0.3e-3
_FIRST = 200


def _step() -> None:
    for _ in range(_LOOPS_OF_PYTHON):
        pass
    time.sleep(_WAIT_S)


def _layout(n_spans: int) -> SpanLayout:
    whole = Span(f"{STEP_TAG}total", "host", ((0, n_spans),))
    layers = (
        Span(f"{FORWARD_TAG}model.blocks.{i}.attention", "forward", ((i, i + 1),))
        for i in range(n_spans - 1)
    )
    return SpanLayout((whole, *layers), n_spans + 1)


def _readings(n_spans: int, n_readings: int) -> list[Reading]:
    layout = _layout(n_spans)
    offsets_ms = np.cumsum(np.random.default_rng(0).random((n_readings, layout.n_marks)), axis=1)
    return [Reading(layout, step, time.time(), row) for step, row in enumerate(offsets_ms.tolist())]


def compare_writers(n_spans: int, n_readings: int = 512) -> dict[str, float]:
    """Make records of readings, with TensorBoard's own writer and in bulk.

    Args:
        n_spans: number of times in each reading.
        n_readings: number of readings.

    Returns:
        Processor time of all threads for each reading, in microseconds.
    """
    readings = _readings(n_spans, n_readings)
    durations_ms = [reading.durations_ms.tolist() for reading in readings]
    with tempfile.TemporaryDirectory() as folder:
        writer = EventFileWriter(folder, max_queue_size=n_readings)
        started_s = time.process_time()
        for reading, values in zip(readings, durations_ms, strict=True):
            scalars = zip(reading.layout.tags, values, strict=True)
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=ms) for tag, ms in scalars])
            writer.add_event(Event(wall_time=reading.walltime_s, step=reading.step, summary=summary))
        writer.flush()
        tensorboard_s = time.process_time() - started_s
        writer.close()
    records = ReadingRecords(curves_of())
    records.of(readings[:1])  # the template
    started_s = time.process_time()
    for begin in range(0, n_readings, 128):
        records.of(readings[begin : begin + 128])
    at_once_s = time.process_time() - started_s
    return {
        "TensorBoard's writer": 1e6 * tensorboard_s / n_readings,
        "many at once": 1e6 * at_once_s / n_readings,
    }


def measure(n_spans: int, n_readings: int = 2000) -> dict[str, float]:
    """Time the writing of readings.

    Args:
        n_spans: number of times in each reading.
        n_readings: number of readings.

    Returns:
        Microseconds, from the 200th reading on: the median `add`, the mean and the longest one, both
        also without the time in which the thread did not run, and the extra time of the whole loop for
        each reading. Before the 200th: the longest `add`, which looks for the user's charts. At the end:
        `close`.
    """
    readings = _readings(n_spans, n_readings)
    started_s = time.perf_counter()
    for _ in readings[_FIRST:]:
        _step()
    without_us = (time.perf_counter() - started_s) * 1e6
    with tempfile.TemporaryDirectory() as folder:
        logger = TensorBoardLogger(folder)
        logger.log_metrics({"loss": 0.0}, 0)  # the logger's writer is there before the first step ends
        to_tensorboard = TensorBoardWriter([logger])
        writer = Sinks([to_tensorboard, StepBand(200, to_tensorboard.add_scalars)])
        adds_us, busy_us = [], []
        loop_s = 0.0
        for nth, reading in enumerate(readings):
            if nth == _FIRST:
                loop_s = time.perf_counter()
            started_s, started_ns = time.perf_counter(), time.thread_time_ns()
            writer.add(reading)
            ended_ns, ended_s = time.thread_time_ns(), time.perf_counter()
            adds_us.append((ended_s - started_s) * 1e6)
            busy_us.append((ended_ns - started_ns) / 1e3)
            _step()
        with_us = (time.perf_counter() - loop_s) * 1e6
        started_s = time.perf_counter()
        writer.close()
        end_us = (time.perf_counter() - started_s) * 1e6
        logger.finalize("success")
    begun, later = adds_us[:_FIRST], adds_us[_FIRST:]
    return {
        "append": statistics.median(later),
        "mean": statistics.mean(later),
        "mean without waiting": statistics.mean(busy_us[_FIRST:]),
        "longest": max(later),
        "longest without waiting": max(busy_us[_FIRST:]),
        "whole loop": (with_us - without_us) / len(later),
        "longest of the first": max(begun),
        "end": end_us,
    }


def main() -> None:
    """Print a row for each number of spans."""
    for n_spans in (30, 100, 200, 300):
        found = measure(n_spans) | compare_writers(n_spans)
        shown = ", ".join(f"{name} {us:.1f} us" for name, us in found.items())
        print(f"{n_spans} spans: {shown}", flush=True)


if __name__ == "__main__":
    main()
