"""The look before each replay: all that guards compare, in a few calls of C functions.

It tells only that nothing was written. If anything was, each guard compares its own part.
"""

from __future__ import annotations

import operator
from itertools import compress
from typing import Any

from lightning_cudagraph.checks.guards.structure import Structure
from lightning_cudagraph.checks.walk.quick import QuickComparison, referents
from lightning_cudagraph.checks.walk.versions import OwnWrites, Versions, numbers_of

# Places of one dictionary: the records that hold it, each with its position there.
_Places = list[tuple[Versions, int]]


class OnePass:
    """The comparison of a structure and of a walk at once.

    Both must have been compared before, with no change.

    Attributes:
        quick: the comparison of the walk, which is another one when the walk is renewed.
    """

    def __init__(self, structure: Structure, quick: QuickComparison) -> None:
        self.quick = quick
        self._structure = structure
        self._holders = quick.holders
        self._iterated = [*quick.ordered, *structure.members.lists]
        self._were = self._now = self._referents()
        self._empty: list[dict[Any, Any]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._places: list[_Places] = []
        self._numbers: list[object] = []
        self._index: dict[int, int] = {}

    def _referents(self) -> list[Any]:
        return referents(self._holders, self._iterated)

    def is_same(self) -> bool:
        """True if nothing can have changed since the last comparison."""
        if self.quick.read or not self._are_dicts_same():
            return False
        self._now = now = self._referents()
        return (
            len(now) == len(self._were)
            and all(map(operator.is_, now, self._were))
            and not self._structure.has_moved()
            and not self.quick.has_moved_tensors()
        )

    def _are_dicts_same(self) -> bool:
        numbers = numbers_of(self._dicts)
        if any(self._empty):
            return False
        if numbers != self._numbers:
            written = compress(self._places, map(operator.ne, numbers, self._numbers))
            if not all(record.is_same(index) for places in written for record, index in places):
                return False
            self._numbers = numbers
        return True

    def pass_over(self, writes: OwnWrites) -> None:
        """Take a dictionary as compared that only these writes have changed since the last look."""
        index = self._index.get(id(writes.held))
        if index is not None and self._numbers[index] == writes.before:
            self._numbers[index] = writes.after

    def accept(self) -> None:
        """Note that the guards have found no change that counts since the last look."""
        self._were = self._now
        if not self._dicts or any(self._empty):
            self._sort_dicts()

    def _sort_dicts(self) -> None:
        """Collect the dictionaries, each once; of an empty one, the length is enough."""
        found: dict[int, _Places] = {}
        for record in (*self._structure.versions, self.quick.dicts):
            for index, held in enumerate(record.dicts):
                found.setdefault(id(held), []).append((record, index))
        self._empty, self._dicts, self._places, self._numbers = [], [], [], []
        for places in found.values():
            record, index = places[0]
            held = record.dicts[index]
            if not held and all(record.is_same(index) for record, index in places):
                self._empty.append(held)
                continue
            self._dicts.append(held)
            self._places.append(places)
            # That of the last comparison of all, so that what was written since is found.
            numbers = {record.numbers[index] for record, index in places}
            self._numbers.append(numbers.pop() if len(numbers) == 1 else None)
        self._index = {id(held): index for index, held in enumerate(self._dicts)}
