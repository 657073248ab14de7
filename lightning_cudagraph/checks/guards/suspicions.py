"""Suspicions: changes of which a check of each graph has to tell if the graph depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from lightning_cudagraph.checks.walk.parts import Moved

_Part = tuple[str, str]

# After so many checks of one graph that found no effect of a part, the part is not compared any more.
_CHECKS_TO_CLEAR = 3


class Suspicions:
    """The suspicions against graphs, each until a check of that very graph clears it.

    Attributes:
        ignored: parts that are not compared any more, with the words for their last change. They count
            as changed for every other graph, until it has had as many checks.
    """

    def __init__(self) -> None:
        self._checks: WeakKeyDictionary[object, Counter[_Part]] = WeakKeyDictionary()
        self._open: WeakKeyDictionary[object, dict[_Part, str]] = WeakKeyDictionary()
        self.ignored: dict[_Part, str] = {}
        self._read: set[_Part] = set()

    def begin(self, graph: object) -> None:
        """Note a graph, which has baked in the present."""
        if graph not in self._checks:
            self._checks[graph] = Counter()
            self._suspect(graph, self.ignored)

    def add(self, moved: Iterable[Moved]) -> None:
        """Suspect all graphs of depending on changed parts. Those that steps read are never ignored."""
        moved = [*moved]
        found = {change.part: change.words for change in moved}
        self._read |= {change.part for change in moved if change.is_read}
        for graph in self._checks:
            self._suspect(graph, found)

    def of(self, graph: object) -> str:
        """A change on which a graph may depend, in words; empty if there is none."""
        return next(iter(self._open.get(graph, {}).values()), "") if self._open else ""

    def clear(self, graph: object) -> bool:
        """Clear the suspicions against a graph, after a check; return True if there were any."""
        if not (cleared := self._open.pop(graph, {})):
            return False
        checks = self._checks[graph]
        checks.update(cleared.keys() - self._read)
        self.ignored |= {part: cleared[part] for part in cleared if checks[part] >= _CHECKS_TO_CLEAR}
        self._suspect(graph, self.ignored)
        return True

    def forget(self) -> None:
        """Forget all graphs, when they are released."""
        self._checks.clear()
        self._open.clear()
        self.ignored.clear()
        self._read.clear()

    def _suspect(self, graph: object, parts: dict[_Part, str]) -> None:
        checks = self._checks[graph]
        if left := {part: words for part, words in parts.items() if checks[part] < _CHECKS_TO_CLEAR}:
            self._open.setdefault(graph, {}).update(left)
