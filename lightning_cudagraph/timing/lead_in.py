"""What lies between a timed step and the one before it: the copy of its batch, and the gap.

Timed by ordinary events on the stream of the replays, which are recorded only around timed steps.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_cudagraph.capture.backend import Backend, Event
from lightning_cudagraph.timing.kept import kept
from lightning_cudagraph.timing.spans import STEP_TAG, Span, SpanLayout

__all__ = ["COPY_TAG", "GAP_TAG", "Layouts", "LeadIn", "LeadInTimes"]

COPY_TAG = f"{STEP_TAG}copy"
GAP_TAG = f"{STEP_TAG}gap"


class LeadIn:
    """The events before one timed step. Entered around each copy of its batch.

    Args:
        passed: a new event, which marks this point.
        previous_end: the end of the step before, or None if something else than a replay came before.

    Attributes:
        events: all of them, in their order.
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
        """Whether there is a step before, and how many events there are."""
        return self._has_gap, len(self.events)


class LeadInTimes:
    """Reads when the events before timed steps were passed.

    Args:
        backend: where they were marked.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # To prepare the reading of some events takes longer than to read them, and steps take turns with
        # the same ones.
        self._readers: dict[tuple[Event, ...], Callable[[], list[float]]] = {}

    def offsets_ms(self, lead_in: LeadIn, start: Event) -> list[float]:
        """In milliseconds after the start of the step: before it."""
        if not lead_in.events:
            return []
        events = (*lead_in.events, start)
        reader = kept(self._readers, events, lambda: self._backend.event_times(events))
        *times_ms, start_ms = reader()
        return [time_ms - start_ms for time_ms in times_ms]


class Layouts:
    """The layouts of steps with what lies before them; each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[SpanLayout, tuple[bool, int]], SpanLayout] = {}

    def of(self, step: SpanLayout, lead_in: LeadIn) -> SpanLayout:
        """The layout of a step whose marks are followed by those of its lead-in.

        Args:
            step: the layout of the step itself.
            lead_in: what lies before it.
        """
        kind = lead_in.kind
        return kept(self._made, (step, kind), lambda: _with_lead_in(step, *kind))


def _with_lead_in(step: SpanLayout, has_gap: bool, n_events: int) -> SpanLayout:
    numbers = list(range(step.n_marks, step.n_marks + n_events))
    copied = numbers[1:] if has_gap else numbers
    copies = tuple(zip(copied[::2], copied[1::2], strict=True))
    spans = list(step.spans)
    if copies:
        spans.append(Span(COPY_TAG, "copy", copies))
    if has_gap:
        # What is left between the step before and this one, whose first mark has number 0.
        begins = (numbers[0], *(end for _, end in copies))
        ends = (*(begin for begin, _ in copies), 0)
        spans.append(Span(GAP_TAG, "host", tuple(zip(begins, ends, strict=True))))
    return SpanLayout(tuple(spans), step.n_marks + n_events)
