"""Timers for any code, inside a CUDA graph and outside."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Generic, TypeVar

import torch

from lightning_cudagraph.device.emulator import EmulatedGraph
from lightning_cudagraph.errors import TimerError
from lightning_cudagraph.timing.events.here import is_captured_here
from lightning_cudagraph.timing.events.timed_blocks import (
    TimedBlock,
    Timing,
    Timings,
    has_no_time,
    read_ms,
)

__all__ = ["EventTimer", "TimerRegistry"]

Context = TypeVar("Context")

# A node of a graph does not keep its event alive, and nothing tells when a graph is gone. Events that
# were recorded in a capture are therefore kept for good, unless the profiler knows the graph.
_in_graphs: list[Any] = []


class EventTimer(TimedBlock):
    """Measures a block of work on the device, in a CUDA graph too.

    ``with timer:``, ``with timer():`` and ``@timer`` are all right. It may be entered again, nested, and
    in several threads; it tells the time of the block that ended last. In a capture the block becomes
    part of the graph, and has a new time after each replay; of several graphs, the one counts that was
    replayed last, even if it is gone by now: `clear` forgets all timings before another capture.
    A block that ends with an exception is not timed. Until CUDA is initialised, the clock of the host is
    read. Tasks of asyncio that run by turns in a thread need a timer each, or the `Profiler`.

    An event in a graph lies on its critical path, and costs 2 to 4 µs there (H200, docs/times.md).
    """

    def __init__(self) -> None:
        super().__init__(None, None)
        self._last: Timing | None = None
        self._captured: list[Timing] = []

    def synchronize(self) -> None:
        """Block the host until the end of the block has been reached.

        Raises:
            TimerError: as `elapsed_time` does.
        """
        self.elapsed_time()

    def elapsed_time(self) -> float:
        """The time of the block, waiting for its end if need be.

        Returns:
            Milliseconds on the device; for a block in graphs, those of the last replay.

        Raises:
            TimerError: if no block has been left, if one is still open, if the graph has not been
                replayed, or if a capture is under way.
        """
        still_open = self._open.get(get_ident())
        if still_open:
            raise TimerError(
                f"{still_open[-1]} has been entered and not left, so that it has no end.",
                "Read the timer behind the block.",
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

    def _last_ended(self) -> Timing | None:
        """The timing with the latest end, after a wait for all; None if no end has been reached."""
        found: Timing | None = None
        if torch.cuda.is_initialized():
            # `Event.synchronize` does not wait for an event that a graph sets for the first time.
            torch.cuda.current_stream().synchronize()
        for timing in filter(None, [*self._captured, self._last]):
            try:
                timing.events[1].synchronize()
                timing.elapsed_ms()
            except RuntimeError as error:  # not replayed yet, or never again
                if not has_no_time(error):
                    raise
                continue
            if found is None or found.ended_before(timing):
                found = timing
        return found

    def _entered(self) -> Timing:
        return _kept(Timing())

    def _left(self, timing: Timing, failed: bool) -> None:
        if not failed:
            self._last = timing
            if timing.captured:
                self._captured.append(timing)

    def __reduce__(self) -> Any:
        # A copy of an object that holds a timer, such as a module, has a timer of its own.
        return type(self), ()


def _kept(timing: Timing) -> Timing:
    """Keep the events of a timing alive, if it is in a graph that does not."""
    if timing.captured and EmulatedGraph.recording() is None:
        _in_graphs.extend(timing.events)
    return timing


class TimerRegistry(Generic[Context]):
    """Many timed blocks, whose times are read together.

    Blocks of a graph have new times after each replay. Those outside of graphs are returned once.
    A registry serves one graph, and one thread at a time: before another capture, and when a capture has
    failed, `clear` it. Otherwise it cannot tell which graph was replayed last, and returns old times
    of the others too; and waits for the first replay of a graph that does not exist. `Profiler` keeps
    all graphs and threads apart by itself.

    A copy of it, or a pickle when loaded, is empty, and so are the blocks that are copied with it.

    Example:
        with torch.cuda.graph(graph):
            with registry.time("attention"):
                ...
        graph.replay()
        for context, elapsed_ms in registry.elapsed_times():
            ...
    """

    def __init__(self) -> None:
        self._timings = Timings()

    def time(self, context: Context) -> TimedBlock:
        """A block to be entered by ``with``, or put on a function: each call is a block of its own.

        Args:
            context: any object, which is returned with the time; the same one may be used again.
        """
        return TimedBlock(self, context)

    def elapsed_times(self) -> list[tuple[Context, float]]:
        """Contexts and milliseconds of all blocks, in the order in which they were entered.

        Waits once, for the end of the last block.

        Raises:
            TimerError: if a block is still open, if the graph has not been replayed or its capture has
                failed, or if a capture is under way.
        """
        for timing in self._timings.open():
            raise TimerError(
                f"{timing} has been entered and not left, so that it has no end.",
                "Leave it before the times are read, best by `with`; `clear()` forgets it.",
            )
        return self._timings.read()

    def synchronize(self) -> None:
        """Block the host until the end of the block that was left last has been reached."""
        self._timings.wait()

    def clear(self) -> None:
        """Forget all blocks."""
        self._timings.clear()

    def _entered(self, context: Context) -> Timing:
        return self._timings.enter(_kept(Timing(context)))

    def _left(self, timing: Timing, failed: bool) -> None:
        if timing.home is not None:  # `clear` has not forgotten it
            (timing.home.discard if failed else timing.home.leave)(timing)

    def __reduce__(self) -> Any:
        return type(self), ()
