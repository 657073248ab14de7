"""Timed blocks of code, with two events each: context managers and decorators.

In a capture the events are external ones, nodes of the graph: each replay sets their times, and the host
can read them. Outside, torch treats these as ordinary ones (c10/cuda/CUDAEvent.h). A block does not
initialise CUDA: until other code has done so, nothing runs on a GPU, and the host's clock is read.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph, HostEvent
from lightning_cudagraph.errors import TimerError

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")

# Parts of the messages of torch, CUDA and the emulator for an event without a time.
_NO_TIME_YET = ("invalid resource handle", "invalid argument", "must have been recorded")
_OWN = "lightning_cudagraph.timing."
HAS_NO_END = "has been entered and not left, so that it has no end"


def is_captured_here() -> bool:
    """True if the calling thread issues into a capture."""
    if EmulatedGraph.recording() is not None:
        return True
    # A query of the current stream, which includes autograd's threads and forked streams.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _event_here() -> Any:
    if torch.cuda.is_initialized() and EmulatedGraph.recording() is None:
        return torch.cuda.Event(enable_timing=True, external=True)
    return HostEvent()


class TimedPass:
    """One pass through a timed block: two events, and the line of the user's code that entered it.

    A pass is `captured` if it is part of a graph, and `is_left` once both events have been recorded.
    Its `home` is the list that holds it.
    """

    __slots__ = ("_code", "_line", "captured", "context", "events", "home", "is_left")

    def __init__(self, context: Any = None) -> None:
        self.context = context
        self.captured = is_captured_here()
        self.events = _event_here(), _event_here()
        self.home: TimedPasses | None = None
        self.is_left = False
        callers = (f for f in frames(sys._getframe(1)) if not module_of(f).startswith(_OWN))
        frame = next(callers, None)
        self._code = frame.f_code.co_filename if frame is not None else "?"
        self._line = frame.f_lineno if frame is not None else 0

    def end(self) -> None:
        """Record the second event; raise if only one of the two is in a capture."""
        end = self.events[1]
        if is_captured_here() is not self.captured:
            inside, outside = "inside of a capture", "outside of it"
            entered, left = (inside, outside) if self.captured else (outside, inside)
            raise TimerError(
                f"{self} was entered {entered} and left {left}: no replay sets both of its events.",
                "Put the whole block on one side of the capture.",
            )
        if isinstance(end, HostEvent) and not self.captured and torch.cuda.is_initialized():
            # The block itself has initialised CUDA, and its kernels are still running.
            torch.cuda.current_stream().synchronize()
        end.record()
        self.is_left = True

    def elapsed_ms(self) -> float:
        """Milliseconds between the events, both of which have been reached."""
        start, end = self.events
        return start.elapsed_time(end)  # type: ignore[no-any-return]

    def read_ms(self) -> float:
        try:
            self.events[1].synchronize()
            return self.elapsed_ms()
        except RuntimeError as error:
            if not (self.captured and has_no_time(error)):
                raise
            raise TimerError(
                f"{self} has no time before its first replay.",
                "Replay the graph that holds it, then read; if its capture has failed, make a new timer,"
                " or `clear()` the registry.",
            ) from error

    def ended_before(self, other: TimedPass) -> bool:
        """True if the end of `other` is not earlier; both ends have been reached."""
        end, other_end = self.events[1], other.events[1]
        if type(end) is not type(other_end):
            return True  # this one is on the host's clock, from before CUDA was initialised
        return end.elapsed_time(other_end) >= 0  # type: ignore[no-any-return]

    def __str__(self) -> str:
        named = "" if self.context is None else f" timed as {_brief(self.context)}"
        return f"The block{named} at {self._code}:{self._line}"


def has_no_time(error: RuntimeError) -> bool:
    """True for the error of an event that has not been reached."""
    return any(text in str(error) for text in _NO_TIME_YET)


def _brief(context: Any) -> str:
    try:
        text = repr(context)
    except Exception as error:  # the user's `__repr__` must not hide the error that is being reported
        text = f"a `{type(context).__qualname__}` whose `repr` raised {type(error).__qualname__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_ms(passes: Sequence[TimedPass], last: TimedPass) -> list[float]:
    """Read passes of blocks that have been left, with one wait for the block that was left last."""
    if passes and is_captured_here():
        raise TimerError(
            f"{passes[0]} was read during a capture, in which nothing runs and no time passes.",
            "Read it after the capture and a replay.",
        )
    try:
        if passes:
            last.events[1].synchronize()
        return [timing.elapsed_ms() for timing in passes]
    except RuntimeError:
        # Another stream has not come as far yet, or a graph has never been replayed.
        return [timing.read_ms() for timing in passes]


class TimedPasses:
    """Passes that are read together, in the order in which their blocks were entered."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._all)

    def clear(self) -> None:
        for timing in getattr(self, "_all", ()):
            timing.home = None
        self._all: list[TimedPass] = []
        self._last: TimedPass | None = None
        self.n_open = 0

    def open(self) -> list[TimedPass]:
        """Passes of blocks that have been entered and not left."""
        return [timing for timing in self._all if not timing.is_left] if self.n_open else []

    def enter(self, timing: TimedPass) -> TimedPass:
        timing.home = self
        self._all.append(timing)
        self.n_open += 1
        return timing

    def leave(self, timing: TimedPass) -> None:
        """Note that a block has been left; one of another list was entered before all of this list."""
        if (home := timing.home) is not self:
            assert home is not None
            home.discard(timing)
            timing.home = self
            self._all.insert(0, timing)
            self.n_open += 1
        self._last = timing
        self.n_open -= 1

    def discard(self, timing: TimedPass) -> None:
        timing.home = None
        self._all.remove(timing)
        self.n_open -= 1

    def wait(self) -> None:
        """Block the host until the end of the block that was left last has been reached."""
        if self._last is not None:
            read_ms([self._last], self._last)

    def read(self) -> list[tuple[Any, float]]:
        """Read contexts and milliseconds of the left blocks; those outside of graphs, once."""
        if self._last is None:
            return []
        left = [timing for timing in self._all if timing.is_left]
        times_ms = read_ms(left, self._last)
        if not all(timing.captured for timing in left):
            self._all = [t for t in self._all if t.captured or not t.is_left]
            if not self._all:
                self._last = None
        return [(timing.context, time_ms) for timing, time_ms in zip(left, times_ms, strict=True)]


class TimedBlock:
    """A timed block: a context manager, which may be nested and used in any thread, and a decorator.

    A copy, or a pickle of it when loaded, is a block that has not been entered. The owner makes a
    `TimedPass`, or None, when the block is entered, and receives it when it is left.
    """

    def __init__(self, owner: Any, context: Any) -> None:
        self._owner = owner
        self._context = context
        self._open: dict[int, list[TimedPass | None]] = {}  # by thread, the outermost first

    def _entered(self) -> TimedPass | None:
        return self._owner._entered(self._context)  # type: ignore[no-any-return]

    def _left(self, timing: TimedPass, failed: bool) -> None:
        self._owner._left(timing, failed)

    def __reduce__(self) -> Any:
        return type(self), (self._owner, self._context)  # copied together with its owner

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            return self  # empty in compiled code: with events, Dynamo would skip the function
        timing = self._entered()
        stack = self._open.setdefault(get_ident(), [])
        stack.append(timing)
        if timing is not None:
            try:
                timing.events[0].record()
            except BaseException:
                stack.pop()
                self._left(timing, True)
                raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if torch.compiler.is_compiling():
            return
        thread = get_ident()
        stack = self._open.get(thread)
        if not stack:
            raise TimerError(
                "A block was left that has not been entered in this thread.",
                "Enter and leave it in one thread, best by `with`.",
            )
        timing = stack.pop()
        if not stack:
            del self._open[thread]
        if timing is None:
            return
        failed = True
        try:
            if error is None:
                timing.end()
                failed = False
        finally:
            self._left(timing, failed)

    @overload
    def __call__(self) -> Self: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R]: ...

    def __call__(self, function: Callable[P, R] | None = None) -> Self | Callable[P, R]:
        """Time all calls of a function; without one, return the block itself.

        Args:
            function: a function that returns after its work has been issued, so no generator and no
                coroutine, nor one in a decorator.

        Raises:
            TimerError: if the argument is anything else.
        """
        if function is None:
            return self
        if not callable(function):
            raise TimerError(
                "A timed block was called: expected no argument, or the function to be timed, found an"
                f" object of type `{type(function).__qualname__}`.",
                "Put a `with` block without an argument around the work, or `@` and the block on a"
                " function; names are given to `TimerRegistry.time`.",
            )
        if _returns_early(inspect.unwrap(function)):
            raise TimerError(
                f"`{name_of(function)}` returns before its work begins, so that calls of it have no"
                " time.",
                "Put a `with` block around the work inside of it.",
            )

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return timed


def _returns_early(function: Callable[..., Any]) -> bool:
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    # For a callable object, `__call__` of its class decides.
    return any(is_kind(code) for is_kind in kinds for code in (function, type(function).__call__))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in a message; for other callable objects, the name of their class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)
