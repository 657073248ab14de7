"""Memory of batch signatures, of which there may be any number, and why none is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_cudagraph.errors import Location

K = TypeVar("K")
V = TypeVar("V")

_MAX_REMEMBERED = 64


def make_room(known: dict[K, V], is_idle: Callable[[V], bool] = lambda value: True) -> list[V]:
    """Forget the oldest idle entry if too many signatures are remembered.

    A loader of which no two batches look alike (a string in each) would otherwise fill the memory.
    """
    forgotten: list[V] = []
    while len(known) >= _MAX_REMEMBERED:
        oldest = next((key for key, value in known.items() if is_idle(value)), None)
        if oldest is None:
            break
        forgotten.append(known.pop(oldest))
    return forgotten


class NotCaptured(str):
    """The reason why nothing is captured, and a remedy, in words; and the user's line."""

    what = ""
    remedy = ""
    location: Location | None = None

    @classmethod
    def of(cls, what: str, remedy: str, location: Location | None) -> NotCaptured:
        made = cls(f"{what}. {remedy}")
        made.what, made.remedy, made.location = what, f"{remedy}.", location
        return made
