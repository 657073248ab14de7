"""The end of Python, whichever way a process comes to it."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable

__all__ = ["AtEnd", "uncaught_error"]


def uncaught_error() -> BaseException | None:
    """What has ended the program, if nobody has caught it; known while Python ends."""
    last: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    return last


class AtEnd:
    """Something that is done when Python ends, in this process and not in forks of it.

    Args:
        act: does it, given what has ended the program, or None if that was no error.
    """

    def __init__(self, act: Callable[[BaseException | None], object]) -> None:
        self._act = act
        self._pid = os.getpid()
        self._earlier = uncaught_error()
        atexit.register(self)
        # Processes that `multiprocessing` forks leave without the above.
        self._finalizer = multiprocessing.util.Finalize(None, self, exitpriority=0)

    def __call__(self) -> None:
        """Python ends."""
        if os.getpid() == self._pid:
            error = uncaught_error()
            # Shells keep what ended a line of theirs, and go on.
            self._act(None if error is self._earlier else error)

    def cancel(self) -> None:
        """Do nothing then."""
        atexit.unregister(self)
        self._finalizer.cancel()
