"""When the clock reads events, with a device that lags behind the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_cudagraph.timing.events.clock import FitClock
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.step_gap import StepGap


class Device:
    """It comes to what the host has issued a while later.

    Attributes:
        now_ms: the time of the host.
        lag_ms: how far the device is behind.
        waits: how often the host has waited for it.
    """

    graphs_per_step = 2

    def __init__(self, lag_ms: float) -> None:
        self.now_ms = 0.0
        self.lag_ms = lag_ms
        self.waits = 0
        self.made = 0
        self.prepared = 0

    def event(self) -> LateEvent:
        self.made += 1
        return LateEvent(self)

    def mark(self, event: Any) -> None:
        event.reached_ms = self.now_ms + self.lag_ms

    def event_times(self, events: Sequence[LateEvent]) -> Callable[[], list[float]]:
        self.prepared += 1
        return lambda: [events[0].elapsed_time(event) for event in events]


class LateEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.reached_ms = float("inf")

    def query(self) -> bool:
        return self.reached_ms <= self.device.now_ms

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits += 1
            self.device.now_ms = self.reached_ms

    def elapsed_time(self, end: LateEvent) -> float:
        assert self.query()
        assert end.query()
        return end.reached_ms - self.reached_ms


class Marks:
    """Those of one of the graphs; each replay sets them anew."""

    layout = SpanLayout((Span("step_ms/total", "host", ((0, 1),)),), 2)

    def __init__(self, device: Device) -> None:
        self.device = device
        self.start, self.end = device.event(), device.event()
        self.replays = 0

    def replay(self) -> None:
        self.device.mark(self.start)
        self.device.now_ms += 0.5
        self.device.mark(self.end)
        self.replays += 1

    def read(self) -> list[float]:
        self.end.synchronize()
        # The number of the replay, in the place of a time.
        return [0.0, float(self.replays)]


class Sink:
    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.pauses = 0
        self.closed = False

    def add(self, reading: Reading) -> None:
        self.readings.append(reading)

    def pause(self) -> None:
        self.pauses += 1

    def close(self) -> None:
        self.closed = True


def train(clock: FitClock, device: Device, takes: list[Marks], steps: range) -> None:
    """Steps of a millisecond and a half, each with a copy of its batch before it."""
    for step in steps:
        marks: Any = None
        device.now_ms += 0.5
        if clock.is_due(step):
            with clock.copying():
                device.now_ms += 0.25
            marks = takes[0]
            takes.append(takes.pop(0))
            clock.upcoming(marks)
            marks.replay()
        else:
            device.now_ms += 0.75
        device.now_ms += 0.25
        clock.ended(marks, step, clock.is_due(step + 1))


def clock_of(device: Device, n: int) -> tuple[FitClock, Sink]:
    sink = Sink()
    backend: Any = device
    return FitClock(backend, [sink], n), sink


@pytest.mark.parametrize("lag_ms", [0.0, 2.0, 9.0])
def test_the_host_never_waits_for_a_sampled_step(lag_ms: float) -> None:
    device = Device(lag_ms)
    clock, sink = clock_of(device, 10)
    train(clock, device, [Marks(device)], range(109))
    assert device.waits == 0
    assert [reading.step for reading in sink.readings] == list(range(9, 100, 10))
    assert [reading.offsets_ms[1] for reading in sink.readings] == list(range(1, 11))


@pytest.mark.parametrize("lag_ms", [0.0, 1.0, 9.0])
def test_two_graphs_in_turn(lag_ms: float) -> None:
    device = Device(lag_ms)
    clock, sink = clock_of(device, 1)
    train(clock, device, [Marks(device), Marks(device)], range(40))
    # Before a graph's events are set anew they are read, while the other graph is queued.
    assert (device.waits > 0) == (lag_ms > 2.0)
    clock.finish()
    assert [reading.step for reading in sink.readings] == list(range(40))
    # Each was read before the next replay of its graph.
    assert [reading.offsets_ms[1] for reading in sink.readings] == [step // 2 + 1 for step in range(40)]


def test_gaps_and_copies() -> None:
    device = Device(1.0)
    clock, sink = clock_of(device, 1)
    train(clock, device, [Marks(device), Marks(device)], range(4))
    clock.pause()
    train(clock, device, [Marks(device), Marks(device)], range(4, 8))
    clock.finish()
    assert sink.pauses == 1
    for reading in sink.readings:
        times_ms = dict(zip(reading.layout.tags, reading.durations_ms.tolist(), strict=True))
        assert times_ms["step_ms/copy"] == pytest.approx(0.25)
        if reading.step in (0, 4):
            assert "step_ms/gap" not in times_ms
        else:
            assert times_ms["step_ms/gap"] == pytest.approx(0.5)
    assert len({id(reading.layout) for reading in sink.readings}) == 2


def test_events_are_used_again() -> None:
    device = Device(1.0)
    clock, _ = clock_of(device, 1)
    takes = [Marks(device), Marks(device)]
    train(clock, device, takes, range(10))
    made, prepared = device.made, device.prepared
    train(clock, device, takes, range(10, 100))
    assert device.made == made
    # Nor is it prepared anew how they are read, once each has come to its turn with each graph.
    assert 0 < prepared <= device.prepared <= 12


def test_what_is_prepared_for_events_that_do_not_come_again_is_not_kept() -> None:
    device = Device(0.0)
    clock, _ = clock_of(device, 1)
    start = device.event()
    for nth in range(1000):
        lead_in = StepGap(device.event, None)
        lead_in.events.append(device.event())
        device.mark(lead_in.events[0])
        device.now_ms += 0.5
        device.mark(start)
        assert clock._before_ms(lead_in, start) == [-0.5]
        assert clock._event_times.cache_info().currsize <= min(nth + 1, 64)


def test_what_was_not_read_is_left_alone_at_the_end() -> None:
    device = Device(1e6)
    clock, sink = clock_of(device, 1)
    train(clock, device, [Marks(device), Marks(device)], range(2))
    clock.close()
    assert device.waits == 0
    assert sink.readings == []
    assert sink.closed


def test_nothing_is_due_without_timings() -> None:
    device = Device(0.0)
    clock, sink = clock_of(device, 0)
    train(clock, device, [], range(20))
    assert device.made == 0
    assert sink.readings == []


def test_the_whole_step_is_waited_for() -> None:
    """Its last mark may be passed before those on other streams."""

    class TwoStreams(Marks):
        def replay(self) -> None:
            super().replay()
            self.other = self.device.event()
            self.device.now_ms += 0.125
            self.device.mark(self.other)

        def read(self) -> list[float]:
            times = super().read()
            assert self.other.query()
            return times

    device = Device(9.0)
    clock, sink = clock_of(device, 1)
    takes: list[Marks] = [TwoStreams(device), TwoStreams(device)]
    train(clock, device, takes, range(10))
    clock.finish()
    assert [reading.step for reading in sink.readings] == list(range(10))
