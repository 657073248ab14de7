"""A function that is called at the exit of Python, even of a process forked by `multiprocessing`."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable


def uncaught_error() -> BaseException | None:
    """The uncaught error that has ended the program; known at the exit of Python."""
    last: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    return last


class AtExit:
    """A function that is called at the exit of Python, in this process and not in forks of it."""

    def __init__(self, act: Callable[[BaseException | None], object]) -> None:
        self._act = act
        self._pid = os.getpid()
        self._earlier = uncaught_error()
        atexit.register(self)
        # Processes that `multiprocessing` has forked exit without `atexit`.
        self._finalizer = multiprocessing.util.Finalize(None, self, exitpriority=0)

    def __call__(self) -> None:
        """Call the function: Python exits."""
        if os.getpid() == self._pid:
            error = uncaught_error()
            # An interactive shell keeps the error of a line, and goes on.
            self._act(None if error is self._earlier else error)

    def cancel(self) -> None:
        atexit.unregister(self)
        self._finalizer.cancel()
