"""Timers for any code, inside CUDA graphs and outside."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Generic, TypeVar

import torch

from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph
from lightning_cudagraph.errors import TimerError
from lightning_cudagraph.timing.events.timed_blocks import (
    HAS_NO_END,
    TimedBlock,
    TimedPass,
    TimedPasses,
    has_no_time,
    is_captured_here,
    read_ms,
)

Context = TypeVar("Context")

# A graph's node does not keep its event alive, and torch does not report the end of a graph. So events
# of a capture live as long as the process; `Profiler`, which knows the graphs, releases its own.
_in_graphs: list[Any] = []


class EventTimer(TimedBlock):
    """Timer of a block of work on the device, inside a CUDA graph or outside.

    Use it as ``with timer:``, ``with timer():`` or ``@timer``, repeatedly, nested, and in several
    threads; `elapsed_time` is that of the block that ended last. In a capture the block becomes part of
    the graph, and has a new time after each replay. With several graphs, the one that was replayed last
    counts, even if it is gone by now: call `clear` before another capture. A block that raises is not
    timed. Until CUDA is initialised, the host's clock is read. Asyncio tasks that share a thread need a
    timer each, or the `Profiler`.

    An event in a graph lies on its critical path, and costs 2 to 4 µs there (H200, docs/times.md).
    """

    def __init__(self) -> None:
        super().__init__(None, None)
        self._last: TimedPass | None = None
        self._captured: list[TimedPass] = []

    def synchronize(self) -> None:
        """Block the host until the end of the block has been reached.

        Raises:
            TimerError: as `elapsed_time` does.
        """
        self.elapsed_time()

    def elapsed_time(self) -> float:
        """Wait for the end of the block, and return its time.

        Returns:
            Milliseconds on the device; for a block in a graph, of the last replay.

        Raises:
            TimerError: if no block has been left, if one is still open, if the graph has not been
                replayed, or if a capture is under way.
        """
        still_open = self._open.get(get_ident())
        if still_open:
            raise TimerError(
                f"{still_open[-1]} {HAS_NO_END}.",
                "Read the timer after the block.",
            )
        if self._last is None:
            raise TimerError(
                "A timer was read with which nothing has been timed.",
                "Put `with timer:` around the work.",
            )
        last = None if is_captured_here() else self._last_ended()
        return read_ms([self._last], self._last)[0] if last is None else last.elapsed_ms()

    def clear(self) -> None:
        """Forget all blocks that have been left."""
        self._last = None
        self._captured = []

    def _last_ended(self) -> TimedPass | None:
        """Wait for all passes, and return the one with the latest end; None if no end is reached."""
        found: TimedPass | None = None
        if torch.cuda.is_initialized():
            # `Event.synchronize` does not wait for an event before its graph has set it once.
            torch.cuda.current_stream().synchronize()
        for timing in filter(None, [*self._captured, self._last]):
            try:
                timing.events[1].synchronize()
                timing.elapsed_ms()
            except RuntimeError as error:  # its graph was never replayed
                if not has_no_time(error):
                    raise
                continue
            if found is None or found.ended_before(timing):
                found = timing
        return found

    def _entered(self) -> TimedPass:
        return _kept(TimedPass())

    def _left(self, timing: TimedPass, failed: bool) -> None:
        if not failed:
            self._last = timing
            if timing.captured:
                self._captured.append(timing)

    def __reduce__(self) -> Any:
        # A copy of an object that holds a timer, such as a module, has a timer of its own.
        return type(self), ()


def _kept(timing: TimedPass) -> TimedPass:
    """Keep the events of a timing alive if it is in a CUDA graph, which does not."""
    if timing.captured and EmulatedGraph.recording() is None:
        _in_graphs.extend(timing.events)
    return timing


class TimerRegistry(Generic[Context]):
    """Many timed blocks, read together.

    Blocks in a graph have new times after each replay; those outside of graphs are returned once.
    A registry serves one graph, and one thread at a time. Call `clear` before another capture, and after
    a capture that failed: otherwise it also returns old times of graphs that were not replayed last, or
    waits for the first replay of a graph that does not exist. `Profiler` keeps all graphs and threads
    apart by itself.

    A copy, or a pickle when loaded, is empty, and so are the blocks that are copied with it.

    Example:
        with torch.cuda.graph(graph):
            with registry.time("attention"):
                ...
        graph.replay()
        for context, elapsed_ms in registry.elapsed_times():
            ...
    """

    def __init__(self) -> None:
        self._passes = TimedPasses()

    def time(self, context: Context) -> TimedBlock:
        """Return a block for ``with``, or to decorate a function; each call returns a block of its own.

        Args:
            context: any object, which is returned with the time; it may be used again.
        """
        return TimedBlock(self, context)

    def elapsed_times(self) -> list[tuple[Context, float]]:
        """Wait once, for the end of the last block, and read all.

        Returns:
            Context and milliseconds of each block, in the order in which they were entered.

        Raises:
            TimerError: if a block is still open, if the graph has not been replayed or its capture has
                failed, or if a capture is under way.
        """
        for timing in self._passes.open():
            raise TimerError(
                f"{timing} {HAS_NO_END}.",
                "Leave it before the times are read, best by `with`; `clear()` forgets it.",
            )
        return self._passes.read()

    def synchronize(self) -> None:
        """Block the host until the end of the block that was left last has been reached."""
        self._passes.wait()

    def clear(self) -> None:
        """Forget all blocks."""
        self._passes.clear()

    def _entered(self, context: Context) -> TimedPass:
        return self._passes.enter(_kept(TimedPass(context)))

    def _left(self, timing: TimedPass, failed: bool) -> None:
        if timing.home is not None:  # not forgotten by `clear`
            (timing.home.discard if failed else timing.home.leave)(timing)

    def __reduce__(self) -> Any:
        return type(self), ()
