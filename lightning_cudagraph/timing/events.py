"""Timers that work inside a CUDA graph as they do outside, for any code; they know no Trainer.

A timer records an event before a block and one behind it. In a capture the events are external ones:
nodes of the graph, whose times each replay sets anew and the host can read. On a machine without a GPU
the clock of the host takes the place of the events.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import torch

from lightning_cudagraph.capture.emulator import EmulatedGraph, HostEvent
from lightning_cudagraph.capture.here import event_here, is_captured_here
from lightning_cudagraph.errors import TimerError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EventTimer", "Stretch", "TimedBlock", "TimerRegistry"]

Context = TypeVar("Context")
P = ParamSpec("P")
R = TypeVar("R")

# What torch, CUDA and the emulator say of an event that has no time yet.
_NO_TIME_YET = ("invalid resource handle", "invalid argument", "must have been recorded")
_REPLAY_FIRST = "Replay the graph that holds it, then read."
# A node of a graph does not keep its event alive, and nothing tells when a graph is gone. What was
# recorded in a capture is therefore kept for good, unless the profiler knows the graph.
_in_graphs: list[Stretch] = []
_OWN = "lightning_cudagraph.timing."


class Stretch:
    """A stretch of work between two events.

    Args:
        context: what the user knows it by.

    Attributes:
        captured: it is part of a graph.
        is_left: both events have been recorded.
        home: the registry that lists it.
        is_told: the user has been told that it was never left.
    """

    __slots__ = (
        *("_code", "_end", "_line", "_start"),
        *("captured", "context", "home", "is_left", "is_told"),
    )

    def __init__(self, context: Any = None) -> None:
        self.context = context
        self.captured = is_captured_here()
        self.is_left = False
        self.is_told = False
        self.home: TimerRegistry[Any] | None = None
        self._start = event_here()
        self._end = event_here()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(_OWN):
            frame = frame.f_back
        self._code = frame.f_code.co_filename if frame is not None else "?"
        self._line = frame.f_lineno if frame is not None else 0

    def begin(self) -> None:
        """Record the first event."""
        self._start.record()

    def end(self) -> None:
        """Record the second event.

        Raises:
            TimerError: if only one of the two is in a capture.
        """
        if is_captured_here() is not self.captured:
            inside, outside = "inside of a capture", "outside of it"
            entered, left = (inside, outside) if self.captured else (outside, inside)
            raise TimerError(
                f"{self} was entered {entered} and left {left}: no replay sets both of its events.",
                "Put the whole block on one side of the capture.",
            )
        if isinstance(self._end, HostEvent) and not self.captured and torch.cuda.is_initialized():
            # The block itself has initialised CUDA, and what it issued there is still running.
            torch.cuda.current_stream().synchronize()
        self._end.record()
        self.is_left = True

    def wait(self) -> None:
        """Block the host until the end has been reached."""
        self._end.synchronize()

    def elapsed_ms(self) -> float:
        """Milliseconds between the events, which must have been reached."""
        return self._start.elapsed_time(self._end)  # type: ignore[no-any-return]

    def read_ms(self) -> float:
        """Wait for the end; milliseconds.

        Raises:
            TimerError: if it is in a graph that has not been replayed yet.
        """
        try:
            self.wait()
            return self.elapsed_ms()
        except RuntimeError as error:
            if not self.captured or not any(text in str(error) for text in _NO_TIME_YET):
                raise
            raise TimerError(f"{self} has no time before its first replay.", _REPLAY_FIRST) from error

    def __str__(self) -> str:
        named = "" if self.context is None else f" timed as {_brief(self.context)}"
        return f"The block{named} at {self._code}:{self._line}"


def _brief(context: Any) -> str:
    try:
        text = repr(context)
    except Exception as error:  # of the user's code, while another error is being told
        text = f"a `{type(context).__qualname__}` whose `repr` raised {type(error).__qualname__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _keep(stretch: Stretch) -> None:
    """Keep the events of a stretch, if it is in a graph that does not keep them itself."""
    if stretch.captured and EmulatedGraph.recording() is None:
        _in_graphs.append(stretch)


def read_ms(stretches: Sequence[Stretch], last: Stretch | None = None) -> list[float]:
    """Read stretches in one batch, with one wait.

    Args:
        stretches: which; all have been left.
        last: the one that was left last, if known.

    Returns:
        Milliseconds, one for each.

    Raises:
        TimerError: if there is one that has not been replayed yet, or if a capture is under way.
    """
    if not stretches:
        return []
    if is_captured_here():
        raise TimerError(
            f"{stretches[0]} was read during a capture, in which nothing runs and no time passes.",
            "Read it behind the capture, after a replay.",
        )
    try:
        (stretches[-1] if last is None else last).wait()
        return [stretch.elapsed_ms() for stretch in stretches]
    except RuntimeError:
        # Another stream is behind the last one's, or one of them has never been replayed.
        return [stretch.read_ms() for stretch in stretches]


class TimedBlock:
    """What can be entered, nested and repeatedly, in any thread, and put on functions.

    `_entered` and `_left` say what becomes of each stretch.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[Stretch | None]] = {}  # by thread, from the outside

    def _entered(self) -> Stretch | None:
        """Make the stretch that begins now; None for nothing to be timed."""
        raise NotImplementedError

    def _left(self, stretch: Stretch, failed: bool) -> None:
        """A stretch has been left; by an exception, or one of its events could not be recorded."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        stretch = self._entered()
        stack = self._open.setdefault(get_ident(), [])
        stack.append(stretch)
        if stretch is not None:
            try:
                stretch.begin()
            except BaseException:
                stack.pop()
                self._left(stretch, True)
                raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        thread = get_ident()
        stack = self._open.get(thread)
        if not stack:
            raise TimerError(
                "A block was left that has not been entered in this thread.",
                "Enter and leave it in one thread, best by `with`.",
            )
        stretch = stack.pop()
        if not stack:
            del self._open[thread]
        if stretch is None:
            return
        failed = error is not None
        try:
            if not failed:
                stretch.end()
        except BaseException:
            failed = True
            raise
        finally:
            self._left(stretch, failed)

    def __del__(self) -> None:
        # Nobody can leave it any more.
        stacks = getattr(self, "_open", {}).values()  # Dynamo makes objects without `__init__`
        for stretch in (held for stack in stacks for held in stack if held is not None):
            self._left(stretch, True)
            if not stretch.is_told:
                warnings.warn(
                    f"{stretch} was entered and never left: it has no time.", RuntimeWarning, 2
                )

    @overload
    def __call__(self) -> Self: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R]: ...

    def __call__(self, function: Callable[P, R] | None = None) -> Self | Callable[P, R]:
        """Time all calls of a function; without one, the same as the object itself.

        Args:
            function: the function, which returns when its work has been issued: no generator, no
                coroutine.

        Returns:
            The function that is timed, or `self`.
        """
        if function is None:
            return self
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in kinds):
            raise TimerError(
                f"`{function.__qualname__}` returns before its work begins, so that calls of it have no"
                " time.",
                "Put a `with` block around the work inside of it.",
            )

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return timed


class EventTimer(TimedBlock):
    """Measures a block of work on the device, in a CUDA graph too.

    ``with timer:``, ``with timer():`` and ``@timer`` are all right. It may be entered again, nested, and
    in several threads; it tells the time of the block that was left last. In a capture the block becomes
    part of the graph, and has a new time after each replay. A block that ends with an exception is not
    timed. On a machine without a GPU the clock of the host is read.

    An event in a graph lies on its critical path, and costs about 2 µs there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: Stretch | None = None

    def synchronize(self) -> None:
        """Block the host until the end of the block has been reached.

        Raises:
            TimerError: as `elapsed_time` does.
        """
        self.elapsed_time()

    def elapsed_time(self) -> float:
        """The time of the block, waiting for its end if need be.

        Returns:
            Milliseconds on the device; for a block in a graph, those of the last replay.

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
        return read_ms([self._last])[0]

    def _entered(self) -> Stretch:
        stretch = Stretch()
        _keep(stretch)
        return stretch

    def _left(self, stretch: Stretch, failed: bool) -> None:
        if not failed:
            self._last = stretch

    def __reduce__(self) -> Any:
        # A copy of what holds a timer, such as a module, has a timer of its own.
        return type(self), ()


class TimerRegistry(Generic[Context]):
    """Many timed blocks, whose times are read together.

    Blocks of a graph have new times after each replay. Those outside of graphs are handed out once.
    A registry serves one graph: before another capture in its place, `clear` it.

    Example:
        with torch.cuda.graph(graph):
            with registry.time("attention"):
                ...
        graph.replay()
        for context, elapsed_ms in registry.elapsed_times():
            ...
    """

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._last: Stretch | None = None

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
            TimerError: if a block is still open, if the graph has not been replayed, or if a capture is
                under way.
        """
        stretches = list(self._stretches)
        for stretch in stretches:
            if not stretch.is_left:
                raise TimerError(
                    f"{stretch} has been entered and not left, so that it has no end.",
                    "Leave it before the times are read, best by `with`; `clear()` forgets it.",
                )
        times_ms = read_ms(stretches, self._last)
        if not all(stretch.captured for stretch in stretches):
            handed_out = {id(stretch) for stretch in stretches if not stretch.captured}
            self._stretches = [s for s in self._stretches if id(s) not in handed_out]
        return [(s.context, time_ms) for s, time_ms in zip(stretches, times_ms, strict=True)]

    def synchronize(self) -> None:
        """Block the host until the end of the block that was left last has been reached."""
        if self._last is not None:
            read_ms([self._last])

    def clear(self) -> None:
        """Forget all blocks."""
        for stretch in self._stretches:
            stretch.home = None
        self._stretches = []
        self._last = None

    def open(self) -> list[Stretch]:
        """The blocks that have been entered and not left yet."""
        return [stretch for stretch in self._stretches if not stretch.is_left]

    def add(self, stretch: Stretch) -> None:
        """Take a block that is being entered."""
        stretch.home = self
        self._stretches.append(stretch)

    def take_over(self, stretch: Stretch) -> None:
        """Take a block that was entered elsewhere, before all that is here."""
        if stretch.home is not None:
            stretch.home.discard(stretch)
        stretch.home = self
        self._stretches.insert(0, stretch)

    def leave(self, stretch: Stretch) -> None:
        """Note that a block has been left."""
        if stretch.home is self:
            self._last = stretch

    def discard(self, stretch: Stretch) -> None:
        """Forget a block."""
        if stretch.home is self:
            stretch.home = None
            self._stretches.remove(stretch)

    def __len__(self) -> int:
        return len(self._stretches)

    def __bool__(self) -> bool:
        return True  # an empty one too

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
        self._registry.add(stretch)
        return stretch

    def _left(self, stretch: Stretch, failed: bool) -> None:
        if failed:
            self._registry.discard(stretch)
        else:
            self._registry.leave(stretch)
