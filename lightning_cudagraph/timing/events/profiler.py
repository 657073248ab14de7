"""Profiler of all CUDA graphs of the process.

Blocks that are timed during a capture belong to its graph, and are reported after each replay. For that,
methods of `torch.cuda.CUDAGraph`, and of the emulator's graphs, are patched.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from lightning_cudagraph.capture.decisions.stream_choice import is_trial
from lightning_cudagraph.capture.verification.late_effects import is_rehearsing
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph
from lightning_cudagraph.errors import TimerError
from lightning_cudagraph.timing.events.timed_blocks import (
    HAS_NO_END,
    TimedBlock,
    TimedPass,
    TimedPasses,
    name_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Context = TypeVar("Context")

_GRAPHS: tuple[type, ...] = (torch.cuda.CUDAGraph, EmulatedGraph)
# The events in each graph, which must live as long as the graph does, even after the profiler. Events
# only: the context of a block may refer to the graph, and would keep it alive.
_events_in: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
# The attribute of a graph that holds its blocks. If a block refers to the graph, they are a cycle, which
# Python's collector finds.
_BLOCKS = "_lightning_cudagraph_blocks"
_lock = threading.RLock()
# A bound on memory: outside of graphs, each block has events of its own until it is reported.
_MOST_UNREPORTED = 4096
# Blocks inside of one that lasts long, or is never left, are reported before its end: to read them takes
# next to nothing beside the time of that block.
_LONGEST_UNREPORTED_S = 5.0


class _Outside(threading.local):
    """Unreported blocks outside of graphs, of one thread."""

    def __init__(self) -> None:
        self.blocks = TimedPasses()
        self.unreported_since_s = 0.0  # since the outermost was entered, or the last report
        self.is_reporting = False


class Profiler(Generic[Context]):
    """Profiler of blocks of code in every CUDA graph of the process, and outside of graphs.

    After each replay of a graph, `dump_fn` is called for each block in it, in the order in which they
    were entered at the capture. For that the host waits until the replay has passed the last block. The
    graph may be captured by `torch.cuda.graph`, `make_graphed_callables`, `CUDAGraphCallback`, or any
    library that uses `torch.cuda.CUDAGraph`.

    Blocks outside of graphs are reported when the outermost one is left, so that the wait is in no time
    but that of a block around a replay. While the outermost stays open, they are reported after some
    thousands of blocks or some seconds.

    There is one profiler at a time: making it again with the same function returns the same object.
    `close`, or the end of its outermost ``with`` block, switches it off. Then no method of torch is
    patched any more, and blocks that stay in the code cost next to nothing.

    A copy is the object itself. A pickle carries neither the function nor any times: it is loaded
    as the active profiler of the process that loads it, or as one that is switched off.

    Not timed: blocks in `dump_fn` itself. Not reported: replays while a capture is under way in any
    thread, because a wait could break the capture; graphs whose capture began before the profiler was
    made; trial replays of `CUDAGraphCallback` and `GraphedStep`, which find the fastest number of
    streams and are undone.

    Args:
        dump_fn: called with the context of a block and its time in milliseconds, in the thread that
            replays. Its exceptions come out of `replay`, after the replay.

    Attributes:
        active: the profiler that is switched on, or None.

    Raises:
        TimerError: if there is one with another function already, or if `dump_fn` is not callable.

    Example:
        profiler = Profiler(lambda name, elapsed_ms: print(f"{name} took {elapsed_ms:.2f} ms"))
        with torch.cuda.graph(graph):
            with profiler.time("attention"):
                ...
        graph.replay()
    """

    active: ClassVar[Profiler[Any] | None] = None
    _dump_fn: Callable[[Context, float], None]
    _patches: list[tuple[type, str, Any, Any]]  # class, name, hook, and the class's own method or None
    _graphs: WeakSet[Any]
    _captures: list[tuple[ref[Any], int]]  # graph and thread of each capture under way
    _outside: _Outside
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
                new._dump_fn = dump_fn
                new._patch()
                Profiler.active = new
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
        """Do nothing: `__new__`, which may return the existing profiler, does all."""

    def time(self, context: Context) -> TimedBlock:
        """Return a block for ``with``, or to decorate a function; each call returns a block of its own.

        Args:
            context: any object, which is passed to `dump_fn`.
        """
        return TimedBlock(self, context)

    def reset(self) -> None:
        """Forget all blocks of all graphs, and the unreported blocks of this thread.

        Graphs that have been captured are no longer reported; later ones are.
        """
        with _lock:
            for graph in self._graphs:
                getattr(graph, _BLOCKS).clear()
        self._outside.blocks.clear()

    def close(self) -> None:
        """Switch the profiler off, and restore the methods of torch. A second call does nothing.

        Blocks of this thread that have been left and not reported are reported, unless a capture is
        under way. Those of other threads are dropped.
        """
        is_capturing = self._is_capturing()
        with _lock:
            if Profiler.active is not self:
                return
            Profiler.active = None
            self._unpatch()
            for graph in self._graphs:
                delattr(graph, _BLOCKS)
        self._graphs.clear()
        self._captures.clear()
        blocks = self._outside.blocks
        self._outside = _Outside()  # a new one: other threads may be using the old
        if not is_capturing:
            self._report(blocks)

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
        return self  # shared by copies of a module that holds it

    def __reduce__(self) -> Any:
        return type(self)._loaded, ()

    @classmethod
    def _loaded(cls) -> Self:
        active = Profiler.active
        return active if type(active) is cls else cls._switched_off()

    @classmethod
    def _switched_off(cls) -> Self:
        new = super().__new__(cls)
        new._graphs, new._captures, new._patches = WeakSet(), [], []
        new._outside = _Outside()
        new._n_entered = 0
        return new

    def _patch(self) -> None:
        """Patch the methods of graphs: each hook calls the method, then reports the call."""
        reports: dict[str, Callable[[Any], None]] = {
            "capture_begin": self._begun,
            "capture_end": self._ended,
            "replay": self._replayed,
            "reset": self._emptied,
        }
        for owner in _GRAPHS:
            for name, report in reports.items():
                method = getattr(owner, name)
                hook = functools.wraps(method)(self._hook(method, report, name == "capture_end"))
                self._patches.append((owner, name, hook, vars(owner).get(name)))
                setattr(owner, name, hook)

    def _hook(self, method: Any, report: Callable[[Any], None], ends_capture: bool) -> Any:
        # Arguments are passed on unchanged: they differ between versions of torch.
        def hook(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = method(graph, *args, **kwargs)
            except BaseException:
                if ends_capture and Profiler.active is self:
                    self._ended(graph, failed=True)
                raise
            if Profiler.active is self:
                report(graph)
            return result

        return hook

    def _unpatch(self) -> None:
        """Restore the methods. A hook that a later patch calls stays, and only passes calls on."""
        for owner, name, hook, own in reversed(self._patches):
            if vars(owner).get(name) is not hook:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._patches = []

    def _graph_here(self) -> Any:
        """The graph that the calling thread captures into, or None if it is not known."""
        with _lock:
            under_way = [(graph(), thread) for graph, thread in self._captures if graph() is not None]
        own = [graph for graph, thread in under_way if thread == get_ident()]
        if not own and len(under_way) == 1:
            own = [under_way[0][0]]  # the backward pass runs in autograd's thread
        return own[-1] if own else None

    def _begun(self, graph: Any) -> None:
        with _lock:
            setattr(graph, _BLOCKS, TimedPasses())
            self._graphs.add(graph)
            _events_in[graph] = []
            self._captures.append((ref(graph), get_ident()))

    def _ended(self, graph: Any, failed: bool = False) -> None:
        with _lock:
            self._captures = [c for c in self._captures if c[0]() not in (None, graph)]
        if failed:
            self._emptied(graph)

    def _emptied(self, graph: Any) -> None:
        with _lock:
            if graph in self._graphs:
                self._graphs.remove(graph)
                delattr(graph, _BLOCKS)
            _events_in.pop(graph, None)

    def _replayed(self, graph: Any) -> None:
        blocks: TimedPasses | None = getattr(graph, _BLOCKS, None)
        if blocks is None or not len(blocks) or self._is_capturing() or is_trial():
            return
        for timing in blocks.open():
            blocks.discard(timing)
            warnings.warn(f"{timing} {HAS_NO_END}: it is not reported.", RuntimeWarning, stacklevel=3)
        self._report(blocks)

    def _report(self, blocks: TimedPasses) -> None:
        times = blocks.read()  # all of them before user code runs
        outside = self._outside
        was_reporting, outside.is_reporting = outside.is_reporting, True
        try:
            for context, elapsed_ms in times:
                self._dump_fn(context, elapsed_ms)
        finally:
            outside.is_reporting = was_reporting

    def _is_capturing(self) -> bool:
        with _lock:
            return any(graph() is not None for graph, _ in self._captures)

    # Called by `TimedBlock`:

    def _entered(self, context: Context) -> TimedPass | None:
        outside = self._outside
        if Profiler.active is not self or outside.is_reporting:
            return None
        timing = TimedPass(context)
        if not timing.captured:
            if not outside.blocks.n_open:
                outside.unreported_since_s = monotonic()
            return outside.blocks.enter(timing)
        graph = self._graph_here()
        if graph is None:
            warnings.warn(
                f"{timing} is in a capture that began before the `Profiler` was made, or beside others"
                " in a thread that began none of them: it is not timed.",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        _events_in[graph].extend(timing.events)
        blocks: TimedPasses = getattr(graph, _BLOCKS)
        return blocks.enter(timing)

    def _left(self, timing: TimedPass, failed: bool) -> None:
        blocks = timing.home
        if blocks is None:  # forgotten by `reset`
            return
        if failed or Profiler.active is not self:
            blocks.discard(timing)
            if not timing.captured and not blocks.n_open:
                blocks.clear()  # an outermost block that failed is not reported, nor are blocks in it
        elif timing.captured:
            graph = self._graph_here()
            if graph is not None and (here := getattr(graph, _BLOCKS)) is not blocks:
                # The step is captured in parts, and the block ends in a later one.
                _events_in[graph].extend(timing.events)
                blocks = here
            blocks.leave(timing)
        else:
            blocks.leave(timing)
            is_due = (
                not blocks.n_open
                or len(blocks) > _MOST_UNREPORTED
                or monotonic() - self._outside.unreported_since_s >= _LONGEST_UNREPORTED_S
            )
            if is_due and not self._is_capturing() and not is_rehearsing():
                try:
                    self._report(blocks)
                finally:
                    self._outside.unreported_since_s = monotonic()
