"""The clock of a fit: selection of the steps that are timed, and reads of their events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from time import perf_counter
from time import time as now_s
from typing import NamedTuple

from lightning_cudagraph.device.backend import Backend, Event
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.readings.sink import Sink, Sinks
from lightning_cudagraph.timing.readings.spans import MAX_LAYOUTS, Reading
from lightning_cudagraph.timing.readings.step_gap import StepGap, with_lead_in


class _Unread(NamedTuple):
    """A timed step whose events have not been read yet.

    The event `ended` comes after the step, and is an ordinary one: an event in a graph cannot be queried
    before the first replay has reached it. The events in `owned` are reused once the step has been read.
    """

    marks: StepMarks
    lead_in: StepGap
    step: int
    ended: Event
    owned: list[Event]
    batch: int
    is_last: bool
    waited_ms: float


class FitClock:
    """The clock of a fit: it selects the steps to time, and passes their readings to the sinks.

    The host does not wait for the device. After each step, the events of earlier steps that have ended
    are read; at the latest, events are read before a replay that would set them again. With two graphs
    in turn, the other graph is queued at that moment, so that the device does not wait either.

    Args:
        every_n_steps: one in so many optimizer steps is timed, with all its micro-batches; 0 for none.
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
        self.every_n_steps = every_n_steps
        self._waited_s = waited_s
        self._waited_before_s = 0.0  # before the next step
        self.device_waits_s = 0.0
        self._layout_of = lru_cache(MAX_LAYOUTS)(with_lead_in)
        # Preparing a read takes longer than the read, and the same events are read again and again.
        self._event_times = lru_cache(MAX_LAYOUTS)(backend.event_times)
        self._unread: deque[_Unread] = deque()
        # Events to reuse: creating one takes longer than recording it.
        self._free: list[Event] = []
        # The events before the next step, if that one is to be timed.
        self._lead_in: StepGap | None = None

    def is_due(self, optimizer_step: int) -> bool:
        """True if an optimizer step is timed, by the number of those before it."""
        n = self.every_n_steps
        # The step that Lightning logs, if it logs as often, and not the one after it: Lightning's read
        # of the logged values waits for the device, so that the next step is launched on an idle one.
        return n == 1 or (n > 1 and (optimizer_step + 1) % n == 0)

    def copying(self) -> AbstractContextManager[None]:
        """Context for the copy of the batch of a step that is due."""
        if self._lead_in is None:
            self._lead_in = StepGap(self._passed, None)
        return self._lead_in

    def upcoming(self, marks: StepMarks | None) -> None:
        """Read the events of a graph before its replay, which sets them again."""
        while any(unread.marks is marks for unread in self._unread):
            self._await_first()

    def ended(
        self, marks: StepMarks | None, step: int, is_next_due: bool, batch: int = 0, is_last: bool = True
    ) -> None:
        """Note that a step has been launched, and read the steps that have ended.

        `marks` is None if it was not timed; `batch` is the index in the accumulation window.
        """
        while self._unread and self._unread[0].ended.query():
            self._read_first()
        if marks is None and not is_next_due:
            self._lead_in = None
            return
        end = self._passed()
        waited_s = self._waited_s()
        if marks is not None:
            lead_in = self._lead_in or StepGap(self._passed, None)
            owned = lead_in.events if is_next_due else [*lead_in.events, end]
            waited_ms = 1e3 * (waited_s - self._waited_before_s)
            self._unread.append(_Unread(marks, lead_in, step, end, owned, batch, is_last, waited_ms))
        self._waited_before_s = waited_s
        self._lead_in = StepGap(self._passed, end) if is_next_due else None

    def interrupted(self) -> None:
        """Drop the gap before the next step: something else than a replay comes before it."""
        self._lead_in = None

    def pause(self) -> None:
        """Note that something else than a training step follows (validation, a checkpoint)."""
        self.interrupted()
        self._sinks.pause()

    def finish(self) -> None:
        while self._unread:
            self._await_first()

    def close(self) -> None:
        self._unread.clear()
        self.interrupted()
        self._sinks.close()

    def _passed(self) -> Event:
        event = self._free.pop() if self._free else self._backend.event()
        self._backend.mark(event)
        return event

    def _await_first(self) -> None:
        # The event after the whole step: marks may lie on several streams.
        ended = self._unread[0].ended
        if not ended.query():
            began_s = perf_counter()
            ended.synchronize()
            self.device_waits_s += perf_counter() - began_s
        self._read_first()

    def _read_first(self) -> None:
        marks, lead_in, step, _, owned, batch, is_last, waited_ms = self._unread.popleft()
        offsets_ms = marks.read() + self._before_ms(lead_in, marks.start)
        layout = self._layout_of(marks.layout, *lead_in.kind)
        reading = Reading(layout, step, now_s(), offsets_ms, batch, is_last, waited_ms)
        self._free += owned
        self._sinks.add(reading)

    def _before_ms(self, lead_in: StepGap, start: Event) -> list[float]:
        """Times of the events before a step, in milliseconds after its start, thus negative."""
        if not lead_in.events:
            return []
        *times_ms, start_ms = self._event_times((*lead_in.events, start))()
        return [time_ms - start_ms for time_ms in times_ms]
