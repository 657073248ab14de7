"""Timers that work inside a CUDA graph as they do outside, for any code; they know no Trainer.

A timer records an event before a block and one behind it. In a capture the events are external ones:
nodes of the graph, whose times each replay sets anew and the host can read. While CUDA has not been
initialised, the clock of the host takes the place of the events.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Generic, TypeVar

from lightning_cudagraph.capture.emulator import EmulatedGraph
from lightning_cudagraph.capture.here import is_captured_here
from lightning_cudagraph.errors import TimerError
from lightning_cudagraph.timing.blocks import TimedBlock
from lightning_cudagraph.timing.stretches import Stretch, Stretches, last_ended, read_ms

__all__ = ["EventTimer", "TimerRegistry"]

Context = TypeVar("Context")

# A node of a graph does not keep its event alive, and nothing tells when a graph is gone. Events that
# were recorded in a capture are therefore kept for good, unless the profiler knows the graph.
_in_graphs: list[Any] = []


def _keep(stretch: Stretch) -> None:
    """Keep the events of a stretch, if it is in a graph that does not keep them itself."""
    if stretch.captured and EmulatedGraph.recording() is None:
        _in_graphs.extend(stretch.events)


class EventTimer(TimedBlock):
    """Measures a block of work on the device, in a CUDA graph too.

    ``with timer:``, ``with timer():`` and ``@timer`` are all right. It may be entered again, nested, and
    in several threads; it tells the time of the block that ended last. In a capture the block becomes
    part of the graph, and has a new time after each replay; of several graphs, the one counts that was
    replayed last, be it one that has gone since: `clear` forgets what was timed before another capture.
    A block that ends with an exception is not timed. While CUDA has not been initialised, the clock of
    the host is read. Tasks of asyncio that take turns in a thread need a timer each, or the `Profiler`.

    An event in a graph lies on its critical path, and costs 2 to 4 µs there (H200, docs/times.md).
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: Stretch | None = None
        self._captured: list[Stretch] = []

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
        if not is_captured_here() and (last := last_ended([*self._captured, self._last])) is not None:
            return last.elapsed_ms()
        return read_ms([self._last], self._last)[0]

    def clear(self) -> None:
        """Forget all blocks that have been left."""
        self._last = None
        self._captured = []

    def _entered(self) -> Stretch:
        stretch = Stretch()
        _keep(stretch)
        return stretch

    def _left(self, stretch: Stretch, failed: bool) -> None:
        if not failed:
            self._last = stretch
            if stretch.captured:
                self._captured.append(stretch)

    def __reduce__(self) -> Any:
        # A copy of what holds a timer, such as a module, has a timer of its own.
        return type(self), ()


class TimerRegistry(Generic[Context]):
    """Many timed blocks, whose times are read together.

    Blocks of a graph have new times after each replay. Those outside of graphs are handed out once.
    A registry serves one graph, and one thread at a time: before another capture, and when a capture has
    failed, `clear` it. Otherwise it cannot tell which graph was replayed last, and hands out old times
    of the others too; and waits for the first replay of a graph that does not exist. `Profiler` keeps
    all graphs and threads apart by itself.

    A copy of it, or what a pickle is loaded as, is empty, and so are the blocks that are copied with it.

    Example:
        with torch.cuda.graph(graph):
            with registry.time("attention"):
                ...
        graph.replay()
        for context, elapsed_ms in registry.elapsed_times():
            ...
    """

    def __init__(self) -> None:
        self._stretches = Stretches()

    def time(self, context: Context) -> TimedBlock:
        """A block to be entered by ``with``, or put on a function: each call is a block of its own.

        Args:
            context: any object, which comes back with the time; the same one may come again.
        """
        return _RegisteredBlock(self, context)

    def elapsed_times(self) -> list[tuple[Context, float]]:
        """Contexts and milliseconds of all blocks, in the order in which they were entered.

        Waits once, for the end of the last block.

        Raises:
            TimerError: if a block is still open, if the graph has not been replayed or its capture has
                failed, or if a capture is under way.
        """
        for stretch in self._stretches.open():
            raise TimerError(
                f"{stretch} has been entered and not left, so that it has no end.",
                "Leave it before the times are read, best by `with`; `clear()` forgets it.",
            )
        return self._stretches.read()

    def synchronize(self) -> None:
        """Block the host until the end of the block that was left last has been reached."""
        self._stretches.wait()

    def clear(self) -> None:
        """Forget all blocks."""
        self._stretches.clear()

    def __reduce__(self) -> Any:
        return type(self), ()


class _RegisteredBlock(TimedBlock):
    """A block of a registry."""

    def __init__(self, registry: TimerRegistry[Any], context: Any) -> None:
        super().__init__()
        self._registry = registry
        self._context = context

    def _entered(self) -> Stretch:
        stretch = Stretch(self._context)
        _keep(stretch)
        self._registry._stretches.enter(stretch)
        return stretch

    def _left(self, stretch: Stretch, failed: bool) -> None:
        if stretch.home is None:  # `clear` has forgotten it
            return
        if failed:
            stretch.home.discard(stretch)
        else:
            stretch.home.leave(stretch)

    def __reduce__(self) -> Any:
        # The registry comes along, so that one and its blocks are copied as a whole.
        return type(self), (self._registry, self._context)
