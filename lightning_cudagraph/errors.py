"""Every error of this package that a user can meet; docs/errors.md lists them.

Each message answers five questions in this order: what happened, to which object, what was expected
and what was found, what to do about it, and how to go on without a graph. Code that raises one of
these writes the first three; the class adds the way out.
"""

from __future__ import annotations

from collections.abc import Mapping

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

    def rephrase(self, words: Mapping[str, str]) -> None:
        """Put other words in the place of some, in all that the error says.

        Args:
            words: the new by the old.
        """
        (message,) = self.args
        for old, new in words.items():
            self.reason, self.remedy = self.reason.replace(old, new), self.remedy.replace(old, new)
            message = message.replace(old, new)
        self.args = (message,)


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
