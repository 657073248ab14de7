"""The comparison of all recorded objects at once, in C, before each replay."""

from __future__ import annotations

import gc
import operator
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate, chain, repeat
from typing import Any

from lightning_cudagraph.checks.walk.host_objects import dict_behind
from lightning_cudagraph.checks.walk.parts import Node
from lightning_cudagraph.checks.walk.versions import Versions
from lightning_cudagraph.tensors.layouts import Layouts

# An end of each object in a list of what several refer to: what moves from one to the next shows.
_END = (object(),)


def with_ends(objects: Iterable[Any]) -> list[Any]:
    """Some objects, each with an end behind it."""
    return [*chain.from_iterable(zip(objects, repeat(_END)))]


def referents(holders: Iterable[Any], iterated: Iterable[Any]) -> list[Any]:
    """The objects that some refer to, as the garbage collector shows, and that others iterate over.

    A single object that equals no other, if an `OrderedDict` changes meanwhile.
    """
    try:
        return [*gc.get_referents(*holders), *chain.from_iterable(iterated)]
    except RuntimeError:
        return [object()]


class QuickComparison:
    """The nodes of a walk, and what of them can have changed.

    Attributes:
        holders: the objects whose referents are compared, with ends.
        ordered: the keys of those that are dictionaries, with ends.
        read: the nodes that can only be read one by one.
        large: those that are compared in pauses.
    """

    def __init__(self, nodes: list[Node], picked: list[Node], tensors: list[Node]) -> None:
        held = [node for node in nodes if node.holder is not None and not node.is_large]
        of_dicts = [node for node in held if type(node.holder) is dict]
        self.in_dicts = [*of_dicts, *picked]
        self._held = [node for node in held if type(node.holder) is not dict]
        holders = [node.holder for node in self._held]
        self.holders = with_ends(holders)
        # The garbage collector does not show keys that are strings.
        keys = [OrderedDict.keys(h) for h in holders if issubclass(type(h), OrderedDict)]
        self.ordered = with_ends([*keys, *(dict.keys(h) for h in holders if issubclass(type(h), dict))])
        self.read = [node for node in nodes if node.holder is None and not node.is_large]
        self.large = [node for node in nodes if node.is_large]
        self._tensors = tensors
        self._layouts = Layouts([node.owner for node in tensors])
        self.dicts = Versions(
            [dict_behind(node.holder) for node in self.in_dicts],
            [*(None for _ in of_dicts), *(node.reads for node in picked)],
        )
        self.remember()

    def remember(self) -> None:
        self.dicts.remember(self.dicts.changed())
        self._were = referents(self.holders, self.ordered)
        counts = [len(gc.get_referents(node.holder, _END)) for node in self._held]
        self._ends = [*accumulate(counts)] or [0]

    def moved(self) -> list[Node]:
        """The nodes that can have changed, without those of dictionaries."""
        suspects: list[Node] = []
        now = referents(self.holders, self.ordered)
        if len(now) != len(self._were) or len(now) < self._ends[-1]:
            suspects += self._held
        elif not all(map(operator.is_, now, self._were)):
            positions = [i for i, one in enumerate(map(operator.is_, now, self._were)) if not one]
            suspects += self._at(positions)
        if self.has_moved_tensors():
            suspects += self._tensors
        return suspects

    def has_moved_tensors(self) -> bool:
        tensors = self._tensors
        return bool(tensors) and self._layouts.changed([node.owner for node in tensors])

    def _at(self, positions: list[int]) -> list[Node]:
        """The nodes of the parts at some positions of the list of referents."""
        if positions[-1] >= self._ends[-1]:
            return self._held  # a key differs, of any node
        return [
            self._held[index] for index in sorted({bisect_right(self._ends, at) for at in positions})
        ]
