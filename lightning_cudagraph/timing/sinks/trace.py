"""Trace files of timed steps, for Perfetto (https://ui.perfetto.dev) or Chrome."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.spans import STEP_TAG, Reading
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG
from lightning_cudagraph.timing.readings.timeline import TICKS_PER_MS, TRACKS, calls_of, step_end

_TICKS_PER_US = TICKS_PER_MS // 1000
_TRACK_NAMES = {
    "host": "gap: waiting for the host",
    "copy": "copy of the batch",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
}
# Thread numbers in the file. Each track has room for rows of overlapping calls.
_STEPS_THREAD = 1
_THREADS_PER_TRACK = 100
# Perfetto identifies threads by their numbers alone, across processes.
_THREADS_PER_RANK = 10_000


def trace_of(readings: Sequence[Reading], title: str = "CUDA graph", rank: int = 0) -> dict[str, Any]:
    """A trace as a JSON object, in the format of Chrome's trace viewer.

    Consecutive steps are placed by the gaps between them, others by the time at which they were read.
    Times are in microseconds. Two calls of one thread are nested or disjoint. The rank distinguishes
    traces of several processes that are opened together.
    """
    base = rank * _THREADS_PER_RANK
    # A process has the number of its first thread, as in Linux; 0 would be the idle process.
    process = steps_thread = base + _STEPS_THREAD
    threads: dict[int, str] = {steps_thread: "steps"}
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, args: Any, thread: int = steps_thread, **more: Any) -> None:
        events.append({"ph": kind, "name": name, "pid": process, "tid": thread, "args": args} | more)

    for reading, origin in zip(readings, _origins(readings), strict=True):
        times_ms = dict(zip(reading.layout.tags, reading.durations_ms.tolist(), strict=True))
        parts_ms = {
            tag.removeprefix(STEP_TAG): round(value_ms, 4)
            for tag, value_ms in times_ms.items()
            if tag.startswith(STEP_TAG)
        }
        ts, dur = origin / _TICKS_PER_US, step_end(reading) / _TICKS_PER_US
        about = {"step": reading.step, "ms": parts_ms}
        add("X", f"step {reading.step}", about, cat="step", ts=ts, dur=dur)
        counted_ms = {part: parts_ms[part] for part in ("total", "gap") if part in parts_ms}
        if counted_ms:
            add("C", "step ms", counted_ms, ts=ts)
        for one in calls_of(reading):
            thread = base + _THREADS_PER_TRACK * (TRACKS.index(one.span.track) + 1)
            thread += min(one.row, _THREADS_PER_TRACK - 1)
            row = f" ({one.row + 1})" if one.row else ""
            threads.setdefault(thread, _TRACK_NAMES[one.span.track] + row)
            ts, dur = (origin + one.begin) / _TICKS_PER_US, (one.end - one.begin) / _TICKS_PER_US
            about = {"step": reading.step, "all calls ms": round(times_ms[one.span.tag], 4)}
            add("X", one.span.name, about, thread, cat=one.span.track, ts=ts, dur=dur)
    host = socket.gethostname()
    add("M", "process_name", {"name": title})
    add("M", "process_labels", {"labels": host})
    add("M", "process_sort_index", {"sort_index": rank})
    for thread, name in sorted(threads.items()):
        add("M", "thread_name", {"name": name}, thread)
        add("M", "thread_sort_index", {"sort_index": thread}, thread)
    return {
        "traceEvents": sorted(events, key=lambda event: event["ph"] != "M"),
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, "hostname": host},
    }


def _origins(readings: Sequence[Reading]) -> list[int]:
    """The beginning of each step, in ticks, with the first gap or copy at 0."""
    origins: list[int] = []
    previous: Reading | None = None
    for reading in readings:
        origin = -min((round(ms * TICKS_PER_MS) for ms in reading.offsets_ms), default=0)
        if previous is not None:
            origin += origins[-1] + step_end(previous)
            if GAP_TAG not in reading.layout.tags or reading.step - previous.step > 1:
                apart_ticks = round((reading.walltime_s - previous.walltime_s) * 1000 * TICKS_PER_MS)
                origin = max(origin, origins[-1] + apart_ticks)
        origins.append(origin)
        previous = reading
    return origins


def write_trace(path: str | Path, readings: Sequence[Reading], title: str, rank: int) -> None:
    """Write a trace file atomically: whole, or not at all if it cannot be written."""
    path = Path(path)
    text = json.dumps(trace_of(readings, title, rank), separators=(",", ":"))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class TraceWriter(Sink):
    """Sink that keeps the last timed steps, and writes them as a trace file at the end.

    The path is asked for when the file is written; its folder is created.
    """

    def __init__(
        self, where: Callable[[], Path], n_readings: int, title: str = "CUDA graph", rank: int = 0
    ) -> None:
        self._where = where
        self._readings: deque[Reading] = deque(maxlen=n_readings)
        self._title = title
        self._rank = rank

    @property
    def path(self) -> Path:
        return self._where()

    def add(self, reading: Reading) -> None:
        self._readings.append(reading)

    def close(self) -> None:
        readings = list(self._readings)
        self._readings.clear()
        if not readings:
            return
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(path, readings, self._title, self._rank)
        except OSError as error:
            warnings.warn(
                f"The trace of the last {len(readings)} timed steps was not written: {error}. Make room"
                f" or another folder for {str(path)!r}, or pass `LayerTimings(trace_steps=0)`."
                " Training is not concerned.",
                RuntimeWarning,
                stacklevel=2,
            )
