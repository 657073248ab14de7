"""Dictionary versions: find the dictionaries that were written to, by one number for each.

Python numbers the states of a dictionary, and Dynamo's guards read that number, in the time of comparing
two or three values. A new number means a write, not another value, so the values are compared then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from itertools import compress, repeat
from typing import Any

import torch


def _version_getter() -> Callable[[dict[Any, Any]], int] | None:
    """The function that reads the version of a dictionary; None if it is missing or misses writes."""

    class Holder:
        """An object with attributes, and a class with functions."""

    try:
        guards: Any = torch._C._dynamo.guards
        version: Callable[[dict[Any, Any]], int] = guards.dict_version
        probe, plain = Holder(), {0: 0}
        own: Any = vars(probe)
        probe.value = 0  # type: ignore[attr-defined]

        def replace() -> None:
            plain[0] = 1

        def add() -> None:
            probe.other = 1  # type: ignore[attr-defined]

        def remove() -> None:
            del probe.other  # type: ignore[attr-defined]

        def set_often() -> None:
            for number in range(100):  # enough for the interpreter to specialise the instruction
                probe.value = number  # type: ignore[attr-defined]

        for held, write in ((plain, replace), (own, add), (own, remove), (own, set_often)):
            before = version(held)
            write()
            if version(held) == before:
                return None
        return version
    except (AttributeError, TypeError):
        return None


_version = _version_getter()
_MISSING = object()


def numbers_of(dicts: Sequence[dict[Any, Any]]) -> list[object]:
    """The present version of each dictionary."""
    # Without versions, objects that equal no others: any dictionary may have been written to.
    return [*map(_version, dicts)] if _version is not None else [object() for _ in dicts]


# Calls an object in C.
_call = getattr(operator, "call", operator.methodcaller("__call__"))


class OwnWrites:
    """Writes of this package to a key of a dictionary around other code, the last of which restores it.

    Each write has a version. If there were no others in between, the content is what it was before.

    Attributes:
        before: the version before the first write; an object that equals no version, if other code has
            written since.
        after: the version after the last write.
    """

    def __init__(self, held: dict[Any, Any], key: str) -> None:
        self.held = held
        self._key = key
        self._read: Callable[[], object] = object if _version is None else partial(_version, held)
        self._calls: dict[object, tuple[Callable[[], object], ...]] = {}
        self.before: object = None
        self.after: object = None

    def begin(self, value: Hashable) -> None:
        self.before, _, self.after = self._written(value)

    def write(self, value: Hashable) -> None:
        found, _, now = self._written(value)
        if found != self.after:
            self.before = object()
        self.after = now

    def _written(self, value: Hashable) -> list[object]:
        calls = self._calls.get(value)
        if calls is None:
            write = partial(self.held.__setitem__, self._key, value)
            calls = self._calls[value] = self._read, write, self._read
        return [*map(_call, calls)]  # in C, so that no other thread writes in between


class Versions:
    """A record of dictionaries, by version and by the identity of keys and values.

    The order of an `OrderedDict` is kept apart from its items, and not compared.

    Args:
        names: for each, the only keys that are compared; None for all of them.

    Attributes:
        numbers: their versions at the last comparison without a change.
    """

    def __init__(
        self, dicts: Iterable[dict[Any, Any]], names: Iterable[Collection[str] | None] = ()
    ) -> None:
        self.dicts = [*dicts]
        self._names = [*names] or [None] * len(self.dicts)
        self.numbers = numbers_of(self.dicts)  # first, because another thread may write in between
        self._contents = [*map(self._content, range(len(self.dicts)))]

    def _content(self, index: int) -> tuple[list[Any], list[Any]]:
        held, names = self.dicts[index], self._names[index]
        if names is None:
            return [*dict.keys(held)], [*dict.values(held)]
        return [*names], [*map(dict.get, repeat(held), names, repeat(_MISSING))]

    def changed(self) -> list[int]:
        """The positions of the dictionaries with other keys or values than recorded, by identity."""
        now = numbers_of(self.dicts)
        if now == self.numbers:
            return []
        written = map(operator.ne, now, self.numbers)
        found = [index for index in compress(range(len(now)), written) if not self.is_same(index)]
        if not found:
            self.numbers = now
        return found

    def is_same(self, index: int) -> bool:
        """True if the dictionary at a position has the keys and values that were recorded."""
        keys, values = self._contents[index]
        held, names = self.dicts[index], self._names[index]
        if names is not None:
            return all(map(operator.is_, map(dict.get, repeat(held), names, repeat(_MISSING)), values))
        now_keys, now_values = self._content(index)  # copies: another thread may write in between
        return (
            len(now_keys) == len(keys)
            and len(now_values) == len(values)
            and all(map(operator.is_, now_keys, keys))
            and all(map(operator.is_, now_values, values))
        )

    def remember(self, positions: Iterable[int]) -> None:
        self.numbers = numbers_of(self.dicts)
        for index in positions:
            self._contents[index] = self._content(index)
