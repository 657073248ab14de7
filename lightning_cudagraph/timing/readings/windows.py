"""Statistics of a window of readings: mean, percentiles and share of each span."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.spans import (
    STAGE_TAGS,
    STEP_TAG,
    TOTAL_TAG,
    Reading,
    SpanLayout,
)
from lightning_cudagraph.timing.readings.step_gap import COPY_TAG, GAP_TAG

# The spans between two steps.
_BETWEEN = (GAP_TAG, COPY_TAG)


@dataclass(frozen=True)
class Times:
    """Statistics of one span over the `count` readings of a window that have it.

    The share is the median divided by the median of the step's time, 0 if that is unknown: ratios of
    medians are robust against outliers. For gap and copy, the divisor is the time from the end of a step
    to the end of the next.
    """

    count: int
    mean_ms: float
    p05_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    share: float


class WindowSummary:
    """Statistics of all spans over some readings.

    The readings may have several layouts: accumulation phases differ, and a step may be re-captured.
    Spans are joined by tag, each over the readings that have it. So a span that a new capture lacks
    stays until its last reading leaves the window.

    Attributes:
        tags: of all spans, in display order.
        durations_ms: a row for each reading and a column for each tag; NaN if the reading lacks the tag.
        waited_ms: the host's wait for other processes before each reading's step.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.n_readings = len(readings)
        self.waited_ms = np.array([reading.waited_ms for reading in readings])
        self.first_step = readings[0].step if readings else 0
        self.last_step = readings[-1].step if readings else 0
        self._offsets_ms: dict[SpanLayout, NDArray[np.float64]] = {}
        rows: dict[SpanLayout, list[int]] = {}
        for row, reading in enumerate(readings):
            rows.setdefault(reading.layout, []).append(row)
        self._newest_first = sorted(rows, key=lambda layout: -rows[layout][-1])
        # The order is that of the layout with the most spans; further spans of others follow.
        columns: dict[str, int] = {}
        for layout in sorted(self._newest_first, key=lambda layout: -len(layout.spans)):
            for tag in layout.tags:
                columns.setdefault(tag, len(columns))
        self.tags = tuple(columns)
        self.durations_ms = np.full((len(readings), len(columns)), np.nan)
        for layout, of_layout in rows.items():
            offsets_ms = np.array([readings[row].offsets_ms for row in of_layout], np.float64)
            self._offsets_ms[layout] = offsets_ms
            places = [columns[tag] for tag in layout.tags]
            self.durations_ms[np.ix_(of_layout, places)] = layout.durations_ms(offsets_ms)
        self._columns = columns

    def __contains__(self, tag: str) -> bool:
        return tag in self._columns

    def __getitem__(self, tag: str) -> Times:
        return self.times[tag]

    def get(self, tag: str) -> Times | None:
        """The statistics of one span; None if no reading has it."""
        return self.times.get(tag)

    def series_ms(self, *tags: str) -> NDArray[np.float64]:
        """The sum of some spans in each reading: missing ones count as 0; NaN if all are missing."""
        columns = self.durations_ms[:, [self._columns[tag] for tag in tags if tag in self._columns]]
        missing = np.isnan(columns)
        return np.where(missing.all(axis=1), np.nan, np.where(missing, 0.0, columns).sum(axis=1))

    def times_of(self, *tags: str) -> Times | None:
        """The statistics of a sum of spans; None if no reading has any of them."""
        return column_times(self.series_ms(*tags)[:, None], self.step_ms)[0]

    @cached_property
    def step_ms(self) -> NDArray[np.float64]:
        """The time of each reading's step, without the gap before it; NaN if unknown."""
        total_ms = self.series_ms(TOTAL_TAG)
        # A step that ends with the backward pass has no tag for the whole.
        return np.where(np.isnan(total_ms), self.series_ms(*STAGE_TAGS), total_ms)

    @cached_property
    def step(self) -> Times | None:
        return column_times(self.step_ms[:, None], self.step_ms)[0]

    @cached_property
    def _period_ms(self) -> NDArray[np.float64]:
        before_ms = np.where(
            np.isnan(self.series_ms(GAP_TAG)), np.nan, self.series_ms(GAP_TAG, COPY_TAG)
        )
        # NaN without a total: if the optimizer steps eagerly after the replay, no span has its time.
        return before_ms + self.series_ms(TOTAL_TAG)

    @cached_property
    def period(self) -> Times | None:
        """The statistics of the times from the end of a step to the end of the next; None if unknown."""
        return column_times(self._period_ms[:, None], self._period_ms)[0]

    @cached_property
    def waited(self) -> Times | None:
        """The part of the gaps before steps that is a wait for other processes."""
        waited_ms = np.minimum(self.waited_ms, self.series_ms(GAP_TAG))
        return column_times(waited_ms[:, None], self._period_ms)[0]

    @cached_property
    def times(self) -> dict[str, Times]:
        if not self.n_readings:
            return {}
        times = column_times(self.durations_ms, self.step_ms)
        for column, tag in enumerate(self.tags):
            if tag in _BETWEEN:
                [times[column]] = column_times(self.durations_ms[:, [column]], self._period_ms)
        return {tag: found for tag, found in zip(self.tags, times, strict=True) if found is not None}

    def typical(self) -> Reading | None:
        """A reading with the median offset of each mark; None if there is no reading.

        Medians keep the order of marks, so nested spans stay nested. The layout is the newest with an
        optimizer step, or the newest of all if none has one.
        """
        layouts = self._newest_first
        if not layouts:
            return None
        optimizer = f"{STEP_TAG}optimizer"
        layout = next((layout for layout in layouts if optimizer in layout.tags), layouts[0])
        offsets_ms = np.median(self._offsets_ms[layout], axis=0).tolist()
        return Reading(layout, self.last_step, 0.0, offsets_ms)


def column_times(durations_ms: NDArray[np.float64], whole_ms: NDArray[np.float64]) -> list[Times | None]:
    """The statistics of each column (a row for each reading); None for columns without a number.

    Shares are of `whole_ms` of each reading, which is NaN if unknown.
    """
    present = ~np.isnan(durations_ms)
    # Columns that are present in the same readings are computed together; there are about as many such
    # groups as layouts.
    groups: dict[bytes, list[int]] = {}
    for column, pattern in enumerate(np.packbits(present, axis=0).T):
        groups.setdefault(pattern.tobytes(), []).append(column)
    times: list[Times | None] = [None] * durations_ms.shape[1]
    for columns in groups.values():
        rows = present[:, columns[0]]
        if not rows.any():
            continue
        values_ms = durations_ms[rows][:, columns]
        p05_ms, p50_ms, p95_ms = np.percentile(values_ms, [5, 50, 95], axis=0)
        # Both medians are over the readings with a known whole.
        known = ~np.isnan(whole_ms[rows])
        shares = np.zeros(len(columns))
        if known.any() and (median_ms := np.median(whole_ms[rows][known])) > 0:
            shares = np.median(values_ms[known], axis=0) / median_ms
        numbers = np.stack(
            [values_ms.mean(axis=0), p05_ms, p50_ms, p95_ms, values_ms.max(axis=0), shares], axis=1
        )
        for column, row in zip(columns, numbers.tolist(), strict=True):
            times[column] = Times(len(values_ms), *row)
    return times


class ReadingWindow(Sink):
    """Sink that keeps the last readings, after its close too.

    `n_new` of them have not been shown yet; those who show them reset it.
    """

    def __init__(self, size: int = 200) -> None:
        self._readings: deque[Reading] = deque(maxlen=size)
        self.n_new = 0

    def __len__(self) -> int:
        return len(self._readings)

    def add(self, reading: Reading) -> None:
        self._readings.append(reading)
        self.n_new += 1

    @property
    def is_all_new(self) -> bool:
        return self.n_new >= (self._readings.maxlen or 0)

    def summary(self) -> WindowSummary:
        return WindowSummary(self._readings)
