"""What the processes of a run have to do together, as the engine needs to know it.

NCCL says it of collectives: whether one is captured must be the same in all processes, and a graph
with collectives in it must be launched by all of them. So before each step, every process says what it
would do by itself, and all come to the same from what the others said.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol, TypeVar

__all__ = ["Agreement", "Intent", "of_ranks"]

T = TypeVar("T")


class Intent(IntEnum):
    """What a process would do with a batch, by itself."""

    REPLAY = 0
    VERIFY = 1
    EAGER = 2
    CAPTURE = 3
    WARM_UP = 4
    GIVE_UP = 5


class Agreement(Protocol):
    """How the processes of a run agree. All of them call each method, in the same order."""

    def meet(self, intent: Intent) -> tuple[Intent, Intent]:
        """Say what this process would do with its batch.

        Returns:
            The lowest and the highest of what the processes said.
        """

    def tell(self, mine: T) -> list[T]:
        """Say something, and hear what the others said; in the order of their ranks."""


def of_ranks(told: Iterable[str | None]) -> str:
    """What processes have said, with their ranks."""
    return "; ".join(f"{said} (rank {rank})" for rank, said in enumerate(told) if said)
