"""Every error of this package that a user can meet; docs/errors.md lists them.

Each message answers five questions in this order: what happened, to which object, what was expected
and what was found, what to do about it, and how to go on without a graph. Code that raises one of
these writes the first three; the class adds the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "BatchError",
    "CUDAGraphError",
    "CaptureError",
    "ConfigurationError",
    "HookError",
    "PeerError",
    "StaleGraphError",
    "TimerError",
    "UnsupportedError",
    "VerificationError",
    "Wording",
]

_RUN_EAGERLY = (
    'To train on without a graph where this happens, pass `CUDAGraphCallback(on_unsupported="eager")`;'
    ' to switch graphs off altogether, pass `backend="off"`.'
)


class CUDAGraphError(RuntimeError):
    """Base class of all errors raised by this package."""


class ConfigurationError(CUDAGraphError, ValueError):
    """An argument, or the way the callback is used, cannot be right for any training run."""


class UnsupportedError(CUDAGraphError):
    """Something about the run cannot be held to the same numbers in a graph, so it is not captured.

    Args:
        reason: what was found, in which object, and what would be expected.
        remedy: one thing to do about it.
        in_optimizer: it concerns only what comes after the backward pass, so that forward and backward
            can still be captured.
    """

    def __init__(self, reason: str, remedy: str, *, in_optimizer: bool = False) -> None:
        self.reason = reason
        self.remedy = remedy
        self.in_optimizer = in_optimizer
        super().__init__(f"{reason} {remedy} {_RUN_EAGERLY}")


class CaptureError(UnsupportedError):
    """The step did something that no CUDA graph can hold.

    The capture has been ended and undone: parameters, gradients, optimizer state, random state,
    Lightning's counters and the Python objects that are watched (those that can be reached from the
    model, and from the globals and closures of the step's code) are what they were before the step. What
    the step did to other Python objects has been done.
    """


class VerificationError(UnsupportedError):
    """A replay came to other numbers than an eager step from the same state.

    All tensors have been put back to what they were before the step. What the eager step of the check
    did to Python objects has been done.
    """


class StaleGraphError(VerificationError):
    """A replay came to other numbers than an eager step, because of a change since the capture.

    Handled by this package: the step is done eagerly, and the graph is captured again.
    """


@dataclass(frozen=True)
class Wording:
    """The words of a front end in the messages of this package.

    Messages are written for training steps and `CUDAGraphCallback`, in nearly a hundred places, most of
    which are handed nothing of the front end (modes of the dispatcher, walks over objects). So the other
    front ends put in their own words where a message leaves the engine. `tests/test_wording.py` holds
    that each part to be replaced still occurs in a message.

    Attributes:
        steps: its steps, as the beginning of a sentence.
        signature: what tells its graphs apart.
        signatures: the same of several.
        words: its own for parts of messages, by these; longer ones first.
    """

    steps: str = "Training"
    signature: str = "batch signature"
    signatures: str = "batch signatures"
    words: Mapping[str, str] = field(default_factory=dict)

    def of(self, text: str) -> str:
        """Put the words of this front end into a text."""
        for old, new in self.words.items():
            text = text.replace(old, new)
        return text

    def rephrase(self, error: UnsupportedError) -> None:
        """Put them into all that an error says."""
        error.reason, error.remedy = self.of(error.reason), self.of(error.remedy)
        error.args = tuple(map(self.of, error.args))


class HookError(CUDAGraphError):
    """A hook in the middle of a replayed step did what the rest of the graph cannot take into account.

    The forward pass has been replayed and the hook has run; the step cannot be done again.

    Args:
        reason: what the hook did, and what was expected.
        remedy: one thing to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f'{reason} {remedy} To train without graphs, pass `backend="off"`.')


class TimerError(CUDAGraphError):
    """A timer, or a profiler, was used in a way from which no time can come. No work was harmed.

    Args:
        reason: what was done to which one, and what was expected.
        remedy: one thing to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")


class PeerError(CUDAGraphError):
    """Another process of the run has failed, or does something else; this one cannot go on alone."""

    is_told = True  # the other processes know of it, or come to it by themselves


class BatchError(UnsupportedError):
    """A batch holds tensors in a place from which no static copy can be made."""
