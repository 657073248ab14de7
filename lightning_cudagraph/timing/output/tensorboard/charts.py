"""Charts in TensorBoard's tab Custom Scalars, and the bands of times that they show.

That tab has no settings: it colours lines by run alone, and fits the axis to 95 % of the values. So a
chart shows one time of each run, whose band ends above the line of its medians.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_cudagraph.compat.features import CHARTS
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.timing.output.tensorboard.curves import behind
from lightning_cudagraph.timing.output.tensorboard.logger_writer import innards
from lightning_cudagraph.timing.readings.spans import (
    EXPOSED_TAG,
    MAX_LAYOUTS,
    RANKS_TAG,
    STEP_PARTS,
    STEP_TAG,
    STEP_TIME_TAG,
    TOTAL_TAG,
    Reading,
    Span,
    SpanLayout,
)
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG

__all__ = ["BAND_TAG", "CATEGORY", "Band", "Charts", "StepBand"]

BAND_TAG = "step_band_ms/"
CATEGORY = "CUDA graph"

# The times that have a band, and the titles of their charts, in order.
_BANDS = {
    TOTAL_TAG: "step on the device",
    **{f"{STEP_TAG}{part}": part for part in STEP_PARTS},
    GAP_TAG: "gap before the step",
    f"{STEP_TAG}all_reduce": "all-reduces",
    EXPOSED_TAG: "all-reduces that the step waits for",
}

_PARTS = {f"{STEP_TAG}{part}" for part in STEP_PARTS}

_LAYOUT_TAG = b"custom_scalars__config__"
# Layouts of charts stand near the beginning of a file.
_SEARCHED_BYTES = 16 * 2**20
# Around the data of a record: its length with a checksum, and the data's checksum.
_HEADER_BYTES, _FOOTER_BYTES = 12, 4


class Band(NamedTuple):
    """Percentiles of the times of a window.

    Attributes:
        step: the last step of the window.
        values_ms: milliseconds by tag.
    """

    step: int
    values_ms: dict[str, float]


class StepBand:
    """Percentiles of the step's time and of its stages, window by window.

    Readings without the optimizer's step count only until the first reading with it.
    """

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._readings: list[Reading] = []
        self._are_whole = False
        self._stages = lru_cache(MAX_LAYOUTS)(_stages)

    def add(self, readings: Iterable[Reading]) -> list[Band]:
        """Add readings; return the bands of the windows that they complete."""
        for reading in readings:
            is_whole = TOTAL_TAG in reading.layout.tags
            if is_whole and not self._are_whole:
                self._are_whole = True
                self._readings.clear()
            if is_whole == self._are_whole:
                self._readings.append(reading)
        bands = []
        while len(self._readings) >= self._window_steps:
            bands.append(self._band(self._readings[: self._window_steps]))
            del self._readings[: self._window_steps]
        return bands

    def rest(self) -> list[Band]:
        """The band of the incomplete window, if it has readings."""
        return [self._band(self._readings)] if self._readings else []

    def _band(self, window: list[Reading]) -> Band:
        by_stages: dict[_Stages, list[Sequence[float]]] = {}
        for reading in window:
            stages = self._stages(reading.layout)
            by_stages.setdefault(stages, []).append(stages.marks_of(reading.offsets_ms))
        times_ms: dict[str, list[NDArray[np.float64]]] = {}
        for stages, offsets_ms in by_stages.items():
            durations_ms = stages.layout.durations_ms(np.array(offsets_ms))
            for tag, of_tag in zip(stages.layout.tags, durations_ms.T, strict=True):
                times_ms.setdefault(tag, []).append(of_tag)
        values_ms: dict[str, float] = {}
        for tag, parts in times_ms.items():
            percentiles_ms = np.percentile(np.concatenate(parts), (5, 50, 95)).tolist()
            values_ms |= dict(zip(_band_tags(tag), percentiles_ms, strict=True))
        return Band(max(reading.step for reading in window), values_ms)


class _Stages(NamedTuple):
    """The spans of a layout that have a band, over no more marks than these need."""

    layout: SpanLayout
    marks_of: Callable[[Sequence[float]], Sequence[float]]


def _stages(layout: SpanLayout) -> _Stages:
    """Reduce a layout; without the optimizer's step, the whole is the sum of the stages."""
    spans = [span for span in layout.spans if span.tag in _BANDS]
    if TOTAL_TAG not in layout.tags:
        calls = [call for span in spans if span.tag in _PARTS for call in span.calls]
        spans += [Span(TOTAL_TAG, "host", tuple(calls))] if calls else []
    marks = sorted({mark for span in spans for call in span.calls for mark in call})
    place = {mark: number for number, mark in enumerate(marks, start=2)}
    reduced = tuple(
        replace(span, calls=tuple((place[begin], place[end]) for begin, end in span.calls))
        for span in spans
    )
    # Of fewer than two, `itemgetter` gives no tuple.
    return _Stages(SpanLayout(reduced, 2 + len(marks)), itemgetter(0, 0, *marks))


def _band_tags(tag: str) -> list[str]:
    """The tags of the percentiles of a span, from the lowest to the highest."""
    return [f"{BAND_TAG}{tag.removeprefix(STEP_TAG)}/{name}" for name in ("p05", "p50", "p95")]


def _charts(tags: Collection[str]) -> dict[str, dict[str, list[str | list[str]]]]:
    """The layout for `SummaryWriter.add_custom_scalars`.

    TensorBoard merges charts of several runs by title, and shows equal ones once.

    Args:
        tags: of all values that are written, as they are without `behind`.
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
    return {CATEGORY: found}


class Charts:
    """The custom scalars of one logger, written again when there are values for another chart."""

    def __init__(self) -> None:
        self._written: Any = None

    def write(self, writer: Any, tags: Collection[str]) -> None:
        """Write the layout merged with the user's: TensorBoard shows only the last one of a run."""
        ours = _charts(tags)
        if ours == self._written:
            return
        self._written = ours
        writer.flush()
        path = getattr(innards(writer)[1], "_file_name", None) if available(CHARTS) else None
        theirs = _charts_in(path) if isinstance(path, str) else None
        if theirs is None:
            writer.add_custom_scalars(ours)
            return
        from torch.utils.tensorboard.summary import custom_scalars

        written = custom_scalars(ours)
        tensor = written.value[0].tensor
        merged = type(theirs)(category=[c for c in theirs.category if c.title != CATEGORY])
        merged.MergeFromString(tensor.string_val[0])
        tensor.string_val[0] = merged.SerializeToString()
        writer.file_writer.add_summary(written)


def _charts_in(path: str) -> Any:
    """The custom scalars at the beginning of an event file, or None."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEARCHED_BYTES)
    except OSError:  # for example a remote file
        return None
    if _LAYOUT_TAG not in head:
        return None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # type: ignore[attr-defined]

    found, begin = None, 0
    while begin + _HEADER_BYTES <= len(head):
        (length,) = struct.unpack_from("<Q", head, begin)
        record = head[begin + _HEADER_BYTES : begin + _HEADER_BYTES + length]
        begin += _HEADER_BYTES + length + _FOOTER_BYTES
        if _LAYOUT_TAG in record and len(record) == length:
            try:
                for value in Event.FromString(record).summary.value:
                    if value.tag == _LAYOUT_TAG.decode() and value.tensor.string_val:
                        found = Layout.FromString(value.tensor.string_val[0])
            except DecodeError:  # the file is damaged
                return found
    return found
