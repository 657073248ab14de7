"""The processes of a run, and how they agree.

Before each step they exchange a few numbers on the CPU: by shared memory if all are on one machine,
else by a process group of their own (gloo). A GPU never waits for it, and a host seldom, since it has
launched the step before by then. It takes the place of a broadcast that Lightning does before each
batch.

What is said seldom goes over the store that the process group was made with: settings at the start, and
reasons.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_cudagraph.capture.processes.agreement import Intent
from lightning_cudagraph.capture.processes.board import Board, machine
from lightning_cudagraph.capture.processes.ending import AtEnd
from lightning_cudagraph.capture.processes.failures import LOOK_EVERY, Failures
from lightning_cudagraph.errors import (
    ConfigurationError,
    CUDAGraphError,
    PeerError,
    UnsupportedError,
)

__all__ = ["Ranks", "own_store"]

T = TypeVar("T")

# A plan; whether a SIGTERM has come; whether the batch is the last of its epoch; its number.
_Fields = tuple[int, ...]
_FIELDS = 4
_NAP_S = 0.0005
_POLL_S = 0.001
# How long a process waits at the start of training for others, which may still make something ready; and
# after how long it says so.
_START_TIMEOUT_S = 300.0
_NOTICE_AFTER_S = 20.0
# How long a process that leaves waits for an exchange to end.
_LEAVE_AFTER = timedelta(seconds=3)

_GO_ON = "go on"
# Under which a process leaves word that it has ended, for runs that it has not begun.
_LEFT = "left"
_GIVE_THE_SAME = "give all of them the same numbers of batches, steps and epochs."

_runs = 0
_at_end: AtEnd | None = None


def own_store(name: str) -> Any:
    """A part of the store that the process group was made with, for one use.

    Args:
        name: the same in all processes, and that of no other use.
    """
    store: Any = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(f"lightning_cudagraph/{name}", store)


def _leave_word_at_end() -> None:
    """When Python ends: tell who waits for this process at the start of a run."""
    global _at_end
    if _at_end is not None:
        return

    def ended(error: BaseException | None) -> None:
        text = "its program has ended" if error is None else f"{type(error).__name__}: {error}"
        # The store can be gone, with the process that had it.
        with contextlib.suppress(RuntimeError):
            if dist.is_initialized():
                own_store(_LEFT).set(str(dist.get_rank()), text)

    _at_end = AtEnd(ended)


class Ranks:
    """The processes of one run. Every process makes one, and calls the same methods in the same order.

    Args:
        flags: what is exchanged along with each plan: whether a SIGTERM has come, whether the batch is
            the last one of its epoch, and its number.
        on_flags: told the lowest and the highest of each of them.

    Attributes:
        number: how many there were in each process, with this one.
        rank: of this process.
        size: how many processes there are.
        waited_s: how long this one has waited for others before its steps, in seconds, all in all.
    """

    def __init__(
        self,
        flags: Callable[[], tuple[int, int, int]],
        on_flags: Callable[[tuple[int, ...], tuple[int, ...]], None],
    ) -> None:
        global _runs
        _runs += 1
        _leave_word_at_end()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._flags = flags
        self._on_flags = on_flags
        self.number = _runs
        self._store = own_store(str(_runs))
        self._failures = Failures(self._store, self.rank, self.size)
        self._told = 0
        self._is_deaf = False  # the store is gone
        self._group: Any = None
        self._work: Any = None  # the latest exchange
        self._board: Board | None = None
        self._has_failed = False
        self._timeout_s = 0.0
        self._since_s = 0.0  # of the meeting at hand
        self.waited_s = 0.0

    def watch(self, device: torch.device) -> None:
        """From now on, look for failures of others; before `start`, or with it.

        Args:
            device: what this process trains on.
        """
        self._failures.watch(device)

    def start(self, timeout: timedelta, device: torch.device) -> None:
        """Make ready to meet.

        Args:
            timeout: how long processes may wait for one another.
            device: as `watch` takes it.
        """
        self._timeout_s = timeout.total_seconds()
        self._board = self._failures.board = self._shared_board()
        if self._board is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            options: Any = distributed_c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._options = options
            self._word = torch.zeros(2 * _FIELDS, dtype=torch.int64, device="cpu")
            self._numbers = self._word.numpy()
        self._failures.watch(device)

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
        if board is not None and all_have:
            # By locks that do not work here, a process would be missed that is there.
            all_have = all(self.exchanged(not board.gone()))
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
        self._since_s = monotonic()
        if self._board is not None:
            lowest, highest = self._met_on_board(self._board, mine)
        else:
            lowest, highest = self._met_over_sockets(mine)
        self.waited_s += monotonic() - self._since_s
        self._on_flags(lowest[1:], highest[1:])
        return Intent(lowest[0]), Intent(highest[0])

    def _met_on_board(self, board: Board, mine: _Fields) -> tuple[_Fields, _Fields]:
        intent, sigterm, is_last, batch = mine
        try:
            words = board.exchange(batch << 5 | is_last << 4 | sigterm << 3 | intent, self._nap)
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            raise self._failures.error(f"the store is gone ({error})") from error
        if words is None:
            raise self._missing(bool(board.ended()), "it has left")
        said = [(word & 7, word >> 3 & 1, word >> 4 & 1, word >> 5) for word in {*words}]
        if len(said) == 1:
            return said[0], said[0]
        by_field = [*zip(*said, strict=True)]
        lowest, highest = [*map(min, by_field)], [*map(max, by_field)]
        return (*lowest,), (*highest,)

    def _nap(self) -> None:
        self._failures.nap(_NAP_S)
        if monotonic() - self._since_s > self._timeout_s:
            raise self._failures.alone(
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
            lost = (
                f"the connection to it was lost ({error}); if it has come to its end, {_GIVE_THE_SAME}"
            )
            raise self._missing(self._failures.has_end(), lost) from error
        values = self._numbers.tolist()
        highest, lowest = values[:_FIELDS], [-value for value in values[_FIELDS:]]
        return (*lowest,), (*highest,)

    def _missing(self, has_end: bool, otherwise: str) -> PeerError:
        """The error for a process that does not come to a meeting.

        Args:
            has_end: one has come to its end; another one may have failed all the same.
            otherwise: what there is to say if it has left no word.
        """
        if not has_end or self._failures.has_word():
            return self._failures.error(otherwise)
        return PeerError(
            f"Another process has come to its end, and rank {self.rank} has more to do. In a graph that"
            f" averages gradients all processes take part in each step: {_GIVE_THE_SAME}"
        )

    def _wait(self, work: Any) -> None:
        while True:
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._failures.look()

    def pause(self, word: str, batch: int, is_last: bool) -> bool:
        """Look how the others are, without waiting for them, and end with them if all want to.

        Who finds that all want to has them all end behind one batch, which nobody is past: each has said
        behind which one it stands before it began the next, and looks again behind that. So nobody is
        left alone in a collective of a batch.

        Args:
            word: of the place in the run that this process wants to end in, the same in all processes;
                or none. Without one, the others are looked at once in a second.
            batch: the number of the batch there that this process stands behind.
            is_last: this process leaves that place now.

        Returns:
            Whether this process ends here, as all do. What the first one finds who knows, holds for all.

        Raises:
            PeerError: if another process has failed.
        """
        if self._is_deaf:
            return bool(word) and self._failures.store_has_end()
        try:
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
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            # The process that had it may have come to a good end: that which all come to, if this one is
            # to end, too. Nobody is waited for here.
            self._is_deaf = True
            return bool(word) and self._failures.store_has_end()

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
        started_s = monotonic()
        next_s = min(_NOTICE_AFTER_S, timeout_s or _NOTICE_AFTER_S)
        looked_s = started_s
        try:
            while not self._store.check(keys):
                try:
                    self._failures.nap(_POLL_S)
                except PeerError:
                    if self._store.check(keys):
                        break  # it has failed with what all have said, as this process will by itself
                    raise
                if monotonic() - looked_s > LOOK_EVERY.total_seconds():
                    looked_s = monotonic()
                    self._refuse_left(keys)
                if timeout_s is not None and monotonic() - started_s > next_s:
                    missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                    text = (
                        f"Rank {', '.join(map(str, missing))} did not come to the start of training"
                        f" within {next_s:.0f} s: it has failed before, and says why, or it has other"
                        " callbacks. Give every process the same."
                    )
                    if next_s >= timeout_s:
                        raise self._failures.alone(text)
                    print(f"lightning_cudagraph: {text}", file=sys.stderr, flush=True)
                    next_s = timeout_s
            said = [pickle.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            if isinstance(error, CUDAGraphError):
                raise
            raise self._failures.error(f"the store is gone ({error})") from error
        # All have read what came before this.
        with contextlib.suppress(NotImplementedError):
            self._store.delete_key(f"{self._told - 1}/{self.rank}")
        return said

    def _refuse_left(self, keys: list[str]) -> None:
        """Do not wait for a process that has ended, and so will not say anything.

        Args:
            keys: under which each process says something.

        Raises:
            PeerError: naming it.
        """
        left = own_store(_LEFT)
        for rank, key in enumerate(keys):
            if left.check([str(rank)]) and not self._store.check([key]):
                raise self._failures.alone(
                    f"Another process of the run has ended, and rank {self.rank} ends with it: rank"
                    f" {rank}: {left.get(str(rank)).decode()}"
                )

    def compare(self, asked: Mapping[str, str], refused: UnsupportedError | None = None) -> None:
        """At the start: let no process begin what another one does not.

        Args:
            asked: what was asked for in this process, in words, by what it is called.
            refused: why this process would run without graphs.

        Raises:
            ConfigurationError: if the processes were asked for different things.
            UnsupportedError: if this process, or another one, would run without graphs.
        """
        refusal = None if refused is None else (refused.reason, refused.remedy)
        said = self.exchanged((asked, refusal))
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
        """This process ends with an error: let the others know, and wait for nothing that they leave."""
        self._has_failed = True
        self._failures.tell(error, self._gone)

    def _gone(self) -> None:
        """Who waits for this process learns at once that it does not come."""
        if self._board is not None:
            self._board.leave()
        self._leave()

    def close(self) -> None:
        """Meet no more."""
        if self._board is not None:
            self._board.end(well=not self._has_failed)
        if not self._has_failed:  # who fails comes to no end
            self._failures.end()
        self._failures.close()
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
                work.wait(_LEAVE_AFTER)
            if not work.is_completed():
                return
        dist.destroy_process_group(group)
