"""What is prepared once for many steps, as long as these are not all different."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

__all__ = ["kept"]

# Steps take turns with few layouts. Where each one calls other layers, what was prepared for those
# before is of no use, and would grow with the run.
_MOST = 64

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def kept(found: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """The value of a key, made if there is none; of too many, all others are let go of."""
    try:
        return found[key]
    except KeyError:
        value = make()
        if len(found) >= _MOST:
            found.clear()
        found[key] = value
        return value
