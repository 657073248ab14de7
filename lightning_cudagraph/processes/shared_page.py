"""A page of memory that the processes of one machine share, and on which each writes its vote.

A vote over sockets takes a few hundred microseconds and several threads; a replay may take less. A
number of 64 bits is written and read whole, so that nothing else is needed to keep order: it carries the
count of the vote that it belongs to. Votes use two rows in turn: a process that writes the next but one
has seen that all have read the last.

Each process holds a lock on a byte of the file. The kernel takes it back however the process ends, so
that the others can tell which one has ended without telling them. A fork of it, such as a worker of a
loader, does not inherit the lock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

__all__ = ["VALUE_BITS", "SharedPage", "machine"]

# Of each number, the rest is the count of the vote.
VALUE_BITS = 48
_COUNTS = 1 << (63 - VALUE_BITS)
_LEFT = -1
_SHARED_MEMORY = "/dev/shm"
# Another one after each start of a machine; Linux.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ITEM_BYTES = 8
# Looks without yielding the processor, and then with yielding it before each look.
_EAGER_LOOKS = 200
_LOOKS = 20_000


def machine() -> str:
    """A name that processes have in common only if they are on one machine, in one container of it."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{name} {_BOOT_ID.read_text().strip()}"
    return name


class SharedPage:
    """The page, as one process sees it.

    Raises:
        OSError: if there is no such file here, or no locks on it.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        import fcntl  # not on every system; where there is none, there is no `/dev/shm` either

        self._lockf = fcntl.lockf
        self._shared = fcntl.LOCK_SH | fcntl.LOCK_NB  # which several can hold at once
        self._unlock = fcntl.LOCK_UN
        # Open for as long as the page is used: closing the file gives back the lock.
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file).atexit = False
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        numbers = np.frombuffer(mmap.mmap(self._file, _n_bytes(size)), dtype=np.int64)
        self._rows = numbers.reshape(2, size)
        self._rank = rank
        self._count = 0

    @staticmethod
    def create(size: int) -> str:
        """Create the file; returns its path.

        Raises:
            OSError: if the machine has no such memory.
        """
        handle, path = tempfile.mkstemp(prefix="cudagraph-", dir=_SHARED_MEMORY)
        with os.fdopen(handle, "wb") as file:
            file.write(b"\0" * _n_bytes(size))
        return path

    def exchange(self, value: int, wait: Callable[[], None]) -> list[int] | None:
        """Write a number, and read those of all.

        Args:
            value: not negative, and of no more than `VALUE_BITS` bits.
            wait: called again and again when it takes long.

        Returns:
            The numbers in the order of the ranks; None if a process has left.
        """
        self._count += 1
        row, count = self._rows[self._count % 2], self._count % _COUNTS
        row[self._rank] = count << VALUE_BITS | value
        looks = 0
        while True:
            numbers: list[int] = row.tolist()
            if all(number >> VALUE_BITS == count for number in numbers):
                return [number & ((1 << VALUE_BITS) - 1) for number in numbers]
            if _LEFT in numbers:
                return None
            looks += 1
            if looks > _LOOKS:
                wait()
            elif looks > _EAGER_LOOKS:
                os.sched_yield()

    def leave(self, takes_back: bool) -> None:
        """Tell the others that this process takes part in no other vote.

        Args:
            takes_back: nor in the one at hand, in which others may still wait for its number or read it.
        """
        self._rows[(self._count + 1) % 2, self._rank] = _LEFT
        if takes_back:
            self._rows[:, self._rank] = _LEFT

    def gone(self) -> list[int]:
        """The processes that have ended, and have not said that they leave."""
        gone = [rank for rank in range(self._rows.shape[1]) if not self._is_alive(rank)]
        left = (self._rows == _LEFT).any(axis=0)  # read behind that: a process says so before it ends
        return [rank for rank in gone if not left[rank]]

    def _is_alive(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        try:
            self._lockf(self._file, self._shared, 1, rank)
        except OSError:
            return True
        self._lockf(self._file, self._unlock, 1, rank)
        return False


def _n_bytes(size: int) -> int:
    return _ITEM_BYTES * 2 * size
