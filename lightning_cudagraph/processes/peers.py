"""The processes of a run, and their votes.

Before each step the processes exchange a few numbers on the CPU, a vote: in shared memory if all are on
one machine, otherwise by a gloo process group. The step before has been launched by then, so the GPU
waits for a vote only if that and the work of the host for a step take longer than the GPU does. The vote
replaces a broadcast that Lightning does before each batch.

Objects (settings at the start, reasons) are gathered through the store of the process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_cudagraph.errors import ConfigurationError, CUDAGraphError, PeerError, UnsupportedError
from lightning_cudagraph.processes.at_exit import AtExit
from lightning_cudagraph.processes.failures import GIVE_THE_SAME, LOOK_EVERY, Failures
from lightning_cudagraph.processes.shared_page import SharedPage, machine

T = TypeVar("T")

_WAIT_S = 0.0005
_POLL_S = 0.001
# Time limit for other processes to reach the start of training, where they may still prepare something;
# and the time after which a message says that this one waits.
_START_TIMEOUT_S = 300.0
_NOTICE_AFTER_S = 20.0
# Time that a process that leaves waits for the end of a vote.
_LEAVE_AFTER = timedelta(seconds=3)

_GO_ON = "go on"
# The key of processes that have ended, for runs that they have not begun.
_EXITED = "exited"

_runs = 0
_at_exit: AtExit | None = None


class Vote(NamedTuple):
    """The vote of a process before a step, or the lowest or the highest of all.

    Attributes:
        intent: its plan for the batch, an `Intent`.
        place: the position of the process in the run.
    """

    intent: int
    sigterm: int = 0
    is_last: int = 0
    place: int = 0

    def packed(self) -> int:
        return self.place << 5 | self.is_last << 4 | self.sigterm << 3 | self.intent

    @classmethod
    def unpacked(cls, word: int) -> Vote:
        return cls(word & 7, word >> 3 & 1, word >> 4 & 1, word >> 5)


def own_store(name: str) -> Any:
    """A part of the process group's store, for one use, which the name tells from all others."""
    store: Any = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(f"lightning_cudagraph/{name}", store)


def _tell_exit(error: BaseException | None) -> None:
    """Report the exit of Python to processes that wait for this one at the start of a run."""
    text = "its program has ended" if error is None else f"{type(error).__name__}: {error}"
    with contextlib.suppress(RuntimeError):  # the store may have ended
        if dist.is_initialized():
            own_store(_EXITED).set(str(dist.get_rank()), text)


class Peers:
    """The processes of one run. Each process makes one, and calls the same methods in the same order."""

    def __init__(self) -> None:
        global _runs, _at_exit
        _runs += 1
        _at_exit = _at_exit or AtExit(_tell_exit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.number = _runs
        self.waited_s = 0.0
        self._store = own_store(str(_runs))
        self._failures = Failures(self._store, self.rank, self.size)
        self._gathered = 0
        self._is_store_gone = False
        self._has_failed = False
        self._page: SharedPage | None = None
        self._group: Any = None
        self._work: Any = None  # the latest vote over sockets
        self._timeout_s = 0.0
        self._since_s = 0.0  # the begin of the present vote

    def watch(self, device: torch.device) -> None:
        """Start a thread that looks for failures of other processes; called before `start`."""
        self._failures.watch(device)

    def start(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._page = self._failures.page = self._shared_page()
        if self._page is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def _shared_page(self) -> SharedPage | None:
        """The shared page, if all processes can use it; None in all of them otherwise."""
        if len({*self.gather_within(machine())}) > 1:
            return None
        path = ""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                path = SharedPage.create(self.size)
        path = self.gather_within(path)[0]
        page: SharedPage | None = None
        if path:
            with contextlib.suppress(OSError):
                page = SharedPage(path, self.rank, self.size)
        all_have = all(self.gather_within(page is not None))
        if page is not None and all_have:
            # Where locks do not work, live processes seem to be gone.
            all_have = all(self.gather_within(not page.gone()))
        if self.rank == 0 and path:
            with contextlib.suppress(OSError):
                os.unlink(path)  # the memory lives as long as it is mapped
        return page if all_have else None

    def vote(self, mine: Vote) -> tuple[Vote, Vote]:
        """Exchange the votes before a step; return the lowest and the highest value of each field."""
        self._since_s = monotonic()
        words = (self._over_sockets if self._page is None else self._on_page)(mine.packed())
        self.waited_s += monotonic() - self._since_s
        if len(different := {*words}) == 1:
            return mine, mine
        by_field = [*zip(*map(Vote.unpacked, different), strict=True)]
        return Vote(*map(min, by_field)), Vote(*map(max, by_field))

    def _on_page(self, word: int) -> list[int]:
        assert self._page is not None
        words = self._page.exchange(word, self._wait)
        if words is None:
            raise self._failures.error("it has left")
        return words

    def _wait(self) -> None:
        with self._store_errors():
            self._failures.wait(_WAIT_S)
        if monotonic() - self._since_s > self._timeout_s:
            raise self._failures.alone(
                f"Another process has not come to this batch within {self._timeout_s:.0f} s, and rank"
                f" {self.rank} ends."
            )

    def _over_sockets(self, word: int) -> list[int]:
        """Send a word to each process. An all-reduce of gloo would pass it on, around a ring."""
        words = torch.empty(self.size, dtype=torch.int64, device="cpu")
        try:
            self._work = self._group.alltoall_base(words, torch.full_like(words, word), [], [])
            while not self._is_done(self._work):
                self._failures.look()
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            raise self._failures.error(
                f"the connection to it was lost ({error}); if it has come to its end, {GIVE_THE_SAME}"
            ) from error
        return words.tolist()

    @staticmethod
    def _is_done(work: Any) -> bool:
        try:
            work.wait(LOOK_EVERY)
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def pause(self, word: str, batch: int, is_last: bool) -> bool:
        """Look for failures of others without waiting, and end together with them if all want to.

        The process that first finds that all want to end decides on a batch after which all end, and
        which none has passed: each reports the batch that it has finished before it begins the next, and
        looks again after that. So no process is left alone in a collective of a batch.

        Args:
            word: key of the part of the run in which this process wants to end, the same in all
                processes; empty if it does not. Then failures are looked for once a second.
            batch: index of the last finished batch in that part.
            is_last: True if this process leaves that part now.

        Returns:
            True if this process ends here, as all do. The first decision holds for all.
        """
        if not self._is_store_gone:
            try:
                return self._pause(word, batch, is_last)
            except RuntimeError as error:
                if isinstance(error, CUDAGraphError):
                    raise
                self._is_store_gone = True
        # The host of the store may have ended without an error: if this process wants to end, all do.
        # No process is waited for here.
        return bool(word) and self._failures.has_ended

    def _pause(self, word: str, batch: int, is_last: bool) -> bool:
        if not word:
            self._failures.look_now_and_then()
            return False
        self._failures.look()
        keys = [f"{word}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], str(batch))
        if self._store.check(keys):
            wanted = str(max(int(self._store.get(key)) for key in keys) + 1)
        elif is_last:
            wanted = _GO_ON
        else:
            return False
        decided = self._store.compare_set(word, "", wanted).decode()
        return decided != _GO_ON and (is_last or batch >= int(decided))

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process, by rank; see `Agreement`."""
        return self.gather_within(mine, None)

    def gather_within(self, mine: T, timeout_s: float | None = _START_TIMEOUT_S) -> list[T]:
        """Gather a small object of each process, by rank; it can be pickled."""
        self._gathered += 1
        keys = [f"{self._gathered}/{rank}" for rank in range(self.size)]
        with self._store_errors():
            self._store.set(keys[self.rank], pickle.dumps(mine))
            self._wait_for(keys, timeout_s)
            gathered = [pickle.loads(value) for value in self._store.multi_get(keys)]
            # All have read the last gathering. Not every store can delete.
            with contextlib.suppress(NotImplementedError):
                self._store.delete_key(f"{self._gathered - 1}/{self.rank}")
        return gathered

    def _wait_for(self, keys: list[str], timeout_s: float | None) -> None:
        started_s = looked_s = monotonic()
        next_s = min(_NOTICE_AFTER_S, timeout_s or _NOTICE_AFTER_S)
        while not self._store.check(keys):
            try:
                self._failures.wait(_POLL_S)
            except PeerError:
                if self._store.check(keys):
                    return  # the other failed after it had written, as this process will by itself
                raise
            now_s = monotonic()
            if now_s - looked_s > LOOK_EVERY.total_seconds():
                looked_s = now_s
                self._refuse_exited(keys)
            if timeout_s is not None and now_s - started_s > next_s:
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                text = (
                    f"Rank {', '.join(map(str, missing))} did not come to the start of training"
                    f" or of an evaluation within {next_s:.0f} s: it has failed before, and says why,"
                    " or it has other callbacks. Give every process the same."
                )
                if next_s >= timeout_s:
                    raise self._failures.alone(text)
                print(f"lightning_cudagraph: {text}", file=sys.stderr, flush=True)
                next_s = timeout_s

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Translate errors of a store that has ended with its process into errors about that process."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            raise self._failures.error(f"the store is gone ({error})") from error

    def _refuse_exited(self, keys: list[str]) -> None:
        exited = own_store(_EXITED)
        for rank, key in enumerate(keys):
            if exited.check([str(rank)]) and not self._store.check([key]):
                raise self._failures.alone(
                    f"Another process of the run has ended, and rank {self.rank} ends with it: rank"
                    f" {rank}: {exited.get(str(rank)).decode()}"
                )

    def compare(self, asked: Mapping[str, str], refused: UnsupportedError | None = None) -> None:
        """Compare the settings of all processes at the start, and refuse graphs if one has none."""
        refusal = None if refused is None else (refused.reason, refused.remedy)
        said = self.gather_within((asked, refusal))
        first, _ = said[0]
        for rank, (theirs, _) in enumerate(said):
            for name, value in first.items():
                if (other := theirs.get(name, "nothing")) != value:
                    raise ConfigurationError(
                        f"The processes of this run differ in their {name}: {value} on rank 0,"
                        f" {other} on rank {rank}. A graph that averages gradients is replayed by all"
                        " processes together, so all need the same."
                    )
        if refused is not None:
            raise refused
        for rank, (_, told) in enumerate(said):
            if told is not None:
                reason, remedy = told
                raise UnsupportedError(f"On rank {rank}: {reason}", remedy)

    def fail(self, error: BaseException) -> None:
        """Report that this process ends with an error, and abort waits for the others."""
        self._has_failed = True
        self._failures.tell(error, self._leave_votes)

    def _leave_votes(self) -> None:
        """Withdraw from votes, so that processes that wait for this one notice at once."""
        if self._page is not None:
            self._page.leave(takes_back=True)
        self._leave_group()

    def close(self) -> None:
        if self._page is not None:
            self._page.leave(takes_back=False)
        if not self._has_failed:
            self._failures.end()
        self._failures.close()
        self._leave_group()

    def _leave_group(self) -> None:
        """Destroy the gloo group; its thread must not be in the middle of a vote."""
        group, self._group = self._group, None
        work, self._work = self._work, None
        if group is None or not dist.is_initialized():
            return
        if work is not None and not work.is_completed():
            # It ends when the others destroy their groups.
            with contextlib.suppress(RuntimeError):
                work.wait(_LEAVE_AFTER)
            if not work.is_completed():
                return
        dist.destroy_process_group(group)
