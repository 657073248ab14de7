"""Timed parts of a step, and readings of its events: the data of all that shows times.

The events of a step are its marks: points in time on the device. A span lies between two marks, or is
the sum of several such intervals, if a layer is called more than once. A reading is one number for each
mark, from which the times of all spans follow, for many replays at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BACKWARD_TAG",
    "EXPOSED_TAG",
    "FORWARD_TAG",
    "MAX_LAYOUTS",
    "RANKS_TAG",
    "STEP_PARTS",
    "STEP_TAG",
    "TOTAL_TAG",
    "Reading",
    "Span",
    "SpanLayout",
    "Track",
]

FORWARD_TAG = "layer_forward_ms/"
BACKWARD_TAG = "layer_backward_ms/"
STEP_TAG = "step_ms/"
RANKS_TAG = "ranks_ms/"
TOTAL_TAG = f"{STEP_TAG}total"
# The parts that tile a step, in their order.
STEP_PARTS = ("forward", "backward", "host", "clipping", "scaler", "optimizer")
# The part of a step that is only a wait for all-reduces; their own tag has it as well.
EXPOSED_TAG = f"{STEP_TAG}all_reduce_exposed"

# The number of layouts for which prepared objects are cached: most runs have few. Where each step calls
# other layers, they are of no use later, and would grow with the run.
MAX_LAYOUTS = 64

# Where a span is drawn on a timeline.
Track = Literal["forward", "backward", "optimizer", "communication", "copy", "host"]


@dataclass(frozen=True)
class Span:
    """A part of a step that is timed: a stage, a layer in one pass, a kind of collective.

    Attributes:
        tag: its name in TensorBoard, such as ``layer_forward_ms/head``.
        track: where it is drawn on a timeline.
        calls: numbers of the marks at the beginning and at the end of each of its calls.
    """

    tag: str
    track: Track
    calls: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class SpanLayout:
    """The spans of a step that was captured, or run, with one set of marks.

    Attributes:
        spans: in the order in which they are shown. The first mark of the step has number 0.
        n_marks: how many marks there are.
    """

    spans: tuple[Span, ...]
    n_marks: int

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """The tags of the spans."""
        return tuple(span.tag for span in self.spans)

    @cached_property
    def _calls(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Marks at the beginning and at the end of all calls, and where each span's calls begin."""
        calls = [call for span in self.spans for call in span.calls]
        lengths = [len(span.calls) for span in self.spans]
        begins, ends = np.array(calls, np.intp).reshape(-1, 2).T
        return begins, ends, np.cumsum([0, *lengths[:-1]], dtype=np.intp)

    def durations_ms(self, offsets_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """The times of all spans.

        Args:
            offsets_ms: when each mark was passed, in milliseconds after the first; shape
                ``(..., n_marks)``, usually one row for each reading.

        Returns:
            Milliseconds; shape ``(..., len(spans))``. Spans with several calls have their sum.
        """
        if not self.spans:
            return np.zeros((*offsets_ms.shape[:-1], 0))
        begins, ends, firsts = self._calls
        calls_ms = offsets_ms[..., ends] - offsets_ms[..., begins]
        return np.add.reduceat(calls_ms, firsts, axis=-1)


@dataclass(frozen=True)
class Reading:
    """The times of the marks of one step, or of one batch of a step.

    Attributes:
        layout: what the marks mean. Steps that were captured together share it, as an object.
        step: the step as the trainer's loggers count it.
        walltime_s: when it was read, in seconds since the epoch.
        offsets_ms: when each mark was passed, in milliseconds after the first of the step. Marks that
            lie before the step (the end of the step before, the copy of the batch) are negative.
        batch: its place among the batches whose gradients one step of the optimizer takes.
        is_last: it is the last of these.
        waited_ms: how long the host has waited for other processes since the step before, in
            milliseconds.
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
        """The times of the layout's spans, in milliseconds."""
        return self.layout.durations_ms(np.asarray(self.offsets_ms))
