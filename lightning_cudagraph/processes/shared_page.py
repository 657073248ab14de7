"""Votes in shared memory, for the processes of one machine.

A vote over sockets takes a few hundred microseconds and several threads; a replay may take less. Here
each process writes its vote into a page as one number of 64 bits, with the count of the vote in it. Such
writes are atomic, so nothing else is needed for synchronisation. Votes alternate between two rows: a
process that writes to a row again knows that all have read the last vote there.

Each process holds a lock on a byte of the file. The kernel releases it however the process ends, so that
the others detect the end. A fork, such as a dataloader worker, does not inherit the lock.
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

# The bits of the value in a number; the rest is the count of the vote.
VALUE_BITS = 48
_COUNTS = 1 << (63 - VALUE_BITS)
_LEFT = -1
_SHARED_MEMORY = "/dev/shm"
# Linux; another id after each boot.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ITEM_BYTES = 8
# Polls without yielding the processor, then polls with `sched_yield`, then the caller's `wait`.
_EAGER_LOOKS = 200
_LOOKS = 20_000


def machine() -> str:
    """An id that processes share only if they run on one machine, in one container."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{name} {_BOOT_ID.read_text().strip()}"
    return name


class SharedPage:
    """The shared page of one process; an `OSError` if there is no file, or no lock on it."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        import fcntl  # missing on systems that have no `/dev/shm` either

        self._lockf = fcntl.lockf
        self._shared = fcntl.LOCK_SH | fcntl.LOCK_NB  # several processes can hold it at once
        self._unlock = fcntl.LOCK_UN
        # Kept open with the page: closing the file releases the lock.
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file).atexit = False
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        numbers = np.frombuffer(mmap.mmap(self._file, _n_bytes(size)), dtype=np.int64)
        self._rows = numbers.reshape(2, size)
        self._rank = rank
        self._count = 0

    @staticmethod
    def create(size: int) -> str:
        handle, path = tempfile.mkstemp(prefix="cudagraph-", dir=_SHARED_MEMORY)
        with os.fdopen(handle, "wb") as file:
            file.write(b"\0" * _n_bytes(size))
        return path

    def exchange(self, value: int, wait: Callable[[], None]) -> list[int] | None:
        """Write a value of `VALUE_BITS` bits, and read those of all by rank; None if one has left.

        `wait` is called between polls once the exchange takes long.
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
        """Mark that this process takes part in no further vote.

        Args:
            takes_back: True to withdraw from the present vote, too, in which others may still wait for
                its value or read it.
        """
        self._rows[(self._count + 1) % 2, self._rank] = _LEFT
        if takes_back:
            self._rows[:, self._rank] = _LEFT

    def gone(self) -> list[int]:
        """The ranks of processes that have ended without `leave`."""
        gone = [rank for rank in range(self._rows.shape[1]) if not self._is_alive(rank)]
        left = (self._rows == _LEFT).any(axis=0)  # read after the locks: set before the end
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
