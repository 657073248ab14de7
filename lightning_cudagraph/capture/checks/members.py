"""The objects in lists and dictionaries, compared by identity alone."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

__all__ = ["Members"]


class Members:
    """The objects in lists and in views of dictionaries: the same ones, in the same order, and no more.

    Args:
        parts: live views or lists. Equality is never asked for, because tensors would compute it.
    """

    def __init__(self, parts: Iterable[Collection[Any]]) -> None:
        parts = [*parts]
        self._filled = [part for part in parts if len(part)]
        self._empty = [part for part in parts if not len(part)]
        self._were = [*chain.from_iterable(self._filled)]

    def changed(self) -> bool:
        now = chain.from_iterable(self._filled)
        same = sum(map(len, self._filled)) == len(self._were) and all(map(operator.is_, now, self._were))
        return not same or any(map(len, self._empty))
