"""Stretches of work between two events, and lists of them that are read in one batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from lightning_cudagraph.capture.emulator import HostEvent
from lightning_cudagraph.capture.here import event_here, is_captured_here
from lightning_cudagraph.errors import TimerError

__all__ = ["Stretch", "Stretches", "last_ended", "read_ms"]

# What torch, CUDA and the emulator say of an event that has no time yet.
_NO_TIME_YET = ("invalid resource handle", "invalid argument", "must have been recorded")
_REPLAY_FIRST = (
    "Replay the graph that holds it, then read; if its capture has failed, make a new timer, or"
    " `clear()` the registry."
)
_OWN = "lightning_cudagraph.timing."


class Stretch:
    """A stretch of work between two events.

    Args:
        context: what the user knows it by.

    Attributes:
        captured: it is part of a graph.
        is_left: both events have been recorded.
        home: the list that it is in.
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
        self.home: Stretches | None = None
        self._start = event_here()
        self._end = event_here()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(_OWN):
            frame = frame.f_back
        self._code = frame.f_code.co_filename if frame is not None else "?"
        self._line = frame.f_lineno if frame is not None else 0

    @property
    def events(self) -> tuple[Any, Any]:
        """The two events."""
        return self._start, self._end

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

    def ended_before(self, other: Stretch) -> bool:
        """Whether this one ended before another one, or at once; both must have been reached."""
        if type(self._end) is not type(other._end):
            return True  # on the host's clock, before CUDA was initialised
        return self._end.elapsed_time(other._end) >= 0  # type: ignore[no-any-return]

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


def read_ms(stretches: Sequence[Stretch], last: Stretch) -> list[float]:
    """Read stretches in one batch, with one wait.

    Args:
        stretches: which; all have been left.
        last: the one that was left last.

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
        last.wait()
        return [stretch.elapsed_ms() for stretch in stretches]
    except RuntimeError:
        # Another stream is behind the last one's, or one of them has never been replayed.
        return [stretch.read_ms() for stretch in stretches]


def last_ended(stretches: Sequence[Stretch]) -> Stretch | None:
    """That of some stretches whose end was passed last, be it in a replay; waits for all of them.

    Args:
        stretches: which; all have been left, the last one last of all.

    Returns:
        None if none of them has been passed.
    """
    found: Stretch | None = None
    if torch.cuda.is_initialized():
        # An event that a graph sets for the first time is not waited for by itself.
        torch.cuda.current_stream().synchronize()
    for stretch in stretches:
        try:
            stretch.wait()
            stretch.elapsed_ms()
        except RuntimeError as error:  # not replayed yet, or never again
            if not any(text in str(error) for text in _NO_TIME_YET):
                raise
            continue
        if found is None or found.ended_before(stretch):
            found = stretch
    return found


class Stretches:
    """Stretches in the order in which they were entered."""

    def __init__(self) -> None:
        self._all: list[Stretch] = []
        self._last: Stretch | None = None
        self._n_open = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_open(self) -> bool:
        """Whether one of them has been entered and not left yet."""
        return self._n_open > 0

    def open(self) -> list[Stretch]:
        """Those that have been entered and not left yet."""
        return [stretch for stretch in self._all if not stretch.is_left]

    def enter(self, stretch: Stretch) -> None:
        """Take one that is being entered."""
        stretch.home = self
        self._all.append(stretch)
        self._n_open += 1

    def leave(self, stretch: Stretch) -> None:
        """Note that one has been left; it may have been entered elsewhere, before all that is here."""
        if stretch.home is not self:
            assert stretch.home is not None
            stretch.home.discard(stretch)
            stretch.home = self
            self._all.insert(0, stretch)
            self._n_open += 1
        self._last = stretch
        self._n_open -= 1

    def discard(self, stretch: Stretch) -> None:
        """Forget one that has not been left."""
        stretch.home = None
        self._all.remove(stretch)
        self._n_open -= 1

    def clear(self) -> None:
        """Forget all."""
        for stretch in self._all:
            stretch.home = None
        self._all = []
        self._last = None
        self._n_open = 0

    def wait(self) -> None:
        """Block the host until the end of the one that was left last has been reached."""
        if self._last is not None:
            read_ms([self._last], self._last)

    def read(self) -> list[tuple[Any, float]]:
        """Contexts and milliseconds of those that have been left; outside of graphs, each once."""
        if self._last is None:
            return []
        left = [stretch for stretch in self._all if stretch.is_left]
        times_ms = read_ms(left, self._last)
        if not all(stretch.captured for stretch in left):
            handed_out = {id(stretch) for stretch in left if not stretch.captured}
            self._all = [stretch for stretch in self._all if id(stretch) not in handed_out]
            if not self._all:
                self._last = None
        return [(stretch.context, time_ms) for stretch, time_ms in zip(left, times_ms, strict=True)]
