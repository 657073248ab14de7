"""The look before each replay: all that guards compare, in a few calls of C functions.

It tells only that nothing was written. If anything was, each guard compares its own part.
"""

from __future__ import annotations

import operator
from itertools import accumulate, chain
from typing import Any

from lightning_cudagraph.checks.guards.structure import Structure
from lightning_cudagraph.checks.walk.quick import QuickComparison, referents
from lightning_cudagraph.checks.walk.versions import numbers_of


class OnePass:
    """The comparison of a structure and of a walk at once.

    Both must have been compared before, with no change.

    Attributes:
        quick: the comparison of the walk, which is another one when the walk is renewed.
    """

    def __init__(self, structure: Structure, quick: QuickComparison) -> None:
        self.quick = quick
        self._structure = structure
        versions = [*structure.versions, quick.dicts]
        self._dicts = [*chain.from_iterable(each.dicts for each in versions)]
        ends = [*accumulate(len(each.dicts) for each in versions)]
        self._versions = [*zip(versions, map(slice, [0, *ends], ends), strict=False)]
        self._holders = quick.apart
        self._iterated = [*quick.ordered, *structure.members.lists]
        self._were = self._now = self._referents()
        # Each guard has its own numbers, so that what was written before this is found by it.
        self._numbers = [*chain.from_iterable(each.numbers for each in versions)]

    def _referents(self) -> list[Any]:
        return referents(self._holders, self._iterated)

    def is_same(self) -> bool:
        """True if nothing can have changed since the last comparison."""
        if self.quick.read:
            return False
        numbers = numbers_of(self._dicts)
        if numbers != self._numbers:
            for each, part in self._versions:
                if numbers[part] != self._numbers[part] and each.changed(numbers[part]):
                    return False
            self._numbers = numbers
        self._now = now = self._referents()
        return (
            len(now) == len(self._were)
            and all(map(operator.is_, now, self._were))
            and not self._structure.has_moved()
            and not self.quick.has_moved_tensors()
        )

    def accept(self) -> None:
        """Note that the guards have found no change that counts since the last look."""
        self._were = self._now
