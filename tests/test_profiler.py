"""The profiler of all graphs: what it reports, when, and that it goes without a trace."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback, GraphedStep, Profiler, TimerError
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph, HostEvent
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.timing.events import profiler as profiler_module
from tests.captures import Work
from tests.harness import Net, assert_same, make, train

GRAPHS = (torch.cuda.CUDAGraph, EmulatedGraph)


@pytest.fixture
def work(accelerator: str) -> Work:
    return Work(accelerator)


def of_torch() -> list[dict[str, Any]]:
    return [dict(vars(cls)) for cls in GRAPHS]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = of_torch()
    assert Profiler.active is None
    yield
    assert Profiler.active is None
    assert of_torch() == before


class Reports(list[tuple[Any, float]]):
    """What was reported."""

    def add(self, context: Any, elapsed_ms: float) -> None:
        assert elapsed_ms > 0
        self.append((context, elapsed_ms))

    def take(self) -> list[Any]:
        """The contexts that came since the last time."""
        contexts = [context for context, _ in self]
        self.clear()
        return contexts


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def profiler(reports: Reports) -> Iterator[Profiler[Any]]:
    with Profiler(reports.add) as profiler:
        yield profiler


@dataclass
class Layer:
    """A context without a hash."""

    number: int


def layers(profiler: Profiler[Any], work: Work, n: int = 3) -> None:
    with profiler.time("all"):
        for i in range(n):
            with profiler.time(Layer(i)):
                work.run()


ALL = ["all", Layer(0), Layer(1), Layer(2)]


def test_each_replay_is_reported(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    graph = work.capture(lambda: layers(profiler, work))
    assert reports == []
    seen = []
    for _ in range(3):
        graph.replay()
        times_ms = [time_ms for _, time_ms in reports]
        assert sum(times_ms[1:]) <= times_ms[0] * 1.0001
        seen.append(tuple(times_ms))
        assert reports.take() == ALL
    assert len(set(seen)) == 3


def test_several_graphs_have_their_own_blocks(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    @profiler.time("function")
    def function() -> None:
        work.run()

    def twice() -> None:
        for _ in range(2):
            function()

    one = work.capture(twice)
    other = work.capture(lambda: layers(profiler, work, 1))
    without = work.capture(lambda: work.run())
    for graph, contexts in ((one, ["function"] * 2), (other, ["all", Layer(0)]), (without, [])):
        for _ in range(2):
            graph.replay()
            assert reports.take() == contexts


def test_a_graph_that_was_reset_is_not_reported(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    graph = work.capture(lambda: layers(profiler, work))
    graph.replay()
    assert reports.take() == ALL
    graph.reset()
    assert graph not in profiler._graphs
    assert graph not in profiler_module._events_in


def test_graphs_from_before(work: Work, reports: Reports) -> None:
    before = work.capture(lambda: work.run())
    with Profiler(reports.add) as profiler:
        before.replay()
        assert reports == []
        after = work.capture(lambda: layers(profiler, work))
        before.replay()
        after.replay()
    assert reports.take() == ALL
    work.out.zero_()
    after.replay()  # with events that nobody reads
    work.wait()
    assert work.out.ne(0).all()
    assert reports == []


def test_outside_of_graphs(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    for _ in range(3):
        layers(profiler, work)
        assert reports[0][1] >= sum(time_ms for _, time_ms in reports[1:])
        assert reports.take() == ALL
    with profiler.time("alone"):
        work.run()
    assert reports.take() == ["alone"]
    with profiler.time("outer"):
        graph = work.capture(lambda: layers(profiler, work))
        with profiler.time("inner"):
            work.run()
        assert reports == []
    assert reports.take() == ["outer", "inner"]
    graph.replay()
    assert reports.take() == ALL


def test_thousands_of_blocks_in_one(
    profiler: Profiler[Any], reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "_MOST_UNREPORTED", 100)
    with profiler.time("epoch"):
        for i in range(1000):
            assert len(reports) >= i - 100
            with profiler.time(i):
                pass
    assert sorted(map(str, reports.take())) == sorted(map(str, ["epoch", *range(1000)]))


def test_waiting_comes_into_no_time(
    profiler: Profiler[Any], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def counted(wait: Any) -> Any:
        return lambda event: (waits.append(event), wait(event))[1]

    for kind in (torch.cuda.Event, HostEvent):
        monkeypatch.setattr(kind, "synchronize", counted(kind.synchronize))
    layers(profiler, work)
    assert len(waits) == 1
    graph = work.capture(lambda: layers(profiler, work))
    assert len(waits) == 1
    graph.replay()
    assert len(waits) == 2


def test_a_block_that_fails_is_not_reported(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    def fails() -> None:
        with profiler.time("fails"):
            work.run()
            raise ZeroDivisionError

    def body() -> None:
        with profiler.time("caught"):
            with pytest.raises(ZeroDivisionError):
                fails()
            with profiler.time("good"):
                work.run()

    body()
    assert reports.take() == ["caught", "good"]
    graph = work.capture(body)
    graph.replay()
    assert reports.take() == ["caught", "good"]

    @profiler.time("outer")
    def outer() -> None:
        with profiler.time("inner"):
            work.run()
        fails()

    with pytest.raises(ZeroDivisionError):
        outer()
    assert reports == []
    layers(profiler, work)
    assert reports.take() == ALL


def test_a_capture_that_fails(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    def body() -> None:
        layers(profiler, work)
        with profiler.time("fails"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work.capture(body)
    assert profiler._captures == []
    layers(profiler, work)
    assert reports.take() == ALL
    graph = work.capture(lambda: layers(profiler, work))
    graph.replay()
    assert reports.take() == ALL


def test_a_report_that_fails_comes_out_of_the_replay(work: Work) -> None:
    seen = []

    def dump(context: Any, elapsed_ms: float) -> None:
        seen.append(context)
        if len(seen) == 2:
            raise ZeroDivisionError

    with Profiler(dump) as profiler:
        graph = work.capture(lambda: layers(profiler, work))
        work.out.zero_()
        with pytest.raises(ZeroDivisionError):
            graph.replay()
        assert work.out.ne(0).all()  # it had been replayed
        assert seen == ALL[:2]
        graph.replay()
        assert seen[2:] == ALL
        layers(profiler, work)
        assert seen[6:] == ALL


def test_made_twice(work: Work, reports: Reports) -> None:
    first = Profiler(reports.add)
    assert Profiler(reports.add) is first
    assert Profiler[Any](reports.add) is first
    assert Profiler.active is first
    with pytest.raises(TimerError, match=r"made with `print`, and there is one with `Reports\.add`"):
        Profiler(print)
    graph = work.capture(lambda: layers(first, work))
    graph.replay()
    assert reports.take() == ALL  # once
    Profiler.active.close()
    first.close()
    other = Reports()
    with Profiler(other.add) as second:
        assert second is not first
        graph.replay()
        assert other == []
        assert reports == []
        layers(second, work)
        layers(first, work)
    assert other.take() == ALL
    assert reports == []


def test_entered_twice(work: Work, reports: Reports) -> None:
    with Profiler(reports.add) as outer:
        with Profiler(reports.add) as inner, inner:
            assert inner is outer
            graph = work.capture(lambda: layers(inner, work))
        with pytest.raises(ZeroDivisionError), Profiler(reports.add):
            raise ZeroDivisionError
        assert Profiler.active is outer
        graph.replay()
        assert reports.take() == ALL
        layers(outer, work)
        assert reports.take() == ALL
    assert Profiler.active is None
    with Profiler(reports.add) as closed, closed:
        closed.close()
        assert Profiler.active is None
        with Profiler(reports.add) as second:
            layers(second, work)
    assert reports.take() == ALL


def test_blocks_of_a_closed_profiler_do_nothing(work: Work, reports: Reports) -> None:
    profiler = Profiler(reports.add)
    with profiler.time("open at the end"):
        profiler.close()
        layers(profiler, work)
    graph = work.capture(lambda: layers(profiler, work))
    graph.replay()
    assert reports == []


def test_closed_in_the_middle_of_a_capture(work: Work, reports: Reports) -> None:
    profiler = Profiler(reports.add)

    def body() -> None:
        with profiler.time("open at the end"):
            work.run()
            profiler.close()
            work.run()

    graph = work.capture(body)
    graph.replay()
    work.wait()
    assert reports == []


def test_made_in_the_middle_of_a_capture(work: Work, reports: Reports) -> None:
    made: list[Profiler[Any]] = []

    def body() -> None:
        profiler = Profiler(reports.add)
        made.append(profiler)
        with (
            pytest.warns(RuntimeWarning, match=r"timed as 'late' at .*: it is not timed"),
            profiler.time("late"),
        ):
            work.run()

    graph = work.capture(body)
    graph.replay()
    assert reports == []
    layers(made[0], work)
    assert reports.take() == ALL
    made[0].close()


def test_somebody_else_has_replaced_a_method(work: Work, reports: Reports) -> None:
    graph_class: Any = GRAPHS[0] if work.on_gpu else GRAPHS[1]
    by_torch = graph_class.replay
    calls = []
    profiler = Profiler(reports.add)
    hooked = graph_class.replay

    def replay(graph: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(graph)
        hooked(graph, *args, **kwargs)

    graph_class.replay = replay
    try:
        graph = work.capture(lambda: layers(profiler, work))
        graph.replay()
        assert reports.take() == ALL
        profiler.close()
        assert graph_class.replay is replay
        graph.replay()
        assert len(calls) == 2
        assert reports == []
        with Profiler(reports.add) as second:
            graph = work.capture(lambda: layers(second, work))
            graph.replay()
            assert reports.take() == ALL  # once
        assert len(calls) == 3
        assert graph_class.replay is replay
    finally:
        graph_class.replay = by_torch


def test_graphs_that_are_deleted_leave_nothing(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    gc.collect()
    events = len(profiler_module._events_in)
    graphs = [work.capture(lambda: layers(profiler, work)) for _ in range(5)]
    for graph in graphs:
        graph.replay()
    del graph
    assert len(profiler._graphs) == 5
    assert len(profiler_module._events_in) == events + 5
    graphs.clear()
    gc.collect()
    assert len(profiler._graphs) == 0
    assert len(profiler_module._events_in) == events
    assert reports.take() == ALL * 5


def test_reset(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    graph = work.capture(lambda: layers(profiler, work))
    with profiler.time("forgotten"):
        profiler.reset()
    graph.replay()
    work.wait()
    assert reports == []
    layers(profiler, work)
    assert reports.take() == ALL
    graph = work.capture(lambda: layers(profiler, work))
    graph.replay()
    assert reports.take() == ALL


def test_entered_and_never_left(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    blocks = []

    def body() -> None:
        layers(profiler, work)
        blocks.append(profiler.time("kept open"))
        blocks[0].__enter__()

    graph = work.capture(body)
    with pytest.warns(RuntimeWarning, match="timed as 'kept open' .* is not reported"):
        graph.replay()
    assert reports.take() == ALL
    graph.replay()
    assert reports.take() == ALL


def test_a_block_that_is_never_left_does_not_silence_the_others(
    profiler: Profiler[Any], work: Work, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak = profiler.time("leak")
    leak.__enter__()
    layers(profiler, work)
    assert reports == []
    monkeypatch.setattr(profiler_module, "_LONGEST_UNREPORTED_S", 0.0)
    with profiler.time("later"):
        work.run()
    assert reports.take() == [*ALL, "later"]
    with profiler.time("still later"):
        work.run()
    assert reports.take() == ["still later"]
    leak.__exit__(None, None, None)
    assert reports.take() == ["leak"]


def test_closed_before_blocks_were_reported(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    leak = profiler.time("leak")
    leak.__enter__()
    layers(profiler, work)
    assert reports == []
    profiler.close()
    assert reports.take() == ALL
    leak.__exit__(None, None, None)
    assert reports == []


class Beside:
    """A capture under way in another thread, until it is left: on the emulator, which lets all go on."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._begun, self._ends = threading.Event(), threading.Event()

        def capture() -> None:
            EmulatorBackend().capture(lambda: (body(), self._begun.set(), self._ends.wait()))

        self._thread = threading.Thread(target=capture)

    def __enter__(self) -> None:
        self._thread.start()
        self._begun.wait()

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()


@pytest.mark.usefixtures("profiler")
def test_blocks_beside_a_capture_are_reported_at_the_end(reports: Reports) -> None:
    work, profiler = Work("cpu"), Profiler.active
    assert profiler is not None
    with Beside(work.run):
        with profiler.time("beside"):
            work.run()
        assert reports == []
    profiler.close()
    assert reports.take() == ["beside"]


def test_closed_beside_a_capture(profiler: Profiler[Any], reports: Reports) -> None:
    work = Work("cpu")
    with Beside(work.run):
        with profiler.time("beside"):
            work.run()
        profiler.close()
    assert reports == []


def test_a_report_that_fails_at_the_end(work: Work) -> None:
    """The profiler is closed all the same."""

    def dump(context: str, elapsed_ms: float) -> None:
        raise ZeroDivisionError

    replay = EmulatedGraph.replay
    profiler = Profiler(dump)
    own = Work("cpu")
    with Beside(own.run), profiler.time("beside"):
        work.run()
    with pytest.raises(ZeroDivisionError):
        profiler.close()
    assert Profiler.active is None
    assert EmulatedGraph.replay is replay


def test_closed_by_another_thread(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    def live() -> None:
        block = profiler.time("outer")
        block.__enter__()
        with profiler.time("inner"):
            work.run()
        blocks.append(block)

    blocks: list[Any] = []
    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    profiler.close()
    assert reports == []


def test_closed_while_another_thread_is_in_a_block(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    entered, closed = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def live() -> None:
        try:
            with profiler.time("outer"):
                with profiler.time("inner"):
                    entered.set()
                    closed.wait()
                with profiler.time("later"):
                    work.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    entered.wait()
    profiler.close()
    closed.set()
    thread.join()
    assert (errors, reports) == ([], [])


@pytest.mark.parametrize("closed", [False, True])
def test_what_blocks_outside_of_graphs_are_known_by_is_not_kept(
    profiler: Profiler[Any], work: Work, reports: Reports, closed: bool
) -> None:
    module = nn.Linear(1, 1)
    with profiler.time(module):
        work.run()
    assert reports.take() == [module]
    if closed:
        profiler.close()
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_threads_leave_nothing(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    contexts: list[weakref.ref[Any]] = []

    def live() -> None:
        with profiler.time("block"):
            work.run()
        with pytest.raises(ZeroDivisionError), profiler.time("fails"):
            raise ZeroDivisionError
        kept_open = nn.Linear(1, 1)
        contexts.append(weakref.ref(kept_open))
        profiler.time(kept_open).__enter__()

    for _ in range(5):
        thread = threading.Thread(target=live)
        thread.start()
        thread.join()
    assert reports.take() == ["block"] * 5
    gc.collect()
    assert [context() for context in contexts] == [None] * 5


def test_a_report_that_enters_blocks(work: Work) -> None:
    seen: list[str] = []

    def dump(context: str, elapsed_ms: float) -> None:
        with profiler.time("in the report"):
            seen.append(context)

    with Profiler(dump) as profiler:
        graph = work.capture(lambda: profiler.time("graph")(work.run)())
        graph.replay()
        with profiler.time("outside"):
            work.run()
        graph.replay()
    assert seen == ["graph", "outside", "graph"]


def test_captures_at_the_same_time_have_their_own_blocks(
    profiler: Profiler[Any], reports: Reports
) -> None:
    graphs: dict[int, Any] = {}
    both = threading.Barrier(2)

    def capture(number: int) -> None:
        work = Work("cpu")  # on CUDA, `torch.cuda.graph` lets nobody capture beside it

        def body() -> None:
            both.wait()
            with profiler.time(number):
                work.run()
            both.wait()

        graphs[number] = work.capture(body)

    threads = [threading.Thread(target=capture, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 0, 1):
        graphs[number].replay()
        assert reports.take() == [number]


def test_a_capture_that_fails_at_its_end(
    profiler: Profiler[Any], reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler.close()

    own = EmulatedGraph.capture_end

    def fail(graph: EmulatedGraph) -> None:
        own(graph)
        raise ZeroDivisionError

    graph = EmulatedGraph()
    with monkeypatch.context() as patch:
        patch.setattr(EmulatedGraph, "capture_end", fail)
        with Profiler(reports.add) as profiler:
            graph.capture_begin()
            assert graph in profiler._graphs
            with pytest.raises(ZeroDivisionError):
                graph.capture_end()
            assert graph not in profiler._graphs
            assert graph not in profiler_module._events_in


class Graphed(nn.Module):
    """It has the graph that its own blocks are in, and is what they are known by."""

    def __init__(self, profiler: Profiler[Any], work: Work) -> None:
        super().__init__()

        def body() -> None:
            with profiler.time(self):
                work.run()

        self.graph = work.capture(body)


def test_what_blocks_are_known_by_is_not_kept(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    gc.collect()
    events = len(profiler_module._events_in)
    module = Graphed(profiler, work)
    module.graph.replay()
    assert reports.take() == [module]
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert len(profiler_module._events_in) == events


def test_threads(profiler: Profiler[Any], work: Work) -> None:
    seen: dict[int, list[tuple[int, str]]] = {}
    one_captures = threading.Lock()
    captured = threading.Barrier(4)
    profiler.close()

    def dump(context: tuple[int, str], elapsed_ms: float) -> None:
        seen.setdefault(threading.get_ident(), []).append(context)

    with Profiler(dump) as profiler:

        def live(number: int) -> None:
            own = Work("gpu" if work.on_gpu else "cpu")

            def body() -> None:
                with profiler.time((number, "graph")):
                    own.run()

            captured.wait()
            with one_captures:
                graph = own.capture(body)
            captured.wait()
            for _ in range(20):
                graph.replay()
                with profiler.time((number, "outside")):
                    own.run()

        threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 4
    for contexts in seen.values():
        number = contexts[0][0]
        assert contexts == [(number, "graph"), (number, "outside")] * 20


def test_replays_beside_a_capture_are_not_waited_for(
    profiler: Profiler[Any], work: Work, reports: Reports
) -> None:
    graph = work.capture(lambda: layers(profiler, work))

    def body() -> None:
        layers(profiler, work)
        thread = threading.Thread(target=profiler._replayed, args=(graph,))
        thread.start()
        thread.join()

    other = work.capture(body)
    assert reports == []
    for one in (graph, other):
        one.replay()
        assert reports.take() == ALL


def holder(profiler: Profiler[Any], context: str) -> Any:
    module = nn.Linear(2, 2)
    module.profiler = profiler
    module.block = profiler.time(context)
    return module


def test_a_copy_of_what_holds_it(profiler: Profiler[Any], work: Work, reports: Reports) -> None:
    module = holder(profiler, "block")
    graph = work.capture(lambda: module.block(work.run)())
    with module.block:
        twins = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]
        blocks = [copy.copy(module.block), *(twin.block for twin in twins)]
    assert reports.take() == ["block"]
    assert copy.copy(profiler) is profiler
    for twin in twins:
        assert twin.profiler is profiler
    for block in blocks:
        with block:
            work.run()
        assert reports.take() == ["block"]
    graph.replay()
    assert reports.take() == ["block"]


def test_a_pickle_is_loaded_as_the_profiler_of_the_process(work: Work, reports: Reports) -> None:
    before = of_torch()
    with Profiler(lambda context, elapsed_ms: None) as first:
        pickled = pickle.dumps(holder(first, "block"))
    module = pickle.loads(pickled)
    assert module.profiler is not first
    assert Profiler.active is None
    assert of_torch() == before
    assert copy.deepcopy(module).profiler is module.profiler
    with module.profiler, module.block:
        layers(module.profiler, work)
        module.profiler.reset()
    with Profiler(reports.add) as second:
        loaded = pickle.loads(pickled)
        assert loaded.profiler is second
        with module.block, loaded.block:
            work.run()
    assert reports.take() == ["block"]


class Timed(Net):
    """Blocks in the step, around it and across its parts."""

    profiler: Profiler[Any]

    def __init__(self, across: bool = False) -> None:
        super().__init__()
        self.across = self.profiler.time("across") if across else None

    def forward(self, x: Tensor) -> Tensor:
        with self.profiler.time("forward"):
            x = self.features(x)
            with self.profiler.time("head"):
                return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.across is not None:
            self.across.__enter__()
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.profiler.time("backward"):
            super().backward(loss, *args, **kwargs)
        if self.across is not None:
            self.across.__exit__(None, None, None)


class OnHost(Callback):
    """Has a hook in the middle of the step, so that it is captured in parts."""

    def __init__(self) -> None:
        self.calls = 0

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls += 1


@pytest.mark.spread(2)
@pytest.mark.parametrize("parts", [False, True])
def test_a_step_of_the_callback(tmp_path: Path, accelerator: str, reports: Reports, parts: bool) -> None:
    expected = ["forward", "head", "backward"]
    if parts:
        expected = ["across", *expected]
    found = []
    with Profiler(reports.add) as profiler:
        Timed.profiler = profiler
        for name, callback in (("a", None), ("b", CUDAGraphCallback(verify=None))):
            trace = train(
                make(lambda: Timed(across=parts)),
                tmp_path / name,
                callback,
                accelerator=accelerator,
                callbacks=(OnHost(),) if parts else (),
            )
            found.append((trace, reports.take()))
    (plain, eager), (graphed, replayed) = found
    assert_same(plain, graphed)
    steps, validated = 3 * 8, 3 * 3 * ["forward", "head"]
    assert graphed.counts.replayed == steps - 3 - 3
    for contexts in (eager, replayed):
        counts = {name: contexts.count(name) for name in expected}
        wanted = {name: steps + validated.count(name) for name in expected}
        assert counts == wanted
    assert sorted(eager) == sorted(replayed)


@pytest.mark.long
def test_a_report_that_fails_ends_the_fit_and_nothing_else(tmp_path: Path, accelerator: str) -> None:
    seen = []

    def dump(context: str, elapsed_ms: float) -> None:
        print(context, elapsed_ms)  # host code, which no audit of the step should find
        seen.append(context)
        if len(seen) == 30:
            raise ZeroDivisionError("in a report")

    with Profiler(dump) as profiler:
        Timed.profiler = profiler
        module = make(Timed)
        callback = CUDAGraphCallback()
        train(module, tmp_path / "a", callback, accelerator=accelerator, raises=ZeroDivisionError)
        assert callback.summary.fit.captures == 1
        assert callback.summary.fit.replayed > 1
    plain = train(make(Timed), tmp_path / "b", accelerator=accelerator)
    graphed = train(make(Timed), tmp_path / "c", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graphed)
    assert len(seen) == 30


@pytest.mark.parametrize("streams", [1, "auto"])
def test_a_graphed_step(
    accelerator: str,
    profiler: Profiler[Any],
    reports: Reports,
    monkeypatch: pytest.MonkeyPatch,
    streams: Any,
) -> None:
    """Replays are reported; those by which the number of streams is chosen are not."""
    monkeypatch.setattr(EmulatorBackend, "overlaps", True)
    device = "cuda" if accelerator == "gpu" else "cpu"
    net = nn.Linear(4, 4).to(device)

    def step(x: Tensor) -> Tensor:
        with profiler.time("linear"):
            return net(x).sum() + net(x.cos()).sum()  # side by side, on two streams

    with GraphedStep(step, modules=net, verify=None, streams=streams) as graphed:
        for _ in range(8):
            graphed(torch.ones(2, 4, device=device))
            assert reports.take() == ["linear"]
    assert graphed.summary.calls.replayed == 5
    assert ("ms a replay, 1: " in str(graphed.summary)) == (streams == "auto")


@pytest.mark.parametrize("wrong", [3, None, "print"])
def test_what_is_no_function_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(TimerError, match=r"expected a function of a context and a time in milliseconds"):
        Profiler(wrong)
    assert Profiler.active is None


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
def test_blocks_in_compiled_code(reports: Reports) -> None:
    """They are no reason to leave it alone; what is not traced has no times."""
    graphs: list[Any] = []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    profiler = Profiler(reports.add)

    def attention(x: Tensor) -> Tensor:
        with profiler.time("attention"):
            return x.sin() + x

    for _ in range(2):  # open, and closed
        torch.compiler.reset()
        compiled = torch.compile(attention, backend=counting, fullgraph=True)
        assert torch.equal(compiled(torch.ones(3)), attention(torch.ones(3)))
        profiler.close()
    assert len(graphs) == 2
    torch.compiler.reset()


def test_a_closed_profiler_is_not_entered_again(reports: Reports) -> None:
    profiler = Profiler(reports.add)
    with profiler:
        pass
    with (
        pytest.raises(TimerError, match="was closed, and would time nothing"),
        profiler,
    ):
        pass
