"""A page of memory that the processes of one machine share, and on which each writes a number.

A message over a socket takes a few hundred microseconds and several threads; a replay may take less. A
number of 64 bits is written and read whole, so that nothing else is needed to keep order: it carries the
count of the exchange that it belongs to. Two exchanges use two rows in turn: who writes the next but one
has seen that all have read the last.

A file is no proof of memory that is shared: several machines can see one folder over a network, and each
then maps pages of its own. So processes first compare the names of their machines.

Each process holds a lock on a byte of the file. The kernel takes it back however the process ends, so
that the others can tell who is gone without a word. A fork of it, such as a worker of a loader, has no
part in the lock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl as _fcntl
except ImportError:  # not on every system
    _locks: Any = None
else:
    _locks = _fcntl

__all__ = ["VALUE_BITS", "Board", "machine"]

# Of each number, the rest is the count of the exchange.
VALUE_BITS = 48
_COUNTS = 1 << (63 - VALUE_BITS)
_LEFT, _ENDED = -1, -2
_SHARED = "/dev/shm"
# Another one after each start of a machine; Linux.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ITEM_BYTES = 8
# Without giving way to others, and then giving way before each look.
_EAGER_LOOKS = 200
_LOOKS = 20_000
# Not on every system.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def machine() -> str:
    """A name that processes have in common only if they are on one machine, in one container of it."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{name} {_BOOT_ID.read_text().strip()}"
    return name


class Board:
    """The page, as one process sees it.

    Args:
        path: of the file that it is mapped from.
        rank: of this process.
        size: how many processes there are.

    Raises:
        OSError: if there is no such file here, or no locks on it.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        if _locks is None:
            raise OSError("there are no locks on files here")
        # Open for as long as the page is used: whoever closes the file gives back the lock.
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file).atexit = False
        _locks.lockf(self._file, _locks.LOCK_EX | _locks.LOCK_NB, 1, rank)
        self._page = mmap.mmap(self._file, _n_bytes(size))
        numbers = np.frombuffer(self._page, dtype=np.int64)
        self.token = int(numbers[0])
        self._rows = [numbers[1 : 1 + size], numbers[1 + size :]]
        self._rank = rank
        self._count = 0

    @staticmethod
    def made(size: int) -> tuple[str, int]:
        """Make the file; returns its path, and a number by which others can tell that it is this one."""
        folder = _SHARED if os.access(_SHARED, os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="cudagraph-", dir=folder)
        token = secrets.randbits(62)
        with os.fdopen(handle, "wb") as file:
            file.write(token.to_bytes(_ITEM_BYTES, "little").ljust(_n_bytes(size), b"\0"))
        return path, token

    def exchange(self, value: int, wait: Callable[[], None]) -> list[int] | None:
        """Write a number, and read those of all.

        Args:
            value: not negative, and of no more than `VALUE_BITS` bits.
            wait: called again and again when it takes long.

        Returns:
            The numbers in the order of the ranks; None if a process has left, or has ended.
        """
        self._count += 1
        row, count = self._rows[self._count % 2], self._count % _COUNTS
        row[self._rank] = count << VALUE_BITS | value
        looks = 0
        while True:
            numbers: list[int] = row.tolist()
            if all(number >> VALUE_BITS == count for number in numbers):
                return [number & ((1 << VALUE_BITS) - 1) for number in numbers]
            if _LEFT in numbers or _ENDED in numbers:
                return None
            looks += 1
            if looks > _LOOKS:
                wait()
            elif looks > _EAGER_LOOKS:
                _give_way()

    def end(self, well: bool) -> None:
        """Tell who comes to another exchange that this process does not.

        Args:
            well: because it has come to its end, and not to an error.
        """
        row = self._rows[(self._count + 1) % 2]  # that of this exchange may still be read
        row[self._rank] = _ENDED if well else _LEFT

    def leave(self) -> None:
        """Tell who waits for this process that it does not come any more, whatever it has said."""
        for row in self._rows:
            row[self._rank] = _LEFT

    def ended(self) -> list[int]:
        """The processes that have come to their end; others may have left because of it."""
        return [rank for rank, said in enumerate(self._said()) if _ENDED in said]

    def gone(self) -> list[int]:
        """The processes that are gone, and have not said that they leave."""
        gone = [rank for rank in range(len(self._rows[0])) if not self._is_here(rank)]
        said = self._said()  # read behind that, because who leaves says so first
        return [rank for rank in gone if _LEFT not in said[rank] and _ENDED not in said[rank]]

    def _said(self) -> list[tuple[int, ...]]:
        return [*zip(*(row.tolist() for row in self._rows), strict=True)]

    def _is_here(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        try:
            # Which several can hold at once, so that none who looks is taken for who is looked for.
            _locks.lockf(self._file, _locks.LOCK_SH | _locks.LOCK_NB, 1, rank)
        except OSError:
            return True
        _locks.lockf(self._file, _locks.LOCK_UN, 1, rank)
        return False


def _n_bytes(size: int) -> int:
    return _ITEM_BYTES * (1 + 2 * size)
