"""A function that is called when Python ends, whichever way a process comes to it."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable

__all__ = ["AtExit", "uncaught_error"]


def uncaught_error() -> BaseException | None:
    """The error that has ended the program, if it was not caught; known while Python ends."""
    last: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    return last


class AtExit:
    """A function that is called when Python ends, in this process and not in forks of it.

    Args:
        act: the function, given the error that has ended the program, or None.
    """

    def __init__(self, act: Callable[[BaseException | None], object]) -> None:
        self._act = act
        self._pid = os.getpid()
        self._earlier = uncaught_error()
        atexit.register(self)
        # Processes that `multiprocessing` forks leave without the above.
        self._finalizer = multiprocessing.util.Finalize(None, self, exitpriority=0)

    def __call__(self) -> None:
        """Call it, because Python ends."""
        if os.getpid() == self._pid:
            error = uncaught_error()
            # Shells keep the error of a line, and go on.
            self._act(None if error is self._earlier else error)

    def cancel(self) -> None:
        """Do not call it."""
        atexit.unregister(self)
        self._finalizer.cancel()
