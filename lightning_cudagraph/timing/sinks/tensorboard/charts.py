"""Charts in TensorBoard's tab Custom Scalars, and the times that they show: a line and bands.

That tab has no settings: it colours lines by run alone, and fits the axis to 95 % of the values. So a
chart shows one time of each run, whose band ends above the line of its medians.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.spans import (
    EXPOSED_TAG,
    RANKS_TAG,
    STAGE_TAGS,
    STEP_PARTS,
    STEP_TAG,
    STEP_TIME_TAG,
    TOTAL_TAG,
    Reading,
)
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG
from lightning_cudagraph.timing.readings.step_time import StepTime
from lightning_cudagraph.timing.readings.windows import ReadingWindow
from lightning_cudagraph.timing.sinks.tensorboard.logger_writer import nested_parts
from lightning_cudagraph.timing.sinks.tensorboard.records import behind

_BAND_TAG = "step_band_ms/"
_CATEGORY = "CUDA graph"

# The times that have a band, and the titles of their charts, in order.
_BANDS = {
    TOTAL_TAG: "step on the device",
    **dict(zip(STAGE_TAGS, STEP_PARTS, strict=True)),
    GAP_TAG: "gap before the step",
    f"{STEP_TAG}all_reduce": "all-reduces",
    EXPOSED_TAG: "all-reduces that the step waits for",
}

# TensorBoard fits the axis to less than the highest and the lowest point, and shows nothing of two. So
# the first points come sooner, for short runs.
_FIRST_READINGS, _MOST_READINGS = 10, 50

_LAYOUT_TAG = b"custom_scalars__config__"
# The title of our category between the bytes that are around it in a layout, and in no text.
_OUR_TITLE = b"\n\x0aCUDA graph\x12"
# Layouts of charts stand near the beginning of a file.
_SEARCHED_BYTES = 16 * 2**20


class StepLine(Sink):
    """Sink that shows the mean time of up to fifty steps, beside that of the plain steps.

    The latter is measured once, in long runs on a GPU, and repeated, so that it is a line in a chart.
    Both are from the end of a step to the end of the next, as in the report.
    """

    def __init__(self, pace: StepTime, show: Callable[[Mapping[str, float], int], None]) -> None:
        self._pace = pace
        self._show = show
        self._n_new = 0
        self._n_due = _FIRST_READINGS
        self._step = 0

    def add(self, reading: Reading) -> None:
        self._step = reading.step
        self._n_new += 1
        if self._n_new >= self._n_due:
            self._write()
            self._n_due = min(2 * self._n_due, _MOST_READINGS)

    def close(self) -> None:
        if self._n_new:
            self._write()

    def _write(self) -> None:
        self._n_new = 0
        times_ms = {"replayed": self._pace.since_last_ms(), "eager": self._pace.plain_ms}
        values = {f"{STEP_TIME_TAG}{name}": ms for name, ms in times_ms.items() if ms is not None}
        self._show(values, self._step)


class StepBand(ReadingWindow):
    """Sink that shows percentiles of the step's time and of its stages, window by window.

    The band at the end is that of the last window, with what it shares with the one before.
    """

    def __init__(self, window_steps: int, show: Callable[[Mapping[str, float], int], None]) -> None:
        super().__init__(window_steps)
        self._show = show

    def add(self, reading: Reading) -> None:
        super().add(reading)
        if self.is_all_new:
            self._write()

    def close(self) -> None:
        if self.n_new:
            self._write()

    def _write(self) -> None:
        self.n_new = 0
        summary = self.summary()
        values_ms: dict[str, float] = {}
        for tag in _BANDS:
            # Without the optimizer's step, the whole is the sum of the stages.
            times = summary.step if tag == TOTAL_TAG else summary.times_of(tag)
            if times is not None:
                percentiles_ms = times.p05_ms, times.p50_ms, times.p95_ms
                values_ms |= zip(_band_tags(tag), percentiles_ms, strict=True)
        self._show(values_ms, summary.last_step)


def _band_tags(tag: str) -> list[str]:
    return [f"{_BAND_TAG}{tag.removeprefix(STEP_TAG)}/{name}" for name in ("p05", "p50", "p95")]


def _charts(tags: Collection[str]) -> dict[str, list[str | list[str]]]:
    """Our charts for `SummaryWriter.add_custom_scalars`, of values with these tags (without `behind`).

    TensorBoard merges charts of several runs by title, and shows equal ones once.
    """
    found: dict[str, list[str | list[str]]] = {}
    if any(tag.startswith(STEP_TIME_TAG) for tag in tags):
        # The tags of lines are regular expressions, matched from the beginning.
        lines = rf"{behind(STEP_TIME_TAG)}(replayed|eager)$"
        found["step, replayed and eager [ms]"] = ["Multiline", [lines]]
    # That tab shows bands in reverse.
    for tag, title in reversed(_BANDS.items()):
        low, middle, high = _band_tags(tag)
        if middle in tags:
            band: list[str | list[str]] = ["Margin", [behind(middle), behind(low), behind(high)]]
            found[f"{title} [ms]"] = band
    if f"{RANKS_TAG}work_median" in tags:
        found["work of the ranks: fastest, median, slowest [ms]"] = [
            "Margin",
            [behind(f"{RANKS_TAG}work_{which}") for which in ("median", "fastest", "slowest")],
        ]
    return found


class Charts:
    """The custom scalars of one logger, written again when there are values for another chart.

    TensorBoard shows only the last layout of a run: if the user has written one, there is none of ours.
    """

    def __init__(self) -> None:
        self._written: dict[str, list[str | list[str]]] = {}
        self._has_theirs = False

    def write(self, writer: Any, tags: Collection[str]) -> None:
        ours = _charts(tags)
        if self._has_theirs or ours == self._written:
            return
        if not self._written:
            writer.flush()
            path = getattr(nested_parts(writer)[1], "_file_name", None)
            if isinstance(path, str) and _has_layout_of_user(path):
                self._has_theirs = True
                return
        self._written = ours
        writer.add_custom_scalars({_CATEGORY: ours})


def _has_layout_of_user(path: str) -> bool:
    """True if there are custom scalars at the beginning of an event file, and none of ours."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEARCHED_BYTES)
    except OSError:  # for example a remote file
        return False
    return _LAYOUT_TAG in head and _OUR_TITLE not in head
