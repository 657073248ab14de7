"""Failures of single processes of a run, so that none waits for one that does not come any more.

A process that fails leaves its error in the store that the process group was made with. The others find
it while they wait for one another, or, where they wait for a collective, in a thread that looks now and
then; so they end with the reason in seconds, and do not wait for what will not come. Processes that
share a page see there who is gone without a word.

The store is gone with the process that has it, mostly that of rank 0. So this one, however it ends,
waits a moment until the others need the store no more.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from lightning_cudagraph.capture.processes.board import Board
from lightning_cudagraph.errors import PeerError

__all__ = ["LOOK_EVERY", "Failures"]

_FAILED = "failed"
# Where a process says that it has come to its end; and that it has read why the others end, or ends.
_ENDED = "ended"
_READ = "read"
# How often somebody who waits looks whether another process has failed.
LOOK_EVERY = timedelta(seconds=1)
_LOOK_EVERY_S = LOOK_EVERY.total_seconds()
# From the moment a process knows that another has failed, until what it waits for is ended; and from
# then on, until it ends by force.
_ABORT_AFTER_S = 3.0
_GRACE_S = 15.0
# How long the device may take for what is launched, before it is taken to wait for other processes.
_DRAIN_S = 5.0
# How long a process that ends, and has the store, waits for the others to read why.
_READ_TIMEOUT_S = 3.0
_POLL_S = 0.02


class Failures:
    """What this process knows of failures of the others, and tells them of its own.

    Args:
        store: a part of the store, of one run.
        rank: of this process.
        size: how many processes there are.

    Attributes:
        board: the page that all processes share, if there is one.
    """

    board: Board | None = None

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._failed: str | None = None
        # What this process says of its own failure: who finds just that has found no other's.
        self._own: str | None = None
        # The error that this process has come to by itself, though it is about another one. A weak
        # reference, because its frames hold what is let go of meanwhile.
        self._found_alone: Callable[[], PeerError | None] = lambda: None
        self._store_may_go = False  # its process has come to a good end
        self._traceback = ""  # in words, for the same reason
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
        now_s = monotonic()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self.look()

    def look(self) -> None:
        """Ask the store.

        Raises:
            PeerError: if another process has failed.
        """
        if self._found():
            if self._failed != self._own:
                raise self.error("")
        elif text := self._text_of_gone():
            raise self.alone(f"{text}, and rank {self._rank} ends with it.")

    def error(self, otherwise: str) -> PeerError:
        """The error for what another process has met.

        Args:
            otherwise: what there is to say if it has left no word.
        """
        deadline_s = monotonic() + _READ_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            while not self._found() and monotonic() < deadline_s:
                self._closed.wait(0.05)
        text = f"Another process of the run has failed, and rank {self._rank} ends with it:"
        if self._failed is None:
            return self.alone(f"{text} {self._text_of_gone() or otherwise}")
        return PeerError(f"{text} {self._failed}")

    def alone(self, text: str) -> PeerError:
        """An error that this process has come to without a word of another one: `tell` tells of it.

        Args:
            text: its text.
        """
        error = PeerError(text)
        self._found_alone = weakref.ref(error)
        return error

    def has_word(self) -> bool:
        """Whether a process has left an error, as far as can be known."""
        with contextlib.suppress(RuntimeError):
            return self._found()
        return False

    def has_end(self) -> bool:
        """Whether another process has come to its end, as far as can be known."""
        with contextlib.suppress(RuntimeError):
            return any(self._store.check([f"{_ENDED}/{rank}"]) for rank in range(self._size))
        return self.store_has_end()

    def store_has_end(self) -> bool:
        """Whether the process that had the store has come to its end, as far as is known without it."""
        return self._store_may_go or (self.board is not None and 0 in self.board.ended())

    def end(self) -> None:
        """This process has come to its end, and not to an error: let the others know."""
        if self._store_may_go:
            return  # all have been told of an end before this one
        with contextlib.suppress(RuntimeError):  # the store can be gone, with who had it
            self._store.set(f"{_ENDED}/{self._rank}", "")
            self._let_others_read()

    def tell(self, error: BaseException, leave: Callable[[], None]) -> None:
        """This process ends: let the others know why, and wait for nothing that they leave.

        Args:
            error: why.
            leave: called once the reason is told.
        """
        # Another error about others is one that they come to by themselves, or have told. Who has not
        # read yet what this process has said must find it, and come to the same.
        is_new = not isinstance(error, PeerError) or error is self._found_alone()
        # The store can be gone, with the process that had it.
        with contextlib.suppress(RuntimeError):
            if not self._closed.is_set():
                if is_new:
                    self._leave_word(error, leave)
                self._let_others_read()
        if self._is_stuck():
            self._end_waits()

    def _leave_word(self, error: BaseException, leave: Callable[[], None]) -> None:
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        self._own = text.encode(errors="backslashreplace").decode()
        self._traceback = "".join(traceback.format_exception(error))
        try:
            # If another one has left it already, that is why this one fails.
            self._failed = self._store.compare_set(_FAILED, "", self._own).decode()
            self._say_why(self._failed)
        finally:
            leave()

    def _let_others_read(self) -> None:
        """Need the store no more, and do not take it along before the others have read what is in it."""
        self._store.set(f"{_READ}/{self._rank}", "")
        if self._rank != 0:
            return
        deadline_s = monotonic() + _READ_TIMEOUT_S
        for rank in range(1, self._size):
            while not self._store.check([f"{_READ}/{rank}"]) and rank not in self._gone():
                if monotonic() > deadline_s:
                    return
                threading.Event().wait(_POLL_S)

    def _found(self) -> bool:
        """Whether a process has left an error, be it this one."""
        if self._failed is None and self._store.check([_FAILED]):
            self._failed = self._store.get(_FAILED).decode()
            self._store.set(f"{_READ}/{self._rank}", "")
        return self._failed is not None

    def _gone(self) -> list[int]:
        return [] if self.board is None else self.board.gone()

    def _text_of_gone(self) -> str | None:
        if not (gone := self._gone()):
            return None
        ranks = ", ".join(map(str, gone))
        return f"The process with rank {ranks} is gone without a word (killed, say, or by `os._exit`)"

    def _look_for_end(self) -> None:
        """Learn that the process that has the store comes to a good end, before that takes it along."""
        if not self._store_may_go and self._store.check([f"{_ENDED}/0"]):
            self._store_may_go = True
            self._store.set(f"{_READ}/{self._rank}", "")

    def _is_stuck(self) -> bool:
        """Whether what this process has launched waits for what others will not launch any more."""
        if self._device.type != "cuda":
            return False
        launched = torch.cuda.Event()
        try:
            launched.record(torch.cuda.current_stream(self._device))
            deadline_s = monotonic() + _DRAIN_S
            while not launched.query():
                if monotonic() > deadline_s:
                    return True
                threading.Event().wait(0.01)
        except RuntimeError:
            pass  # the device is lost, and waits for nothing
        return False

    def _look_out(self) -> None:
        """In a thread: end this process with one that has failed, wherever it may be waiting."""
        while True:
            if self._closed.wait(_LOOK_EVERY_S):
                return
            try:
                why = self._failed if self._found() else self._text_of_gone()
                self._look_for_end()
            except RuntimeError:
                if self._failed is None and self.store_has_end():
                    return
                why = self._failed or self._text_of_gone() or "the process with rank 0 has ended"
            # One that has left no word may have done all of its part. Who comes to meet it finds out.
            if why is not None and (self._failed or self._device.type != "cuda" or self._is_stuck()):
                break
        if self._device.type != "cuda":
            # Collectives between hosts end with the process that does not come, and do not say why.
            self._say_why(why, "knows that")
            return
        self._say_why(why)
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
            with contextlib.suppress(RuntimeError):  # Python ends, and starts none: by force, then
                thread.start()
                self._aborting = thread

    def _end_by_force(self) -> None:
        # Python does not come to show the error of this process any more.
        _say(f"{self._traceback}lightning_cudagraph: rank {self._rank} ends by force")
        os._exit(1)

    def _say_why(self, why: str, what: str = "ends, because") -> None:
        if not self._has_said and why != self._own:
            self._has_said = True
            _say(f"lightning_cudagraph: rank {self._rank} {what} another process has failed: {why}")


def _say(text: str) -> None:
    # Whoever reads may be gone, as `tee` is with Ctrl-C, and the process must end all the same.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _abort() -> None:
    world: Any = dist.group.WORLD
    if world is not None and hasattr(world, "abort"):
        world.abort()
