"""The processes of a run, and how they agree.

Before each step they exchange a few numbers on the CPU: by shared memory if all are on one machine,
else by a process group of their own (gloo). A GPU never waits for it, and a host seldom, since it has
launched the step before by then. It takes the place of a broadcast that Lightning does before each
batch.

What is said seldom goes over the store that the process group was made with: settings at the start,
reasons, and errors. A process that fails leaves its error there. The others find it while they wait for
one another, or, where they wait for the GPU, in a thread that looks every now and then; so they end
with the reason in seconds, and do not wait for what will not come.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_cudagraph.capture.processes.agreement import Intent
from lightning_cudagraph.capture.processes.board import Board, machine
from lightning_cudagraph.errors import CUDAGraphError, PeerError

__all__ = ["Ranks", "own_store"]

T = TypeVar("T")

# A plan; whether a SIGTERM has come; whether the batch is the last of its epoch; its number.
_Fields = tuple[int, ...]
_FIELDS = 4
_NAP_S = 0.0005
_FAILED = "failed"
# How often somebody who waits looks whether another process has failed.
_LOOK_EVERY = timedelta(seconds=1)
_POLL_S = 0.001
# How long a process waits at the start of training for others, which may still make something ready; and
# after how long it says so.
_START_TIMEOUT_S = 300.0
_NOTICE_AFTER_S = 20.0
# From the moment a process knows that another has failed, until what it waits for is ended; and from
# then on, until it ends by force.
_ABORT_AFTER_S = 3.0
_GRACE_S = 15.0
# How long the device may take for what is launched, before it is taken to wait for other processes.
_DRAIN_S = 5.0
# How long a process that fails, and has the store, waits for the others to read why.
_READ_TIMEOUT_S = 3.0

_runs = 0


def own_store(name: str) -> Any:
    """A part of the store that the process group was made with, for one use.

    Args:
        name: the same in all processes, and that of no other use.
    """
    store: Any = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(f"lightning_cudagraph/{name}", store)


class Ranks:
    """The processes of one run. Every process makes one, and calls the same methods in the same order.

    Args:
        flags: what is exchanged along with each plan: whether a SIGTERM has come, whether the batch is
            the last one of its epoch, and its number.
        on_flags: told the lowest and the highest of each of them.
    """

    def __init__(
        self,
        flags: Callable[[], tuple[int, int, int]],
        on_flags: Callable[[tuple[int, ...], tuple[int, ...]], None],
    ) -> None:
        global _runs
        _runs += 1
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._flags = flags
        self._on_flags = on_flags
        self._device = torch.device("cpu")
        self._store = own_store(str(_runs))
        self._told = 0
        self._failed: str | None = None
        self._has_said = False
        self._is_deaf = False  # the store is gone
        self._group: Any = None
        self._work: Any = None  # the latest exchange
        self._board: Board | None = None
        self._timeout_s = 0.0
        self._since_s = 0.0  # of the meeting at hand
        self._looked_s = 0.0
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None

    def start(self, timeout: timedelta, device: torch.device) -> None:
        """Make ready to meet.

        Args:
            timeout: how long processes may wait for one another.
            device: what this process trains on. If it is a GPU, which a process can wait for, a thread
                looks for failures of others.
        """
        self._timeout_s = timeout.total_seconds()
        self._board = self._shared_board()
        if self._board is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            options: Any = distributed_c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._options = options
            self._word = torch.zeros(2 * _FIELDS, dtype=torch.int64)
            self._numbers = self._word.numpy()
        self._device = device
        if device.type == "cuda":
            self._watch = threading.Thread(target=self._look_out, name="cudagraph-ranks", daemon=True)
            self._watch.start()

    def _shared_board(self) -> Board | None:
        """A page that all processes see, if there can be one: the same answer in all of them."""
        if len({*self.exchanged(machine())}) > 1:
            return None
        made: tuple[str, int] | None = None
        if self.rank == 0:
            with contextlib.suppress(OSError):
                made = Board.made(self.size)
        made = self.exchanged(made)[0]
        board: Board | None = None
        if made is not None:
            path, token = made
            with contextlib.suppress(OSError, ValueError):
                board = Board(path, self.rank, self.size)
                if board.token != token:
                    board = None  # another one of this name
        all_have = all(self.exchanged(board is not None))
        if self.rank == 0 and made is not None:
            with contextlib.suppress(OSError):
                os.unlink(made[0])  # it lives as long as it is mapped
        return board if all_have else None

    def meet(self, intent: Intent) -> tuple[Intent, Intent]:
        """Exchange plans and flags; see `Agreement`.

        Raises:
            PeerError: if another process has failed.
        """
        sigterm, is_last, batch = self._flags()
        mine = (int(intent), sigterm, is_last, batch)
        if self._board is not None:
            lowest, highest = self._met_on_board(self._board, mine)
        else:
            lowest, highest = self._met_over_sockets(mine)
        self._on_flags(lowest[1:], highest[1:])
        return Intent(lowest[0]), Intent(highest[0])

    def _met_on_board(self, board: Board, mine: _Fields) -> tuple[_Fields, _Fields]:
        intent, sigterm, is_last, batch = mine
        self._since_s = time.monotonic()
        words = board.exchange(batch << 5 | is_last << 4 | sigterm << 3 | intent, self._nap)
        if words is None:
            raise self._peer_error("it has left")
        said = [(word & 7, word >> 3 & 1, word >> 4 & 1, word >> 5) for word in {*words}]
        if len(said) == 1:
            return said[0], said[0]
        by_field = [*zip(*said, strict=True)]
        lowest, highest = [*map(min, by_field)], [*map(max, by_field)]
        return (*lowest,), (*highest,)

    def _nap(self) -> None:
        self._closed.wait(_NAP_S)
        if self._is_time():
            self._look()
        if time.monotonic() - self._since_s > self._timeout_s:
            raise PeerError(
                f"Another process has not come to this batch within {self._timeout_s:.0f} s, and rank"
                f" {self.rank} ends."
            )

    def _met_over_sockets(self, mine: _Fields) -> tuple[_Fields, _Fields]:
        self._numbers[:] = (*mine, *(-value for value in mine))
        try:
            self._work = self._group.allreduce([self._word], self._options)
            self._wait(self._work)
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            raise self._peer_error(f"the connection to it was lost ({error})") from error
        values = self._numbers.tolist()
        highest, lowest = values[:_FIELDS], [-value for value in values[_FIELDS:]]
        return (*lowest,), (*highest,)

    def _wait(self, work: Any) -> None:
        while True:
            try:
                work.wait(_LOOK_EVERY)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._look()

    def pause(self, word: str, is_last: bool) -> bool:
        """Look how the others are, without waiting for them, and end with them if all want to.

        Args:
            word: of the place in the run that this process wants to end in, the same in all processes;
                or none. Without one, the others are looked at once in a second.
            is_last: this process leaves that place now.

        Returns:
            Whether all end there. What the first one finds who knows, holds for all.

        Raises:
            PeerError: if another process has failed.
        """
        if self._is_deaf or not (word or self._is_time()):
            return False
        try:
            self._look()
            if not word:
                return False
            self._store.set(f"{word}/{self.rank}", "")
            if self._store.check([f"{word}/{rank}" for rank in range(self.size)]):
                wanted = "end"
            elif is_last:
                wanted = "go on"
            else:
                return False
            return bool(self._store.compare_set(word, "", wanted) == b"end")
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            # The process that had it may have come to a good end. Nobody is waited for here.
            self._is_deaf = True
            return False

    def _is_time(self) -> bool:
        """Whether the last look at how the others are was long ago."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY.total_seconds():
            return False
        self._looked_s = now_s
        return True

    def tell(self, mine: T) -> list[T]:
        """Exchange objects; see `Agreement`."""
        return self.exchanged(mine, None)

    def exchanged(self, mine: T, timeout_s: float | None = _START_TIMEOUT_S) -> list[T]:
        """What all processes say, in the order of their ranks.

        Args:
            mine: what this one says; small, and can be pickled.
            timeout_s: how long to wait for the others; None for ever.

        Raises:
            PeerError: if another process has failed, or does not come.
        """
        self._told += 1
        keys = [f"{self._told}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(mine))
        started_s = time.monotonic()
        next_s = min(_NOTICE_AFTER_S, timeout_s or _NOTICE_AFTER_S)
        try:
            while not self._store.check(keys):
                if self._is_time():
                    self._look()
                if timeout_s is not None and time.monotonic() - started_s > next_s:
                    missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                    text = (
                        f"Rank {', '.join(map(str, missing))} did not come to the start of training"
                        f" within {next_s:.0f} s. Give every process the same callbacks."
                    )
                    if next_s >= timeout_s:
                        raise PeerError(text)
                    print(f"lightning_cudagraph: {text}", file=sys.stderr, flush=True)
                    next_s = timeout_s
                self._closed.wait(_POLL_S)
            said = [pickle.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            raise self._peer_error(f"the store is gone ({error})") from error
        # All have read what came before this.
        with contextlib.suppress(NotImplementedError):
            self._store.delete_key(f"{self._told - 1}/{self.rank}")
        return said

    def fail(self, error: BaseException) -> None:
        """This process ends with an error: let the others know, and wait for nothing that they leave."""
        if not (self._closed.is_set() or isinstance(error, PeerError)):
            self._tell_why(error)
        if self._is_stuck():
            # In a thread, because NCCL waits in turn for the graphs, which are let go of meanwhile.
            threading.Thread(target=_abort, name="cudagraph-abort", daemon=True).start()

    def _tell_why(self, error: BaseException) -> None:
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the store can be gone, with the process that had it
            if self._found():
                self._say_why()  # of which the error here is a consequence
                return
            self._store.set(_FAILED, text)
            self._store.set(f"read/{self.rank}", "")
            if self._board is not None:
                self._board.leave()
            self._leave()  # who waits for this process learns it at once
            if self.rank == 0:
                others = [f"read/{rank}" for rank in range(1, self.size)]
                deadline_s = time.monotonic() + _READ_TIMEOUT_S
                while time.monotonic() < deadline_s and not self._store.check(others):
                    self._closed.wait(0.05)

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

    def close(self) -> None:
        """Meet no more."""
        self._closed.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(timeout=2 * _LOOK_EVERY.total_seconds())
        self._leave()

    def _leave(self) -> None:
        """Let go of the group; its thread must not be in the middle of an exchange."""
        group, self._group = self._group, None
        work, self._work = self._work, None
        if group is None or not dist.is_initialized():
            return
        if work is not None and not work.is_completed():
            # It ends when the others let go of theirs.
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=_READ_TIMEOUT_S))
            if not work.is_completed():
                return
        dist.destroy_process_group(group)

    def _look(self) -> None:
        if self._found():
            raise self._peer_error("")

    def _found(self) -> bool:
        """Whether another process has left an error."""
        if self._failed is None and self._store.check([_FAILED]):
            self._failed = self._store.get(_FAILED).decode()
            self._store.set(f"read/{self.rank}", "")
        return self._failed is not None

    def _peer_error(self, otherwise: str) -> PeerError:
        """The error for what another process has met.

        Args:
            otherwise: what there is to say if it has left no word.
        """
        deadline_s = time.monotonic() + _READ_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            while not self._found() and time.monotonic() < deadline_s:
                self._closed.wait(0.05)
        return PeerError(
            f"Another process of the run has failed, and rank {self.rank} ends with it:"
            f" {self._failed or otherwise}"
        )

    def _look_out(self) -> None:
        """In a thread: end this process with one that has failed, wherever it may be waiting."""
        while not self._closed.wait(_LOOK_EVERY.total_seconds()):
            try:
                found = self._found()
            except RuntimeError:
                found, self._failed = True, self._failed or "the process with rank 0 has ended"
            if found:
                break
        else:
            return
        self._say_why()
        if self._closed.wait(_ABORT_AFTER_S):
            return
        _abort()
        if not self._closed.wait(_GRACE_S):
            print(f"lightning_cudagraph: rank {self.rank} ends by force", file=sys.stderr, flush=True)
            os._exit(1)

    def _say_why(self) -> None:
        if not self._has_said:
            self._has_said = True
            print(
                f"lightning_cudagraph: rank {self.rank} ends, because another process has failed:"
                f" {self._failed}",
                file=sys.stderr,
                flush=True,
            )


def _abort() -> None:
    """End what waits for other processes on the device."""
    world: Any = dist.group.WORLD
    if world is not None and hasattr(world, "abort"):
        world.abort()
