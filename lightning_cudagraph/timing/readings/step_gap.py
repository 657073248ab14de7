"""Copy and gap: the time between the previous step's end and a timed step's beginning.

Timed by ordinary events on the stream of the replays, which are recorded only around timed steps.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_cudagraph.device.backend import Event
from lightning_cudagraph.timing.readings.spans import STEP_TAG, Span, SpanLayout

COPY_TAG = f"{STEP_TAG}copy"
GAP_TAG = f"{STEP_TAG}gap"


class StepGap:
    """The events before one timed step, in order; a context around each copy of its batch.

    `passed` returns a new event, recorded at this point. There is no `previous_end` if something else
    than a replay came before.
    """

    def __init__(self, passed: Callable[[], Event], previous_end: Event | None) -> None:
        self._passed = passed
        self._has_gap = previous_end is not None
        self.events: list[Event] = [] if previous_end is None else [previous_end]

    def __enter__(self) -> None:
        self._copy_begin = self._passed()

    def __exit__(self, *error: object) -> None:
        self.events += (self._copy_begin, self._passed())

    @property
    def kind(self) -> tuple[bool, int]:
        """The arguments of `with_lead_in`: True if there is a gap, and the number of events."""
        return self._has_gap, len(self.events)


def with_lead_in(step: SpanLayout, has_gap: bool, n_events: int) -> SpanLayout:
    """The layout of a step, extended by `n_events` marks before it.

    The first of these is the end of the previous step, if there is a gap.
    """
    numbers = list(range(step.n_marks, step.n_marks + n_events))
    copied = numbers[1:] if has_gap else numbers
    copies = tuple(zip(copied[::2], copied[1::2], strict=True))
    spans = list(step.spans)
    if copies:
        spans.append(Span(COPY_TAG, "copy", copies))
    if has_gap:
        # The time between the two steps without the copies. The step's first mark has number 0.
        begins = (numbers[0], *(end for _, end in copies))
        ends = (*(begin for begin, _ in copies), 0)
        spans.append(Span(GAP_TAG, "host", tuple(zip(begins, ends, strict=True))))
    return SpanLayout(tuple(spans), step.n_marks + n_events)
