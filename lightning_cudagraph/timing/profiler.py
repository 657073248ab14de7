"""A profiler for all CUDA graphs of the process, whoever captures them.

Blocks that are timed during a capture belong to the graph that is being captured, and are reported after
each of its replays.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from lightning_cudagraph.capture.streams.stream_choice import is_trial
from lightning_cudagraph.errors import TimerError
from lightning_cudagraph.timing.blocks import TimedBlock, name_of
from lightning_cudagraph.timing.graph_hooks import GraphHooks, GraphListener
from lightning_cudagraph.timing.stretches import Stretch, Stretches

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Profiler"]

Context = TypeVar("Context")

# The events in each graph, which must outlive it, and the profiler too. Nothing else: what a user knows
# a block by may be what holds the graph.
_events_in: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
# Where a graph has its blocks: with it they are one cycle that Python finds, if they refer to it.
_BLOCKS = "_lightning_cudagraph_blocks"
_lock = threading.RLock()
# Outside of graphs each block has events of its own until it is reported.
_MOST_UNREPORTED = 4096
# Nor should they wait for a block around them that goes on for long, or that is never left. What is
# waited for in this way is next to nothing beside the time of that block.
_LONGEST_UNREPORTED_S = 5.0


@dataclass(frozen=True)
class _Capture:
    """A capture under way."""

    graph: ref[Any]
    thread: int


class _Outside(threading.local):
    """The blocks outside of graphs that one thread has timed, and that have not been reported.

    Args:
        of_all: has those of each thread, as long as there are any.

    Attributes:
        stretches: the blocks.
        unreported_since_s: since when the outermost of them is open, or when it was reported.
        is_reporting: the function of the user is being told.
    """

    def __init__(self, of_all: set[Stretches]) -> None:
        self.stretches = Stretches()
        self.unreported_since_s = 0.0
        self.is_reporting = False
        self._of_all = of_all

    def enter(self, stretch: Stretch) -> None:
        """Take one that is being entered."""
        if not self.stretches.is_open:
            self.unreported_since_s = monotonic()
        self._of_all.add(self.stretches)
        self.stretches.enter(stretch)

    def settle(self) -> None:
        """Some have been reported or forgotten."""
        self.unreported_since_s = monotonic()
        if not len(self.stretches):
            self._of_all.discard(self.stretches)

    def is_due(self) -> bool:
        """Whether they should be reported, now that one of them has been left."""
        return (
            not self.stretches.is_open
            or len(self.stretches) > _MOST_UNREPORTED
            or monotonic() - self.unreported_since_s >= _LONGEST_UNREPORTED_S
        )


class Profiler(Generic[Context]):
    """Times blocks of code in every CUDA graph of the process, and outside of graphs.

    After each replay of a graph `dump_fn` is called for each block in it, in the order in which they
    were entered at its capture; for that the host waits until the replay has passed the last of them.
    Blocks outside of graphs are reported in the same way when the outermost one is left, so that no
    waiting comes into the times of others, but into that of a block around a replay; and while it stays
    open, when some thousands have come together or some seconds have passed. It does not matter who
    captures: `torch.cuda.graph`, `make_graphed_callables`, `CUDAGraphCallback`, or any library through
    `torch.cuda.CUDAGraph`.

    There is one at a time. Making it again with the same function gives the same object. `close`, or
    the end of its outermost ``with`` block, switches it off: then nothing of torch is replaced any more,
    and blocks that stay in the code cost next to nothing.

    A copy is the object itself. A pickle carries neither the function nor what was timed: it is loaded
    as the one that is switched on in the process that loads it, or as one that is switched off.

    Not timed: blocks in `dump_fn` itself. Not reported: replays, while a capture is under way in any
    thread, which waiting could break; graphs whose capture has begun before the profiler was made;
    replays by which `CUDAGraphCallback` and `GraphedStep` try on how many streams a step is fastest,
    whose effects they take back.

    Args:
        dump_fn: takes the context of a block and its time in milliseconds. It is called in the thread
            that replays. What it raises comes out of `replay`, when the replay is over.

    Attributes:
        active: the one that is switched on, or None.

    Raises:
        TimerError: if there is one already with another function, or if it is given none.

    Example:
        profiler = Profiler(lambda name, elapsed_ms: print(f"{name} took {elapsed_ms:.2f} ms"))
        with torch.cuda.graph(graph):
            with profiler.time("attention"):
                ...
        graph.replay()
    """

    active: ClassVar[Profiler[Any] | None] = None
    _dump_fn: Callable[[Context, float], None]
    _hooks: GraphHooks
    _graphs: WeakSet[Any]
    _under_way: list[_Capture]
    _outside: _Outside
    _of_all_threads: set[Stretches]  # outside of graphs
    _n_entered: int  # `with` blocks

    def __new__(cls, dump_fn: Callable[[Context, float], None]) -> Self:
        if not callable(dump_fn):
            raise TimerError(
                f"`Profiler({dump_fn!r})`: expected a function of a context and a time in milliseconds,"
                f" found a `{type(dump_fn).__qualname__}`.",
                "Pass one, such as `lambda context, elapsed_ms: print(context, elapsed_ms)`.",
            )
        with _lock:
            active = Profiler.active
            if active is None:
                new = cls._switched_off()
                new._switch_on(dump_fn)
                return new
            if type(active) is cls and active._dump_fn == dump_fn:
                return active
            raise TimerError(
                f"A `Profiler` was made with `{name_of(dump_fn)}`, and there is one with"
                f" `{name_of(active._dump_fn)}`; it takes every graph of the process, so that there can"
                " be one at a time.",
                "Use that one, or close it before: `Profiler.active.close()`.",
            )

    def __init__(self, dump_fn: Callable[[Context, float], None]) -> None:
        """See the class; all is done by `__new__`, which may return the one that exists."""

    def time(self, context: Context) -> TimedBlock:
        """A block to be entered by ``with``, or put on a function: each call is a block of its own.

        Args:
            context: any object; `dump_fn` is given it.
        """
        return _ProfiledBlock(self, context)

    def reset(self) -> None:
        """Forget all blocks of all graphs, and those of this thread that wait for the outermost one.

        Graphs that have been captured are reported no longer; those to come are.
        """
        with _lock:
            for graph in self._graphs:
                getattr(graph, _BLOCKS).clear()
        self._outside.stretches.clear()
        self._outside.settle()

    def close(self) -> None:
        """Switch it off, and put back what was replaced. A second time does nothing.

        Blocks of this thread that could not be reported, because another one captured, are reported.
        """
        is_capturing = self._is_capturing()
        with _lock:
            if Profiler.active is not self:
                return
            Profiler.active = None
            left = self._hooks.remove()
            for graph in self._graphs:
                delattr(graph, _BLOCKS)
        self._graphs.clear()
        self._under_way.clear()
        outside = self._outside.stretches
        try:
            if not (outside.is_open or is_capturing):
                self._report(outside)
        finally:
            texts = self._forget_outside()
            if left:
                names = ", ".join(f"`{name}`" for name in left)
                texts.append(
                    f"Somebody has replaced {names} since the `Profiler` did, and goes through its"
                    " function, which has to stay there; it only passes calls on from now on."
                )
            for text in texts:
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _forget_outside(self) -> list[str]:
        """Forget the blocks outside of graphs; returns what there is to say of those not reported."""
        with _lock:
            of_all = list(self._of_all_threads)
            # In the place of the old ones: other threads may be at work on these.
            self._of_all_threads = set()
            self._outside = _Outside(self._of_all_threads)
        texts = []
        for stretches in of_all:
            still_open = stretches.open()
            if len(stretches) <= len(still_open):
                continue
            if still_open:
                still_open[0].is_told = True
                why = f"{still_open[0]} has been entered and not left: blocks that waited for its end"
            else:
                why = "Another thread has captured, or is still in a block: blocks that waited for that"
            texts.append(f"{why} are not reported. Close the profiler behind them.")
        return texts

    def __enter__(self) -> Self:
        if hasattr(self, "_dump_fn") and Profiler.active is not self:
            raise TimerError(
                "This profiler was closed, and would time nothing.",
                "Make another one: `Profiler(dump_fn)`.",
            )
        with _lock:
            self._n_entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            self._n_entered -= 1
            is_outermost = self._n_entered == 0
        if is_outermost:
            self.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # copies of modules that hold it go on using it

    def __reduce__(self) -> Any:
        return type(self)._loaded, ()

    @classmethod
    def _loaded(cls) -> Self:
        """What a pickle is loaded as."""
        active = Profiler.active
        return active if type(active) is cls else cls._switched_off()

    @classmethod
    def _switched_off(cls) -> Self:
        new = super().__new__(cls)
        new._graphs = WeakSet()
        new._under_way = []
        new._of_all_threads = set()
        new._outside = _Outside(new._of_all_threads)
        new._n_entered = 0
        return new

    def _switch_on(self, dump_fn: Callable[[Context, float], None]) -> None:
        self._dump_fn = dump_fn
        self._hooks = GraphHooks(GraphListener(self._begun, self._ended, self._replayed, self._emptied))
        Profiler.active = self

    def _graph_here(self) -> Any:
        """The graph that takes what is issued here, or None if nobody knows it."""
        with _lock:
            under_way = [capture for capture in self._under_way if capture.graph() is not None]
        own = [capture for capture in under_way if capture.thread == get_ident()]
        # The backward pass runs in a thread of autograd's.
        found = own or (under_way if len(under_way) == 1 else [])
        return found[-1].graph() if found else None

    def _begun(self, graph: Any) -> None:
        with _lock:
            setattr(graph, _BLOCKS, Stretches())
            self._graphs.add(graph)
            _events_in[graph] = []
            self._under_way.append(_Capture(ref(graph), get_ident()))

    def _ended(self, graph: Any, failed: bool) -> None:
        with _lock:
            self._under_way = [c for c in self._under_way if c.graph() not in (None, graph)]
        if failed:
            self._emptied(graph)

    def _emptied(self, graph: Any) -> None:
        with _lock:
            if graph in self._graphs:
                self._graphs.remove(graph)
                delattr(graph, _BLOCKS)
            _events_in.pop(graph, None)

    def _replayed(self, graph: Any) -> None:
        stretches: Stretches | None = getattr(graph, _BLOCKS, None)
        if stretches is None or not len(stretches) or self._is_capturing() or is_trial():
            return
        for stretch in stretches.open() if stretches.is_open else ():
            stretches.discard(stretch)
            stretch.is_told = True
            warnings.warn(
                f"{stretch} has been entered and not left, so that it has no end: it is not reported.",
                RuntimeWarning,
                stacklevel=3,
            )
        self._report(stretches)

    def _report(self, stretches: Stretches) -> None:
        # All are read before anybody else's code runs.
        times = stretches.read()
        outside = self._outside
        was_reporting, outside.is_reporting = outside.is_reporting, True
        try:
            for context, elapsed_ms in times:
                self._dump_fn(context, elapsed_ms)
        finally:
            outside.is_reporting = was_reporting

    def _is_capturing(self) -> bool:
        with _lock:
            return any(capture.graph() is not None for capture in self._under_way)

    def _entered(self, context: Context) -> Stretch | None:
        if Profiler.active is not self or self._outside.is_reporting:
            return None
        stretch = Stretch(context)
        if not stretch.captured:
            self._outside.enter(stretch)
            return stretch
        graph = self._graph_here()
        if graph is None:
            warnings.warn(
                f"{stretch} is in a capture that began before the `Profiler` was made, or beside others"
                " in a thread that began none of them: it is not timed.",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        _events_in[graph].extend(stretch.events)
        getattr(graph, _BLOCKS).enter(stretch)
        return stretch

    def _left(self, stretch: Stretch, failed: bool) -> None:
        stretches = stretch.home
        if stretches is None:  # `reset` has forgotten it
            return
        if failed or Profiler.active is not self:
            stretches.discard(stretch)
            if not stretch.captured and not stretches.is_open:
                stretches.clear()  # of a block that failed as a whole, nothing is reported
                self._of_all_threads.discard(stretches)  # of another thread, if that has ended
            return
        if stretch.captured:
            graph = self._graph_here()
            if graph is not None and (here := getattr(graph, _BLOCKS)) is not stretches:
                # A step is captured in parts, of which a later one holds the end.
                _events_in[graph].extend(stretch.events)
                stretches = here
            stretches.leave(stretch)
            return
        stretches.leave(stretch)
        if self._outside.is_due() and not self._is_capturing():
            try:
                self._report(stretches)
            finally:
                self._outside.settle()


class _ProfiledBlock(TimedBlock):
    """A block of the profiler."""

    def __init__(self, profiler: Profiler[Any], context: Any) -> None:
        super().__init__()
        self._profiler = profiler
        self._context = context

    def _entered(self) -> Stretch | None:
        return self._profiler._entered(self._context)

    def _left(self, stretch: Stretch, failed: bool) -> None:
        self._profiler._left(stretch, failed)

    def __reduce__(self) -> Any:
        return type(self), (self._profiler, self._context)
