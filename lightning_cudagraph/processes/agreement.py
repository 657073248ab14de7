"""The decisions that the processes of a run take together, as the engine needs to know them.

NCCL says it of collectives: whether one is captured must be the same in all processes, and a graph
with collectives in it must be launched by all of them. So before each step every process votes for what
it would do by itself, and all come to the same from the votes of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol, TypeVar

__all__ = ["Agreement", "Intent", "of_ranks"]

T = TypeVar("T")


class Intent(IntEnum):
    """The plan of a process for a batch, by itself."""

    REPLAY = 0
    VERIFY = 1
    EAGER = 2
    CAPTURE = 3
    WARM_UP = 4
    GIVE_UP = 5


class Agreement(Protocol):
    """The agreement of the processes of a run. All call each method, in the same order."""

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        """Vote for what this process would do with its batch.

        Returns:
            The lowest and the highest vote of all processes.
        """

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process, in the order of their ranks."""


def of_ranks(reasons: Iterable[str | None]) -> str:
    """The reasons of processes, with their ranks."""
    return "; ".join(f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason)
