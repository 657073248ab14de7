"""Timers and registries, alone: in a graph, outside of it, and what they say when they are misused."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_cudagraph import (
    CUDAGraphCallback,
    CUDAGraphError,
    EventTimer,
    LayerTimings,
    TimerError,
    TimerRegistry,
)
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.timing.events import timers
from lightning_cudagraph.timing.events.timed_blocks import TimedPass
from tests.captures import Work
from tests.harness import Net, loader, make, train


@pytest.fixture
def work(accelerator: str) -> Work:
    return Work(accelerator)


def test_a_block_outside_of_a_graph(work: Work) -> None:
    timer = EventTimer()
    begin_s = time.perf_counter()
    with timer:
        work.run(4)
    timer.synchronize()
    wall_ms = (time.perf_counter() - begin_s) * 1e3
    assert 0 < timer.elapsed_time() <= wall_ms
    assert timer.elapsed_time() == timer.elapsed_time()


def test_all_three_forms(work: Work) -> None:
    timer = EventTimer()
    times_ms = []
    with timer():
        work.run(2)
    times_ms.append(timer.elapsed_time())
    with timer as entered:
        work.run(2)
    assert entered is timer
    times_ms.append(timer.elapsed_time())

    @timer
    def twice(n: int, *, more: int = 0) -> int:
        """Its own."""
        work.run(n)
        return n + more

    assert twice(2, more=1) == 3
    assert twice.__name__ == "twice"
    assert twice.__doc__ == "Its own."
    times_ms.append(timer.elapsed_time())
    assert timer()(len)([1, 2]) == 2
    times_ms.append(timer.elapsed_time())
    assert all(time_ms > 0 for time_ms in times_ms)
    assert len(set(times_ms)) > 1


def test_a_block_in_a_graph_has_a_new_time_after_each_replay(work: Work) -> None:
    timer = EventTimer()

    def body() -> None:
        work.run(3)
        with timer:
            work.run(3)

    graph = work.capture(body)
    times_ms = []
    for _ in range(4):
        graph.replay()
        times_ms.append(timer.elapsed_time())
    assert all(time_ms > 0 for time_ms in times_ms)
    assert len(set(times_ms)) > 1


def test_nested_blocks_of_one_timer(work: Work) -> None:
    inner_ms = []
    timer = EventTimer()

    def body() -> None:
        with timer:
            with timer:
                work.run()
            inner.append(timer._last)
            work.run(8)

    inner: list[Any] = []
    graph = work.capture(body)
    graph.replay()
    outer_ms = timer.elapsed_time()
    inner_ms = inner[0].read_ms()
    assert 0 < inner_ms < outer_ms


def test_recursion_and_threads(work: Work) -> None:
    timer = EventTimer()
    depths = []

    @timer
    def down(depth: int) -> None:
        depths.append(depth)
        work.run()
        if depth:
            down(depth - 1)

    threads = [threading.Thread(target=down, args=(3,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(depths) == 16
    assert timer.elapsed_time() > 0
    assert not timer._open


def test_a_timer_that_is_gone_leaves_its_graph_whole(work: Work) -> None:
    def body() -> None:
        with EventTimer(), TimerRegistry[str]().time("gone"):
            work.run()

    graph = work.capture(body)
    gc.collect()
    work.out.zero_()
    for _ in range(3):
        graph.replay()
    work.wait()
    assert work.out.ne(0).all()


def test_a_block_that_fails_is_not_timed(work: Work) -> None:
    timer = EventTimer()
    registry = TimerRegistry[str]()
    with timer:
        work.run()
    before_ms = timer.elapsed_time()

    @timer
    @registry.time("fails")
    def fails() -> float:
        work.run()
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    assert timer.elapsed_time() == before_ms
    assert registry.elapsed_times() == []
    with timer:
        work.run(2)
    assert timer.elapsed_time() != before_ms


def test_read_before_anything_was_timed() -> None:
    with pytest.raises(TimerError, match=r"nothing has been timed. Put `with timer:` around"):
        EventTimer().elapsed_time()
    with pytest.raises(CUDAGraphError, match="nothing has been timed"):
        EventTimer().synchronize()
    assert TimerRegistry[str]().elapsed_times() == []
    TimerRegistry[str]().synchronize()


def test_read_before_the_first_replay(work: Work) -> None:
    timer = EventTimer()
    registry = TimerRegistry[str]()

    def body() -> None:
        with timer, registry.time("layer"):
            work.run()

    graph = work.capture(body)
    with pytest.raises(TimerError, match=r"test_events\.py:\d+ has no time before its first replay"):
        timer.elapsed_time()
    with pytest.raises(
        TimerError, match=r"timed as 'layer' at .*test_events\.py:\d+ has no time before"
    ):
        registry.elapsed_times()
    graph.replay()
    assert timer.elapsed_time() > 0
    assert registry.elapsed_times()[0][1] > 0


def test_times_from_outside_do_not_stand_in_for_those_of_a_graph(work: Work) -> None:
    timer = EventTimer()
    with timer:
        work.run()
    assert timer.elapsed_time() > 0

    def body() -> None:
        with timer:
            work.run()

    work.capture(body)
    with pytest.raises(TimerError, match="before its first replay"):
        timer.elapsed_time()


def test_read_during_a_capture(work: Work) -> None:
    timer = EventTimer()
    registry = TimerRegistry[int]()
    said = []

    def body() -> None:
        with timer, registry.time(0):
            work.run()
        for read in (timer.elapsed_time, timer.synchronize, registry.elapsed_times):
            with pytest.raises(TimerError, match="read during a capture") as caught:
                read()
            said.append(str(caught.value))

    graph = work.capture(body)
    assert len(said) == 3
    assert all(text.endswith("Read it after the capture and a replay.") for text in said)
    graph.replay()
    assert timer.elapsed_time() > 0


def test_entered_and_never_left(work: Work) -> None:
    timer = EventTimer()
    timer.__enter__()
    with pytest.raises(TimerError, match=r"test_events\.py:\d+ has been entered and not left"):
        timer.elapsed_time()
    timer.__exit__(None, None, None)
    assert timer.elapsed_time() > 0
    with pytest.raises(TimerError, match="left that has not been entered in this thread"):
        timer.__exit__(None, None, None)

    registry = TimerRegistry[str]()
    block = registry.time("attention")
    block.__enter__()
    with pytest.raises(TimerError, match=r"timed as 'attention' .* has been entered and not left"):
        registry.elapsed_times()
    registry.clear()
    assert registry.elapsed_times() == []


def test_half_in_a_capture(work: Work) -> None:
    timer = EventTimer()
    timer.__enter__()

    def leave() -> None:
        work.run()
        with pytest.raises(TimerError, match="entered outside of it and left inside of a capture"):
            timer.__exit__(None, None, None)
        timer.__enter__()

    work.capture(leave)
    with pytest.raises(TimerError, match="entered inside of a capture and left outside of it"):
        timer.__exit__(None, None, None)


def test_functions_that_return_before_their_work() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    async def later() -> None: ...

    class Later:
        async def __call__(self) -> None: ...

    for function, name in (
        (numbers, "numbers"),
        (later, "later"),
        (functools.partial(functools.partial(numbers)), "numbers"),
        (Later(), "Later"),
        (Later().__call__, "__call__"),
    ):
        for block in (EventTimer(), TimerRegistry[str]().time("name")):
            with pytest.raises(TimerError, match=rf"{name}` returns before its work begins"):
                block(function)
    assert isinstance(EventTimer()(Later)(), Later), "to make one is work that can be timed"


def test_decorators_around_what_returns_before_its_work() -> None:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield

    async def later() -> None: ...

    @contextlib.asynccontextmanager
    async def around_later() -> AsyncIterator[None]:
        yield

    @functools.wraps(later)
    def passed_on() -> Any:
        return later()

    for block in (EventTimer(), TimerRegistry[str]().time("name")):
        for function in (around, around_later, passed_on):
            with pytest.raises(TimerError, match=r"` returns before its work begins"):
                block(function)


def test_a_timer_is_cleared_for_another_capture(work: Work) -> None:
    timer = EventTimer()
    graph = work.capture(lambda: timer(work.run)())
    graph.replay()
    assert timer.elapsed_time() > 0
    timer.clear()
    with pytest.raises(TimerError, match="nothing has been timed"):
        timer.elapsed_time()
    again = work.capture(lambda: timer(work.run)())
    with pytest.raises(TimerError, match="before its first replay"):
        timer.elapsed_time()
    again.replay()
    assert timer.elapsed_time() > 0


def test_what_blocks_are_known_by_is_not_kept(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    # The emulator's graphs keep events themselves, and CUDA's do not.
    monkeypatch.setattr(timers, "EmulatedGraph", SimpleNamespace(recording=lambda: None))
    kept = len(timers._in_graphs)
    registry = TimerRegistry[Net]()

    def captured() -> weakref.ref[Net]:
        context = Net()
        work.capture(lambda: registry.time(context)(work.run)())
        return weakref.ref(context)

    gone = captured()
    assert len(timers._in_graphs) == kept + 2
    registry.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("wrong", ["attention", 5, ()])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    said = rf"expected no argument, .* found an object of type `{type(wrong).__name__}`"
    for block in (EventTimer(), TimerRegistry[str]().time("name")):
        with pytest.raises(TimerError, match=said):
            block(wrong)


class Unhashable:
    """A context that is compared by value, and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)  # all are the same


def test_a_registry_reads_a_graph_in_one_batch(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = TimerRegistry[Any]()
    contexts: list[Any] = [Unhashable(0), Unhashable(1), ["list"], None, "same", "same"]

    def body() -> None:
        with registry.time("outer"):
            for context in contexts:
                with registry.time(context):
                    work.run()

    graph = work.capture(body)
    kind = type(registry._passes._all[0].events[1])
    waits = []
    wait = kind.synchronize
    monkeypatch.setattr(kind, "synchronize", lambda event: (waits.append(event), wait(event))[1])
    for replay in range(3):
        graph.replay()
        found = registry.elapsed_times()
        assert len(waits) == replay + 1
        assert [context for context, _ in found] == ["outer", *contexts]
        assert all(a is b for (a, _), b in zip(found[1:], contexts, strict=True))
        times_ms = [time_ms for _, time_ms in found]
        assert all(time_ms > 0 for time_ms in times_ms)
        assert sum(times_ms[1:]) <= times_ms[0] * 1.0001
    assert all(event is registry._passes._all[0].events[1] for event in waits)


def test_a_registry_outside_of_graphs_hands_out_each_block_once(work: Work) -> None:
    registry = TimerRegistry[tuple[int, str]]()

    @registry.time((-1, "function"))
    def function() -> None:
        work.run()

    for i in range(3):
        with registry.time((i, "outer")), registry.time((i, "inner")):
            work.run()
        function()
        found = registry.elapsed_times()
        assert [context for context, _ in found] == [(i, "outer"), (i, "inner"), (-1, "function")]
        assert found[0][1] >= found[1][1] > 0
    assert registry.elapsed_times() == []


def test_a_registry_is_cleared_for_another_capture(work: Work) -> None:
    registry = TimerRegistry[str]()

    def body(name: str) -> None:
        with registry.time(name):
            work.run()

    work.capture(lambda: body("first")).replay()
    assert [context for context, _ in registry.elapsed_times()] == ["first"]
    registry.clear()
    graph = work.capture(lambda: body("second"))
    graph.replay()
    assert [context for context, _ in registry.elapsed_times()] == ["second"]


def test_a_block_that_is_forgotten_while_it_is_open(work: Work) -> None:
    registry = TimerRegistry[str]()
    with registry.time("forgotten"):
        registry.clear()
        work.run()
    assert registry.elapsed_times() == []


def test_copies_have_times_of_their_own(work: Work) -> None:
    timer = EventTimer()
    with timer:
        work.run()
    for twin in (copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))):
        with pytest.raises(TimerError, match="nothing has been timed"):
            twin.elapsed_time()
    registry = TimerRegistry[str]()
    with registry.time("a"):
        work.run()
    assert copy.deepcopy(registry).elapsed_times() == []
    assert len(registry.elapsed_times()) == 1


def test_a_registry_is_copied_with_its_blocks(work: Work) -> None:
    registry = TimerRegistry[str]()
    block = registry.time("a")
    whole = {"block": block, "registry": registry}
    work.capture(lambda: block(work.run)()).replay()
    with block:
        twins = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
        shallow = copy.copy(block)
    assert len(registry.elapsed_times()) == 2
    for twin in twins:
        with twin["block"]:
            work.run()
        assert [context for context, _ in twin["registry"].elapsed_times()] == ["a"]
    assert len(registry.elapsed_times()) == 1
    with shallow:
        work.run()
    assert len(registry.elapsed_times()) == 2


@pytest.mark.spread
@pytest.mark.parametrize("timings", [None, LayerTimings()])
def test_a_timer_in_a_step_of_the_callback(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    timings: LayerTimings | None,
) -> None:
    """It is captured once or twice, and run without a graph to verify; the last replay counts."""
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", CudaBackend.graphs_per_step)

    class Timed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.timer = EventTimer()

        def forward(self, x: Tensor) -> Tensor:
            with self.timer:
                return super().forward(x)

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            times_ms.append(pl_module.timer.elapsed_time())
            latest = pl_module.timer._last_ended()
            assert latest is not None
            ends.append(latest)

    times_ms: list[float] = []
    ends: list[TimedPass] = []
    trace = train(
        make(Timed),
        tmp_path,
        CUDAGraphCallback(timings=timings),
        accelerator=accelerator,
        callbacks=(Reads(),),
        train_loader=loader(ragged=False),
    )
    assert trace.counts.replayed == 18
    assert all(time_ms > 0 for time_ms in times_ms)
    # A GPU's clock goes in ticks, and small steps take as many of them now and then.
    times = len(set(times_ms[3:]))
    assert times > (3 if accelerator == "gpu" else 15), "each replay has a time of its own"
    captured = [timing for timing in ends if timing.captured]
    assert len(captured) >= 16
    # With timings, two graphs take turns.
    assert len(set(map(id, captured))) == (1 if timings is None else 2)
    if timings is not None:
        assert all(one is not other for one, other in pairwise(captured[2:]))
