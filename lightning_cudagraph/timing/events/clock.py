"""The clock of a fit: which steps are timed, and when their events are read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

from lightning_cudagraph.device.backend import Backend, Event
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.readings.lead_in import LeadIn, with_lead_in
from lightning_cudagraph.timing.readings.sinks import Sink, Sinks
from lightning_cudagraph.timing.readings.spans import MAX_LAYOUTS, Reading

__all__ = ["FitClock"]


class _Unread(NamedTuple):
    """A timed step whose events have not been read yet.

    Attributes:
        marks: its events.
        lead_in: those before it.
        step: its number as the trainer's loggers count it.
        ended: an event of its own behind it. Of one that a graph sets, nothing can be asked before its
            first replay has come to it.
        owned: events that are free when it has been read.
        batch: its place among the batches of a step of the optimizer.
        is_last: it is the last of these.
        waited_ms: how long the host has waited for other processes before it.
    """

    marks: StepMarks
    lead_in: LeadIn
    step: int
    ended: Event
    owned: list[Event]
    batch: int
    is_last: bool
    waited_ms: float


class FitClock:
    """Decides which steps are timed, reads their events, and passes the readings on.

    The host does not wait for the device: events are read when their step is known to have ended, which
    is looked at after later steps. At the latest they are read before a replay that would set them
    again; with two graphs that alternate, another one is queued then, so that the device never waits.

    Args:
        backend: where the steps run.
        sinks: destinations of the readings.
        every_n_steps: the last of so many steps of the optimizer is timed, with all batches whose
            gradients they take; 0 for none.
        waited_s: tells how long the host has waited for other processes so far, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        sinks: Sequence[Sink],
        every_n_steps: int,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._backend = backend
        self._sinks = Sinks(sinks)
        self._every_n_steps = every_n_steps
        self._waited_s = waited_s
        self._waited_before_s = 0.0  # the step that comes next
        self._layout_of = lru_cache(MAX_LAYOUTS)(with_lead_in)
        # Preparing to read some events takes longer than reading them, and they come again.
        self._event_times = lru_cache(MAX_LAYOUTS)(backend.event_times)
        self._unread: deque[_Unread] = deque()
        # Events that have been read, to be used again: making one takes longer than marking it.
        self._free: list[Event] = []
        # What lies before the step that comes next, if that one is to be timed.
        self._lead_in: LeadIn | None = None

    def is_due(self, optimizer_step: int) -> bool:
        """True if the step of the optimizer after so many others is timed."""
        n = self._every_n_steps
        # The step that Lightning logs, if it logs as often, and not the one behind it: reading the
        # values waits for the device, which then has nothing to do while a timed step is launched.
        return n == 1 or (n > 1 and (optimizer_step + 1) % n == 0)

    def copying(self) -> AbstractContextManager[None]:
        """A context for the copy of the batch of a step that is due."""
        if self._lead_in is None:
            self._lead_in = LeadIn(self._passed, None)
        return self._lead_in

    def upcoming(self, marks: StepMarks | None) -> None:
        """Read the events of a graph: it is to be replayed now, which sets them again."""
        while any(unread.marks is marks for unread in self._unread):
            self._await_first()

    def ended(
        self,
        marks: StepMarks | None,
        step: int,
        is_next_due: bool,
        batch: int = 0,
        is_last: bool = True,
    ) -> None:
        """A step that can be timed has been launched.

        Args:
            marks: its events, or None if it was not timed.
            step: its number as the trainer's loggers count it.
            is_next_due: the step that comes next is to be timed.
            batch: its place among the batches whose gradients one step of the optimizer takes.
            is_last: it is the last of these.
        """
        while self._unread and self._unread[0].ended.query():
            self._read_first()
        if marks is None and not is_next_due:
            self._lead_in = None
            return
        end = self._passed()
        waited_s = self._waited_s()
        if marks is not None:
            lead_in = self._lead_in or LeadIn(self._passed, None)
            owned = lead_in.events if is_next_due else [*lead_in.events, end]
            waited_ms = 1e3 * (waited_s - self._waited_before_s)
            self._unread.append(_Unread(marks, lead_in, step, end, owned, batch, is_last, waited_ms))
        self._waited_before_s = waited_s
        self._lead_in = LeadIn(self._passed, end) if is_next_due else None

    def interrupted(self) -> None:
        """Something else than a step that can be timed comes before the next one, which has no gap."""
        self._lead_in = None

    def pause(self) -> None:
        """Something that is not a training step comes now (validation, a checkpoint)."""
        self.interrupted()
        self._sinks.pause()

    def finish(self) -> None:
        """No more steps come: read what is left to read, waiting for it."""
        while self._unread:
            self._await_first()

    def close(self) -> None:
        """Close the sinks; events that have not been read are left alone."""
        self._unread.clear()
        self.interrupted()
        self._sinks.close()

    def _passed(self) -> Event:
        event = self._free.pop() if self._free else self._backend.event()
        self._backend.mark(event)
        return event

    def _await_first(self) -> None:
        # Of the step as a whole: marks may lie on several streams.
        self._unread[0].ended.synchronize()
        self._read_first()

    def _read_first(self) -> None:
        marks, lead_in, step, _, owned, batch, is_last, waited_ms = self._unread.popleft()
        offsets_ms = marks.read() + self._before_ms(lead_in, marks.start)
        layout = self._layout_of(marks.layout, *lead_in.kind)
        reading = Reading(layout, step, time.time(), offsets_ms, batch, is_last, waited_ms)
        self._free += owned
        self._sinks.add(reading)

    def _before_ms(self, lead_in: LeadIn, start: Event) -> list[float]:
        """The times of the events before a step, in milliseconds after its start: negative ones."""
        if not lead_in.events:
            return []
        *times_ms, start_ms = self._event_times((*lead_in.events, start))()
        return [time_ms - start_ms for time_ms in times_ms]
