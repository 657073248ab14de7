"""The exceptions of this package; docs/errors.md lists them.

Each message says, in this order: what happened, to which object, what was expected and what was found,
one remedy, and how to go on without a graph. Code that raises one writes all but the last, which the
class adds.
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
    """An argument, or a use of the callback, that is wrong for every training run."""


class UnsupportedError(CUDAGraphError):
    """A part of the run that is not captured, because a graph of it would not give the same numbers.

    Args:
        reason: what was found, in which object, and what was expected.
        remedy: one thing to do about it.
        in_optimizer: True if only code after the backward pass is concerned, so that forward and
            backward can still be captured. Default: False.
    """

    def __init__(self, reason: str, remedy: str, *, in_optimizer: bool = False) -> None:
        self.reason = reason
        self.remedy = remedy
        self.in_optimizer = in_optimizer
        super().__init__(f"{reason} {remedy} {_RUN_EAGERLY}")


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
    """A hook in the middle of a replayed step that did something the rest of the graph cannot follow.

    The forward pass has been replayed and the hook has run, so the step cannot be repeated.

    Args:
        reason: what the hook did, and what was expected.
        remedy: one thing to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f'{reason} {remedy} To train without graphs, pass `backend="off"`.')


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
