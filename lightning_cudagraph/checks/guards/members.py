"""Guard on the members of lists and dictionaries, by identity."""

from __future__ import annotations

import gc
import operator
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from lightning_cudagraph.checks.walk.quick import with_ends
from lightning_cudagraph.checks.walk.versions import Versions

_VIEW: Any = type({}.values())


class Members:
    """The members of live lists and dictionary views, to compare later: identity, order and number.

    Equality is not used: tensors would compute it.

    Attributes:
        versions: the dictionaries.
        lists: the rest, with ends.
        empty: what was empty.
    """

    def __init__(self, parts: Iterable[Collection[Any]]) -> None:
        parts = [*parts]
        views = [part for part in parts if type(part) is _VIEW]
        held = [each for view in views for each in gc.get_referents(view)]
        # Each once, because one number for each is read before each replay; of an empty one, none.
        self.versions = Versions({id(each): each for each in held if each}.values())
        others = [part for part in parts if type(part) is not _VIEW]
        self.lists: list[Any] = with_ends(part for part in others if part)
        self.empty = [part for part in (*others, *held) if not part]
        self._were = [*chain.from_iterable(self.lists)]

    def changed(self) -> bool:
        now = [*chain.from_iterable(self.lists)]
        is_same = len(now) == len(self._were) and all(map(operator.is_, now, self._were))
        return bool(self.versions.changed()) or not is_same
