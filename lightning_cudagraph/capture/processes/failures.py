"""Failures of single processes of a run, so that none waits for one that does not come any more.

A process that fails leaves its error in the store that the process group was made with. The others find
it while they wait for one another, or, where they wait for a collective, in a thread that looks now and
then; so they end with the reason in seconds, and do not wait for what will not come.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_cudagraph.errors import PeerError

__all__ = ["LOOK_EVERY", "Failures"]

_FAILED = "failed"
# How often somebody who waits looks whether another process has failed.
LOOK_EVERY = timedelta(seconds=1)
_LOOK_EVERY_S = LOOK_EVERY.total_seconds()
# From the moment a process knows that another has failed, until what it waits for is ended; and from
# then on, until it ends by force.
_ABORT_AFTER_S = 3.0
_GRACE_S = 15.0
# How long the device may take for what is launched, before it is taken to wait for other processes.
_DRAIN_S = 5.0
# How long a process that fails, and has the store, waits for the others to read why.
_READ_TIMEOUT_S = 3.0


class Failures:
    """What this process knows of failures of the others, and tells them of its own.

    Args:
        store: a part of the store, of one run.
        rank: of this process.
        size: how many processes there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._failed: str | None = None
        # What this process says of its own failure: who finds just that has found no other's.
        self._own: str | None = None
        self._traceback = ""
        self._has_said = False
        self._looked_s = 0.0
        self._device = torch.device("cpu")
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        self._is_ending_waits = threading.Lock()  # for good
        self._aborting: threading.Thread | None = None

    def watch(self, device: torch.device) -> None:
        """From now on, end this process with one that has failed.

        Args:
            device: what this process trains on.
        """
        self._device = device
        if self._watch is None:
            self._watch = threading.Thread(target=self._look_out, name="cudagraph-ranks", daemon=True)
            self._watch.start()

    def close(self) -> None:
        """Look no more.

        Graphs have been let go of by now, so that NCCL can come back from what ends its waits. Python
        must not end before: a thread that comes back then ends the process with a signal.
        """
        self._closed.set()
        if self._watch is not None:
            self._watch.join(2 * _LOOK_EVERY_S)
        if self._aborting is not None:
            self._aborting.join(_GRACE_S)
            if self._aborting.is_alive():
                self._end_by_force()

    def nap(self, seconds: float) -> None:
        """Wait for a moment, and look now and then.

        Raises:
            PeerError: if another process has failed.
        """
        self._closed.wait(seconds)
        self.look_now_and_then()

    def look_now_and_then(self) -> None:
        """Look, if the last look was long ago; to be called often.

        Raises:
            PeerError: if another process has failed.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self.look()

    def look(self) -> None:
        """Ask the store.

        Raises:
            PeerError: if another process has failed.
        """
        if self._found() and self._failed != self._own:
            raise self.error("")

    def error(self, otherwise: str) -> PeerError:
        """The error for what another process has met.

        Args:
            otherwise: what there is to say if it has left no word.
        """
        deadline_s = time.monotonic() + _READ_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            while not self._found() and time.monotonic() < deadline_s:
                self._closed.wait(0.05)
        return PeerError(
            f"Another process of the run has failed, and rank {self._rank} ends with it:"
            f" {self._failed or otherwise}"
        )

    def tell(self, error: BaseException, leave: Callable[[], None]) -> None:
        """This process ends: let the others know why, and wait for nothing that they leave.

        Args:
            error: why.
            leave: called once the reason is told.
        """
        if not (self._closed.is_set() or isinstance(error, PeerError)):
            text = f"rank {self._rank}: {type(error).__name__}: {error}"
            self._own = text.encode(errors="backslashreplace").decode()
            # In words: its frames hold what is let go of meanwhile.
            self._traceback = "".join(traceback.format_exception(error))
            # The store can be gone, with the process that had it.
            with contextlib.suppress(RuntimeError):
                self._leave_word(self._own, leave)
        if self._is_stuck():
            self._end_waits()

    def _leave_word(self, text: str, leave: Callable[[], None]) -> None:
        try:
            # If another one has left it already, that is why this one fails.
            self._failed = self._store.compare_set(_FAILED, "", text).decode()
            self._say_why()
            self._store.set(f"read/{self._rank}", "")
        finally:
            leave()
        if self._rank == 0:
            others = [f"read/{rank}" for rank in range(1, self._size)]
            deadline_s = time.monotonic() + _READ_TIMEOUT_S
            while time.monotonic() < deadline_s and not self._store.check(others):
                self._closed.wait(0.05)

    def _found(self) -> bool:
        """Whether a process has left an error, be it this one."""
        if self._failed is None and self._store.check([_FAILED]):
            self._failed = self._store.get(_FAILED).decode()
            self._store.set(f"read/{self._rank}", "")
        return self._failed is not None

    def _is_stuck(self) -> bool:
        """Whether what this process has launched waits for what others will not launch any more."""
        if self._device.type != "cuda":
            return False
        launched = torch.cuda.Event()
        try:
            launched.record(torch.cuda.current_stream(self._device))
            deadline_s = time.monotonic() + _DRAIN_S
            while not launched.query():
                if time.monotonic() > deadline_s:
                    return True
                threading.Event().wait(0.01)
        except RuntimeError:
            pass  # the device is lost, and waits for nothing
        return False

    def _look_out(self) -> None:
        """In a thread: end this process with one that has failed, wherever it may be waiting."""
        while not self._closed.wait(_LOOK_EVERY_S):
            try:
                found = self._found()
            except RuntimeError:
                found, self._failed = True, self._failed or "the process with rank 0 has ended"
            if found:
                break
        else:
            return
        if self._device.type != "cuda":
            # Collectives between hosts end with the process that does not come, and do not say why.
            self._say_why("knows that")
            return
        self._say_why()
        if self._closed.wait(_ABORT_AFTER_S):
            return
        self._end_waits()
        if not self._closed.wait(_GRACE_S):
            self._end_by_force()

    def _end_waits(self) -> None:
        """End what waits for other processes on the device, if nobody does so yet.

        In a thread: NCCL waits in turn for the graphs, which are let go of meanwhile, or never.
        """
        if self._is_ending_waits.acquire(blocking=False):
            thread = threading.Thread(target=_abort, name="cudagraph-abort", daemon=True)
            thread.start()
            self._aborting = thread

    def _end_by_force(self) -> None:
        # Python does not come to show the error of this process any more.
        _say(f"{self._traceback}lightning_cudagraph: rank {self._rank} ends by force")
        os._exit(1)

    def _say_why(self, what: str = "ends, because") -> None:
        if not self._has_said and self._failed != self._own:
            self._has_said = True
            _say(
                f"lightning_cudagraph: rank {self._rank} {what} another process has failed:"
                f" {self._failed}"
            )


def _say(text: str) -> None:
    # Whoever reads may be gone, as `tee` is with Ctrl-C, and the process must end all the same.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _abort() -> None:
    world: Any = dist.group.WORLD
    if world is not None and hasattr(world, "abort"):
        world.abort()
