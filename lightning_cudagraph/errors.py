"""The exceptions of this package; docs/errors.md lists them.

Each message says, in this order: what happened, to which object, what was expected and what was found,
the user's line, one remedy, and how to go on without a graph. Code that raises one gives the parts, of
which the class makes the lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

__all__ = [
    "BatchError",
    "CUDAGraphError",
    "CaptureError",
    "CheckError",
    "ConfigurationError",
    "HookError",
    "PeerError",
    "StaleGraphError",
    "TimerError",
    "UnsupportedError",
    "VerificationError",
]

_WAY_OUT = (
    'To train on without a graph, pass `CUDAGraphCallback(on_unsupported="eager")`; to switch graphs off'
    ' altogether, pass `backend="off"`.'
)
_SEVERAL = " things keep the training step from being captured:"


def see(recipe: str) -> str:
    """The end of a remedy: the page of docs/recipes that shows it."""
    return f" See docs/recipes/{recipe}.md."


# How to leave the optimizer out of the graph, in a sentence by itself and as a second remedy.
FORWARD_BACKWARD = (
    'pass `CUDAGraphCallback(scope="forward_backward")`, with which the optimizer steps eagerly'
)
OR_FORWARD_BACKWARD = 'pass `scope="forward_backward"`'
# What a tensor needs to take the place of a Python number, bit for bit.
AS_NUMBER = (
    "of float64: use it as it is beside tensors with dimensions, and `number.to(loss.dtype) * loss` only"
    " where it meets a loss, which has none"
)
# In texts of objects without one of their own; another in each run, and of no use to the reader.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def without_addresses(text: str) -> str:
    """A text without addresses of memory, as in `<Net object at 0x7f02891ab850>`."""
    return _ADDRESS.sub("", text)


def first_of(names: Sequence[str], most: int) -> str:
    """The first of some names, and the number of the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True)
class Location:
    """A line of source, and the line of a library that it comes to, if it does."""

    path: str
    line: int
    source: str
    called: Location | None = None
    function: str = ""

    def __str__(self) -> str:
        return ", ".join(self.lines)

    @property
    def lines(self) -> list[str]:
        text = f"{self.path}:{self.line}" + (f" (`{self.source}`)" if self.source else "")
        if self.called is None:
            return [text]
        called, *more = self.called.lines
        return [text, f"which comes to {called}", *more]


@dataclass(frozen=True)
class AskedFor:
    """The subject of an error for what happens later than the user's line asks for it."""

    name: str


@dataclass(frozen=True)
class Finding:
    """One thing in a run that keeps a step from being captured.

    Attributes:
        what: what was found, in a sentence.
        remedy: one thing to do about it.
        location: the user's line, if there is one.
        in_optimizer: True if only code after the backward pass is concerned.
        is_effect: True for an effect on the host, which is to happen outside of the step.
    """

    what: str
    remedy: str
    location: Location | None = None
    in_optimizer: bool = False
    is_effect: bool = False

    @property
    def lines(self) -> list[str]:
        """The finding in lines: the description, the place, the remedy."""
        if self.location is None:
            return [self.what, f"  Remedy: {self.remedy}"]
        at, *called = self.location.lines
        found = [f"  found at {at}", *(f"  {line}" for line in called)]
        return [self.what, *found, f"  Remedy: {self.remedy}"]

    @property
    def reason(self) -> str:
        """The description and the place, in one line."""
        if self.location is None:
            return self.what
        return f"{self.what.removesuffix('.')}: found at {self.location}."

    @property
    def place(self) -> tuple[str, int]:
        """The file and the number of the user's line, not of a library's; `("", 0)` if there is none."""
        return ("", 0) if self.location is None else (self.location.path, self.location.line)

    @property
    def key(self) -> Hashable:
        """The finding and the user's line, on which several lines of a library are one finding."""
        return self.what, self.location and replace(self.location, called=None)


class CUDAGraphError(RuntimeError):
    """Base class of all errors raised by this package."""


class ConfigurationError(CUDAGraphError, ValueError):
    """An argument, or a use of the callback, that is wrong for every training run."""


def wrong_argument(owner: str, name: str, value: object, expected: str) -> ConfigurationError:
    """Return the error for an invalid argument of `owner`, with the valid values in words."""
    is_long = hasattr(value, "__dict__") and not hasattr(value, "__dataclass_fields__")
    shown = type(value).__qualname__ if is_long else value
    return ConfigurationError(f"`{owner}({name}={shown!r})`: expected {expected}.")


class UnsupportedError(CUDAGraphError):
    """A part of the run that is not captured, because a graph of it would not give the same numbers.

    Its message has three lines: what was found, where, and what to do; or a numbered list of these.

    Args:
        what: what was found, in which object, and what was expected.
        remedy: one thing to do about it.
        in_optimizer: True if only code after the backward pass is concerned, so that forward and
            backward can still be captured. Default: False.
        location: the user's line, if there is one.
    """

    def __init__(
        self, what: str, remedy: str, *, in_optimizer: bool = False, location: Location | None = None
    ) -> None:
        super().__init__(what, remedy)
        self.what = without_addresses(what)
        self.remedy = without_addresses(remedy)
        self.in_optimizer = in_optimizer
        self.location = location
        self.is_effect = False
        self.subject: Hashable = None  # what several checks find, each with other words
        self.search_ended_by = ""
        self._others: tuple[Finding, ...] = ()
        self._wording = Wording()

    def __str__(self) -> str:
        first, *others = self.findings
        lines = first.lines
        if others:
            lines = [f"{1 + len(others)}{self._wording.of(_SEVERAL)}"]
            for number, finding in enumerate(self.findings, start=1):
                what, *more = finding.lines
                lines += [f"{number}. {what}", *(f" {line}" for line in more)]
        if self.search_ended_by:
            listed = [finding.reason for finding in self.findings]
            ended = f": {self.search_ended_by}"
            if self.search_ended_by in listed:
                ended = f", behind number {1 + listed.index(self.search_ended_by)}." if others else "."
            lines.append(f"The search ended early, so there can be more{ended}")
        return "\n".join([*lines, self._wording.of(_WAY_OUT)])

    @property
    def reason(self) -> str:
        """The description and the place, in one line."""
        return self.findings[0].reason

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that keeps the step from being captured: the finding of this error first."""
        first = Finding(self.what, self.remedy, self.location, self.in_optimizer, self.is_effect)
        return first, *self._others

    def add_findings(
        self,
        found: Iterable[Finding],
        ended_by: str = "",
        group: Callable[[Iterable[Finding]], Iterable[Finding]] = tuple,
    ) -> None:
        """Add what else was found in the same step to the error, and to its message.

        Args:
            ended_by: what has ended the search before the end of the step, in words; or nothing.
            group: puts findings that one change settles into one.
        """
        self.search_ended_by = without_addresses(ended_by)
        known = {finding.key for finding in self.findings}
        new = [finding for finding in found if finding.key not in known]
        first, *others = group([*self.findings, *new])
        self.what, self.remedy, self._others = first.what, first.remedy, tuple(others)
        self.location, self.in_optimizer = first.location, first.in_optimizer
        self.is_effect = first.is_effect


class CaptureError(UnsupportedError):
    """An operation of the step that no CUDA graph can hold.

    The capture has been ended and undone: parameters, gradients, optimizer state, random state,
    Lightning's counters and the watched Python objects (those that can be reached from the model, and
    from the globals and closures of the step's code) are as they were before the step. Changes that the
    step made to other Python objects remain.
    """


class VerificationError(UnsupportedError):
    """A replay with other results than an eager step from the same state.

    All tensors have been restored to their values before the step. Changes that the eager step of the
    check made to Python objects remain.
    """


class StaleGraphError(VerificationError):
    """A replay with other results than an eager step, because of a change since the capture.

    Handled inside this package: the step runs eagerly, and the graph is captured again.
    """


def begun(text: str) -> str:
    """A text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Wording:
    """The words of a front end in the messages of this package.

    Messages are written for training steps and `CUDAGraphCallback`, in nearly a hundred places, most of
    which are handed nothing of the front end (modes of the dispatcher, walks over objects). So the other
    front ends put in their own words where a message leaves the engine. `tests/test_wording.py` holds
    that each part to be replaced still occurs in a message.

    Attributes:
        steps: its steps, as the beginning of a sentence.
        words: its own for parts of messages, by these, also where they begin a sentence; longer ones
            first.
    """

    steps: str = "Training"
    signature: str = "batch signature"
    signatures: str = "batch signatures"
    words: Mapping[str, str] = field(default_factory=dict)

    def of(self, text: str) -> str:
        """Put the words of this front end into a text."""
        for old, new in self.words.items():
            text = text.replace(old, new).replace(begun(old), begun(new))
        return text

    def rephrase(self, error: UnsupportedError) -> None:
        """Put them into all that an error says."""
        error.what, error.remedy = self.of(error.what), self.of(error.remedy)
        error.search_ended_by = self.of(error.search_ended_by)
        error._wording = self
        error._others = tuple(
            replace(finding, what=self.of(finding.what), remedy=self.of(finding.remedy))
            for finding in error._others
        )


class HookError(CUDAGraphError):
    """A hook in the middle of a replayed step that did something the rest of the graph cannot follow.

    The forward pass has been replayed and the hook has run, so the step cannot be repeated.

    Args:
        reason: what the hook did, and what was expected.
        remedy: one thing to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f'{reason} {remedy} To train without graphs, pass `backend="off"`.')


class CheckError(CUDAGraphError):
    """A check of a replayed step that fails, where a plain run would have raised an exception.

    Args:
        replays: the number of replays before that of the step.
        numbers: numbers beside its batch, by name.
        location: the user's line, if there is one.
    """

    def __init__(self, replays: int, numbers: Mapping[str, int], location: Location | None) -> None:
        named = ", ".join(f"`{name}` {number}" for name, number in numbers.items())
        of = f" ({named})" if named else ""
        at = [] if location is None else [f"  {line}" for line in location.lines]
        first = f"In replay {replays + 1}{of}, a check on the host failed. A plain run raises there:"
        last = (
            "A replay raises nothing: this step has run to its end, and later ones may have been"
            ' launched since. To get the exception itself, in its step, pass `backend="off"`.'
        )
        super().__init__("\n".join([first, *at, last]))
        self.location = location


class TimerError(CUDAGraphError):
    """A use of a timer or a profiler that yields no time. The timed work is unaffected.

    Args:
        reason: what was done to which timer, and what was expected.
        remedy: one thing to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")


class PeerError(CUDAGraphError):
    """A failure or a different plan of another process of the run; this one cannot go on alone."""

    is_told = True  # the other processes know of the error, or find it by themselves


class BatchError(UnsupportedError):
    """A batch with tensors in an object of which no static copy can be made."""
