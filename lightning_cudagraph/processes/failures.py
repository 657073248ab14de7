"""Failures of single processes, reported to the others of a run.

A process that fails writes its error into the store of the process group. The others read it while they
wait in a vote, and in a thread once a second, because they may wait on the device, in a collective. Such
a wait would end only at the time limit of the process group, when NCCL's watchdog aborts it. The thread
aborts it in seconds, once the reason is known. An abort ends the wait, but returns only when the graphs
with collectives are released, and until then the next collective waits for the abort. So if the device
waits, the thread that trains gets the error as an exception before the abort, and raises it when it is
back from C. A process that hangs even then is left to the watchdog and to its launcher (`torchrun`,
`srun`).

The store ends with the process that hosts it, usually rank 0. So that process waits at its end until the
others have read the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from lightning_cudagraph.errors import PeerError
from lightning_cudagraph.processes.shared_page import SharedPage

GIVE_THE_SAME = "give all of them the same numbers of batches, steps and epochs."
# Keys of the store: the first error; a process has ended without one; the process of a rank has read
# either, or has ended itself.
_FAILED, _ENDED, _READ = "failed", "ended", "read"
LOOK_EVERY = timedelta(seconds=1)
_LOOK_EVERY_S = LOOK_EVERY.total_seconds()
# Time for a process to end by itself once it knows of another's error.
_ABORT_AFTER_S = 3.0
# Time for the device to finish launched work, before it counts as waiting for other processes.
_DRAIN_S = 5.0
# Time limit for the abort of a process group, which waits for the graphs with its collectives.
_ABORT_TIMEOUT_S = 15.0
# Time that the host of the store waits at its end for the others to read; and that a process waits for
# the reason why another does not come.
_READ_TIMEOUT_S = 3.0
_POLL_S = 0.02


class Failures:
    """The failures of other processes, and the report of this one's."""

    page: SharedPage | None = None

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._failed: str | None = None
        self._own: str | None = None  # the error of this process
        self.has_ended = False
        self._has_said = False
        self._looked_s = 0.0
        self._device = torch.device("cpu")
        self._closed = threading.Event()
        self._trains: threading.Thread | None = None
        self._knows = False  # the thread that trains has an error
        self._lock = threading.Lock()  # of `_knows`
        self._watch: threading.Thread | None = None
        self._aborting: threading.Thread | None = None

    def watch(self, device: torch.device) -> None:
        """Start a thread that looks for failures of other processes; called by the one that trains."""
        self._device = device
        self._trains = threading.current_thread()
        if self._watch is None:
            self._watch = threading.Thread(target=self._look_out, name="cudagraph-peers", daemon=True)
            self._watch.start()

    def close(self) -> None:
        """Stop the thread. Graphs have been released before, so that an abort returns."""
        self._note_error()
        self._closed.set()
        if self._watch is not None:
            self._watch.join(2 * _LOOK_EVERY_S)
        if self._aborting is not None:
            # A thread that returns during the exit of Python would end the process with a signal.
            self._aborting.join(_ABORT_TIMEOUT_S)

    def wait(self, seconds: float) -> None:
        """Sleep, and look for failures now and then."""
        self._closed.wait(seconds)
        self.look_now_and_then()

    def look_now_and_then(self) -> None:
        """Look for failures, at most once a second; cheap to call often."""
        now_s = monotonic()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self.look()

    def look(self) -> None:
        """Raise a `PeerError` for a failure of another process, in the store or on the page."""
        self._read()
        if self._failed is not None and self._failed != self._own:
            raise self.error("")
        if self._failed is None and (text := self._text_of_gone()):
            raise self.alone(f"{text}, and rank {self._rank} ends with it.")

    def error(self, otherwise: str) -> PeerError:
        """Make the error for a process that does not come; `otherwise` if it has left no reason."""
        self._note_error()
        deadline_s = monotonic() + _READ_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            self._read()
            while self._failed is None and not self.has_ended and monotonic() < deadline_s:
                self._closed.wait(_POLL_S)
                self._read()
        text = self._ends_with_it()
        if self._failed is not None:
            return PeerError(f"{text} {self._failed}")
        if self.has_ended:
            return PeerError(
                f"Another process has come to its end, and rank {self._rank} has more to do. In a graph"
                f" that averages gradients all processes take part in each step: {GIVE_THE_SAME}"
            )
        return self.alone(f"{text} {self._text_of_gone() or otherwise}")

    def alone(self, text: str) -> PeerError:
        """Make an error that this process has found by itself, and will report to the others."""
        self._note_error()
        error = PeerError(text)
        error.is_told = False
        return error

    def end(self) -> None:
        """Report that this process ends without an error."""
        if self.has_ended and self._rank != 0:
            return  # one end has been reported, and the store may be gone with that process
        with contextlib.suppress(RuntimeError):
            self._store.set(_ENDED, "")
            self._let_others_read()

    def tell(self, error: BaseException, leave: Callable[[], None]) -> None:
        """Report that this process ends with an error, call `leave`, and abort waits for the others."""
        self._note_error()
        with contextlib.suppress(RuntimeError):  # the store may have ended
            if not self._closed.is_set():
                # Errors about other processes are reported already, or found by each by itself.
                if not isinstance(error, PeerError) or not error.is_told:
                    self._tell_own(error, leave)
                self._let_others_read()
        if self._is_stuck():
            self._abort()

    def _tell_own(self, error: BaseException, leave: Callable[[], None]) -> None:
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        self._own = text.encode(errors="backslashreplace").decode()
        try:
            # If another process has reported an error before, this one fails because of it.
            self._failed = self._store.compare_set(_FAILED, "", self._own).decode()
            self._say(self._failed)
        finally:
            leave()

    def _let_others_read(self) -> None:
        """Keep the store alive until the others have read it."""
        self._store.set(f"{_READ}/{self._rank}", "")
        if self._rank != 0:
            return
        deadline_s = monotonic() + _READ_TIMEOUT_S
        for rank in range(1, self._size):
            while not self._store.check([f"{_READ}/{rank}"]) and rank not in self._gone():
                if monotonic() > deadline_s:
                    return
                threading.Event().wait(_POLL_S)

    def _read(self) -> None:
        known = (self._failed, self.has_ended)
        if self._failed is None and self._store.check([_FAILED]):
            self._failed = self._store.get(_FAILED).decode()
        self.has_ended = self.has_ended or self._store.check([_ENDED])
        if known != (self._failed, self.has_ended):
            self._store.set(f"{_READ}/{self._rank}", "")

    def _gone(self) -> list[int]:
        return [] if self.page is None else self.page.gone()

    def _text_of_gone(self) -> str | None:
        if not (gone := self._gone()):
            return None
        ranks = ", ".join(map(str, gone))
        return f"The process with rank {ranks} is gone without a word (killed, say, or by `os._exit`)"

    def _look_out(self) -> None:
        """Print why another process has failed, and end waits for it on the device. Runs in a thread."""
        while not self._closed.wait(_LOOK_EVERY_S):
            try:
                self._read()
                why = self._failed or self._text_of_gone()
            except RuntimeError:
                if self._failed is None and self.has_ended:
                    return
                why = self._failed or self._text_of_gone() or "the process with the store has ended"
            # A process that is gone without a report may have done all of its work.
            if why and (self._failed or self._device.type != "cuda" or self._is_stuck()):
                break
        else:
            return
        self._say(why)
        # Collectives between hosts (gloo) end with the missing process.
        if self._device.type == "cuda" and not self._closed.wait(_ABORT_AFTER_S):
            if self._is_stuck():
                self._throw(f"{self._ends_with_it()} {why}")
            self._abort()

    def _ends_with_it(self) -> str:
        return f"Another process of the run has failed, and rank {self._rank} ends with it:"

    def _note_error(self) -> None:
        with self._lock:
            self._knows = True

    def _throw(self, text: str) -> None:
        """Raise a `PeerError` in the thread that trains, unless it has an error."""

        class Thrown(PeerError):
            def __init__(self) -> None:
                super().__init__(text)

        Thrown.__name__ = Thrown.__qualname__ = PeerError.__qualname__
        Thrown.__module__ = PeerError.__module__
        with self._lock:
            thread = self._trains
            if not self._knows and thread is not None and thread.is_alive():
                throw(thread, Thrown)

    def _is_stuck(self) -> bool:
        """True if work launched by this process seems to wait for others that launch no more."""
        if self._device.type != "cuda":
            return False
        drained = threading.Event()
        act = partial(_drain, torch.cuda.current_stream(self._device), drained)
        try:
            # While another thread waits in a copy from the device, a call of CUDA can block this one.
            threading.Thread(target=act, daemon=True).start()
        except RuntimeError:  # Python exits, and starts no thread
            act()
        return not drained.wait(_DRAIN_S)

    def _abort(self) -> None:
        """Abort waits for other processes on the device; in a thread, because NCCL waits for graphs."""
        if self._aborting is None:
            thread = threading.Thread(target=_abort, name="cudagraph-abort", daemon=True)
            with contextlib.suppress(RuntimeError):  # Python exits, and starts no thread
                thread.start()
                self._aborting = thread

    def _say(self, why: str) -> None:
        if not self._has_said and why != self._own:
            self._has_said = True
            text = f"rank {self._rank} ends, because another process has failed: {why}"
            # The reader of stderr may be gone, as `tee` is after Ctrl-C; the process must still end.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print(f"lightning_cudagraph: {text}", file=sys.stderr, flush=True)


def _drain(stream: torch.cuda.Stream, drained: threading.Event) -> None:
    """Set the event once the device has finished the launched work, or has failed."""
    launched = torch.cuda.Event()
    with contextlib.suppress(RuntimeError):
        launched.record(stream)
        deadline_s = monotonic() + _DRAIN_S
        while not launched.query():
            if monotonic() > deadline_s:
                return
            threading.Event().wait(0.01)
    drained.set()


def _abort() -> None:
    world: Any = dist.group.WORLD
    if world is not None and hasattr(world, "abort"):
        world.abort()


def throw(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a living thread, as soon as that is back from C."""
    ident, kind = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)
