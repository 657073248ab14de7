"""Votes of the processes of a run on what to do with a batch.

NCCL requires of collectives that all processes capture one, or none, and that all of them launch a graph
with collectives in it. So before each step every process votes for its own plan, and all derive the same
decision from all votes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Protocol, TypeVar

from lightning_cudagraph.errors import UnsupportedError

T = TypeVar("T")


class Closeable(Protocol):
    """An object that is released by `close`."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


class Intent(IntEnum):
    """The plan of one process for a batch, before the vote."""

    REPLAY = 0
    VERIFY = 1
    EAGER = 2
    CAPTURE = 3
    WARM_UP = 4
    GIVE_UP = 5


class Agreement(Protocol):
    """Votes of the processes of a run. All processes call the same methods in the same order."""

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        """Vote for the plan of this process; returns the lowest and the highest vote of all."""

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process, by rank."""


class Alone:
    """The `Agreement` of a process with itself."""

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        return intent, intent

    def gather(self, mine: T) -> list[T]:
        return [mine]


def made_by_all(
    make: Callable[[], C], compare: Callable[[C | None, UnsupportedError | None], object]
) -> C:
    """Make an object in all processes, or in none.

    Args:
        compare: takes the object, or what refuses it here, and raises an error if another process has
            none; the object is closed then.
    """
    made: C | None = None
    refused: UnsupportedError | None = None
    try:
        made = make()
    except UnsupportedError as error:
        refused = error
    try:
        compare(made, refused)
    except BaseException:
        if made is not None:
            made.close()
        raise
    if refused is not None:
        raise refused
    assert made is not None
    return made


def of_ranks(reasons: Iterable[str | None]) -> str:
    """Join the reasons of processes, with their ranks."""
    return "; ".join(f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason)
