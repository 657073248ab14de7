"""Spans of a step, and readings of its marks: the data for all displays of times.

Marks are points in time on the device, one for each event. A span is an interval between two marks, or
several such intervals if a layer is called more than once. A reading has one number for each mark, from
which the times of all spans follow, for many replays at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

FORWARD_TAG = "layer_forward_ms/"
BACKWARD_TAG = "layer_backward_ms/"
STEP_TAG = "step_ms/"
# On the host, from the end of a step to the end of the next.
STEP_TIME_TAG = "step_time_ms/"
RANKS_TAG = "ranks_ms/"
TOTAL_TAG = f"{STEP_TAG}total"
# The stages that tile a step, in order.
Stage = Literal["forward", "backward", "host", "clipping", "scaler", "optimizer"]
STEP_PARTS: tuple[str, ...] = get_args(Stage)
# Those after the backward pass, which tables and timelines show as one.
OF_OPTIMIZER = ("clipping", "scaler", "optimizer")
STAGE_TAGS = tuple(STEP_TAG + part for part in STEP_PARTS)
# The step's wait for all-reduces, which is also in the time of the all-reduces themselves.
EXPOSED_TAG = f"{STEP_TAG}all_reduce_exposed"

# The size of caches by layout. Most runs have few layouts; if each step calls other layers, old entries
# are useless, and the cache must not grow with the run.
MAX_LAYOUTS = 64

# The track of a timeline on which a span is drawn.
Track = Literal["forward", "backward", "optimizer", "communication", "copy", "host"]


@dataclass(frozen=True)
class Span:
    """A timed part of a step: a stage, a layer in one pass, a kind of collective.

    The tag is its name in TensorBoard, such as ``layer_forward_ms/head``; `calls` are the begin and end
    mark of each of its calls.
    """

    tag: str
    track: Track
    calls: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """The tag without its group."""
        return self.tag.partition("/")[2]


@dataclass(frozen=True, eq=False)
class SpanLayout:
    """The spans of a captured or eager step in display order, over its marks.

    The step's first mark has number 0.
    """

    spans: tuple[Span, ...]
    n_marks: int

    @cached_property
    def tags(self) -> tuple[str, ...]:
        return tuple(span.tag for span in self.spans)

    @cached_property
    def _calls(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Begin and end marks of all calls, and the index of each span's first call."""
        calls = [call for span in self.spans for call in span.calls]
        lengths = [len(span.calls) for span in self.spans]
        begins, ends = np.array(calls, np.intp).reshape(-1, 2).T
        return begins, ends, np.cumsum([0, *lengths[:-1]], dtype=np.intp)

    def durations_ms(self, offsets_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """The times of all spans, shape ``(..., len(spans))``; spans with several calls have their sum.

        The marks' offsets have the shape ``(..., n_marks)``, usually one row for each reading.
        """
        if not self.spans:
            return np.zeros((*offsets_ms.shape[:-1], 0))
        begins, ends, firsts = self._calls
        calls_ms = offsets_ms[..., ends] - offsets_ms[..., begins]
        return np.add.reduceat(calls_ms, firsts, axis=-1)


@dataclass(frozen=True)
class Reading:
    """The times of the marks of one step, or of one micro-batch of an optimizer step.

    Attributes:
        layout: the spans over the marks; one object for replays of one graph.
        step: as the trainer's loggers count it.
        offsets_ms: times of the marks after the step's first. Those of marks before the step (the
            previous step's end, the copy of the batch) are negative.
        batch: index of the micro-batch in its accumulation window.
        waited_ms: the host's wait for other processes since the previous step.
    """

    layout: SpanLayout
    step: int
    walltime_s: float
    offsets_ms: list[float]
    batch: int = 0
    is_last: bool = True
    waited_ms: float = 0.0

    @property
    def durations_ms(self) -> NDArray[np.float64]:
        return self.layout.durations_ms(np.asarray(self.offsets_ms))
