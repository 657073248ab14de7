"""A thread that waits in C code, seen from another thread, and an exception for it."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import FrameType


class WaitingThread:
    """The thread that makes this object."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._place: tuple[FrameType, int] | None = None

    def stands_still(self) -> bool:
        """True if the thread is at the same instruction of the same call as at the last look."""
        earlier = self._place
        frame = sys._current_frames().get(self._ident)
        self._place = None if frame is None else (frame, frame.f_lasti)
        return self._place == earlier

    def throw(self, error: type[BaseException]) -> None:
        """Raise an exception in the thread as soon as it is back from C code.

        Args:
            error: a class that is called without arguments.
        """
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), ctypes.py_object(error))
