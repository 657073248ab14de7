"""What it costs the training loop to have the times of each step written to TensorBoard.

    python -m benchmarks.bulk_writing

The readings are made beforehand; what is measured is what happens to them on the loop's thread, while
TensorBoard's own thread writes. Between two readings there is a pause as between steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_cudagraph.timing.spans import FORWARD_TAG, STEP_TAG, Reading, Span, SpanLayout
from lightning_cudagraph.timing.tensorboard import TensorBoardWriter

__all__ = ["measure"]

_STEP_S = 0.5e-3
_FIRST = 200


def _layout(n_spans: int) -> SpanLayout:
    whole = Span(f"{STEP_TAG}total", "host", ((0, n_spans),))
    layers = (
        Span(f"{FORWARD_TAG}model.blocks.{i}.attention", "forward", ((i, i + 1),))
        for i in range(n_spans - 1)
    )
    return SpanLayout((whole, *layers), n_spans + 1)


def measure(n_spans: int, n_readings: int = 2000) -> dict[str, float]:
    """Write readings, and time it.

    Args:
        n_spans: how many times each reading has.
        n_readings: how many readings.

    Returns:
        Microseconds: of an `add` that only appends (median), and of all adds together, for each reading;
        of the longest one; all these from the 200th reading on, and without the time in which the thread
        did not run, because the machine had other things to do. And of the longest one before, which
        makes the templates and looks for charts of the user's, and of the end.
    """
    layout = _layout(n_spans)
    offsets_ms = np.cumsum(np.random.default_rng(0).random((n_readings, layout.n_marks)), axis=1)
    readings = [Reading(layout, step, time.time(), row) for step, row in enumerate(offsets_ms.tolist())]
    with tempfile.TemporaryDirectory() as folder:
        logger = TensorBoardLogger(folder)
        logger.log_metrics({"loss": 0.0}, 0)  # the logger's writer is there before the first step ends
        writer = TensorBoardWriter([logger])
        adds_us, busy_us = [], []
        for reading in readings:
            started_s, started_ns = time.perf_counter(), time.thread_time_ns()
            writer.add(reading)
            ended_ns, ended_s = time.thread_time_ns(), time.perf_counter()
            adds_us.append((ended_s - started_s) * 1e6)
            busy_us.append((ended_ns - started_ns) / 1e3)
            while time.perf_counter() < ended_s + _STEP_S:
                pass
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
        "longest of the first": max(begun),
        "end": end_us,
    }


def main() -> None:
    """Print a row for each number of spans."""
    for n_spans in (30, 100, 200, 300):
        shown = ", ".join(f"{name} {us:.1f} us" for name, us in measure(n_spans).items())
        print(f"{n_spans} spans: {shown}", flush=True)


if __name__ == "__main__":
    main()
