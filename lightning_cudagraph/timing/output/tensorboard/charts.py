"""Charts in TensorBoard's tab Custom Scalars, and the band of step times that one of them shows."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lightning_cudagraph.compat.features import CHARTS
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.timing.output.tables import mostly_members
from lightning_cudagraph.timing.output.tensorboard.logger_writer import innards
from lightning_cudagraph.timing.readings.spans import (
    BACKWARD_TAG,
    EXPOSED_TAG,
    FORWARD_TAG,
    MAX_LAYOUTS,
    RANKS_TAG,
    STEP_PARTS,
    STEP_TAG,
    Reading,
    SpanLayout,
)
from lightning_cudagraph.timing.readings.windows import WindowSummary

__all__ = ["BAND_TAG", "CATEGORY", "Band", "Charts", "StepBand"]

BAND_TAG = "step_band_ms/"
CATEGORY = "CUDA graph"

# All lines of a run have one colour there, and differ only in their markers.
_LAYERS_PER_CHART = 4

_PARTS = (f"{STEP_TAG}forward", f"{STEP_TAG}backward")
_IN_CHART = (*STEP_PARTS, "all_reduce", "copy", "gap")

_LAYOUT_TAG = b"custom_scalars__config__"
# Layouts of charts stand near the beginning of a file.
_SEARCHED_BYTES = 16 * 2**20
# Around the data of a record: its length with a checksum, and the data's checksum.
_HEADER_BYTES, _FOOTER_BYTES = 12, 4


class Band(NamedTuple):
    """Percentiles of the step times of a window.

    Attributes:
        step: the last step of the window.
        values_ms: milliseconds by tag.
    """

    step: int
    values_ms: dict[str, float]


class StepBand:
    """Percentiles of the step's time, window by window.

    Readings without the optimizer's step count only until the first reading with it.
    """

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._times: list[tuple[int, float]] = []  # step and milliseconds
        self._are_whole = False
        self._calls = lru_cache(MAX_LAYOUTS)(_step_calls)

    def add(self, readings: Iterable[Reading]) -> list[Band]:
        """Add readings; return the bands of the windows that they complete."""
        for reading in readings:
            is_whole, calls = self._calls(reading.layout)
            if is_whole and not self._are_whole:
                self._are_whole = True
                self._times.clear()
            if is_whole == self._are_whole:
                offsets_ms = reading.offsets_ms
                time_ms = sum([offsets_ms[end] - offsets_ms[begin] for begin, end in calls])
                self._times.append((reading.step, time_ms))
        bands = []
        while len(self._times) >= self._window_steps:
            bands.append(self._band(self._times[: self._window_steps]))
            del self._times[: self._window_steps]
        return bands

    def rest(self) -> list[Band]:
        """The band of the incomplete window, if it has readings."""
        return [self._band(self._times)] if self._times else []

    def _band(self, window: list[tuple[int, float]]) -> Band:
        percentiles_ms = np.percentile([ms for _, ms in window], (5, 50, 95)).tolist()
        tags = (f"{BAND_TAG}p05", f"{BAND_TAG}p50", f"{BAND_TAG}p95")
        return Band(max(step for step, _ in window), dict(zip(tags, percentiles_ms, strict=True)))


def _step_calls(layout: SpanLayout) -> tuple[bool, list[tuple[int, int]]]:
    """True if the layout includes the optimizer's step, and the marks between which its time lies."""
    by_tag = {span.tag: span.calls for span in layout.spans}
    if (total := by_tag.get(f"{STEP_TAG}total")) is not None:
        return True, list(total)
    return False, [call for tag in _PARTS for call in by_tag.get(tag, ())]


def _slowest(times_ms: Mapping[str, float], prefix: str) -> list[str]:
    """One tag of each of the slowest kinds of layers, in the order of the model.

    Repeated layers, such as ``blocks.0.mlp`` and ``blocks.1.mlp``, are of one kind. Containers are left
    out if members take most of their time.
    """
    of_layers_ms = {tag: ms for tag, ms in times_ms.items() if tag.startswith(prefix)}
    sums = mostly_members(of_layers_ms)
    innermost = [tag for tag in of_layers_ms if tag not in sums]
    kinds: dict[str, list[str]] = {}
    for tag in innermost:
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", tag), []).append(tag)
    # Rounded to a tenth, so that noise does not choose among layers of equal time.
    cost = {
        members[0]: round(10 * math.log(max(sum(times_ms[tag] for tag in members), 1e-6)))
        for members in kinds.values()
    }
    chosen = sorted(cost, key=lambda tag: -cost[tag])[:_LAYERS_PER_CHART]
    return [tag for tag in innermost if tag in chosen]


def _charts(summary: WindowSummary) -> dict[str, dict[str, list[str | list[str]]]]:
    """The layout for `SummaryWriter.add_custom_scalars`.

    TensorBoard merges charts of several runs by title, and shows equal ones once.
    """
    times_ms = {tag: summary[tag].p50_ms for tag in summary.tags}
    # The tags of lines are regular expressions, matched from the beginning.
    found: dict[str, list[str | list[str]]] = {
        "step: p05, p50, p95 [ms]": ["Margin", [f"{BAND_TAG}p50", f"{BAND_TAG}p05", f"{BAND_TAG}p95"]],
        "parts of the step [ms]": [
            "Multiline",
            [rf"{STEP_TAG}({'|'.join(_IN_CHART)})$"],
        ],
    }
    if EXPOSED_TAG in times_ms:  # of several processes
        found["all-reduces, and what of them the step waits for [ms]"] = [
            "Multiline",
            [rf"{STEP_TAG}all_reduce(_exposed)?$"],
        ]
        found["work of the ranks: fastest, median, slowest [ms]"] = [
            "Margin",
            [f"{RANKS_TAG}work_{which}" for which in ("median", "fastest", "slowest")],
        ]
    for way, prefix in (("forward", FORWARD_TAG), ("backward", BACKWARD_TAG)):
        lines: list[str] = [f"{re.escape(tag)}$" for tag in _slowest(times_ms, prefix)]
        if lines:
            found[f"slowest layers, {way} [ms]"] = ["Multiline", lines]
    return {CATEGORY: found}


class Charts:
    """The custom scalars of one logger, written early, and again when the slowest layers are known."""

    def __init__(self) -> None:
        self._written: Any = None

    def write(self, writer: Any, summary: WindowSummary) -> None:
        """Write the layout merged with the user's: TensorBoard shows only the last one of a run."""
        ours = _charts(summary)
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
