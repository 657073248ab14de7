"""Parts of one Python object: their record, their changes, and the words for these.

No `__eq__` of the user's runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import copysign
from threading import Lock
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from lightning_cudagraph.checks.walk.host_objects import UNSET, VALUES

# Among ignored names: a wildcard for all that begin with an underscore.
PRIVATE = "_*"

# Labels of parts that every read of a function, or of a class, depends on.
CODE, BASES = "__code__", "__bases__"

SETS: tuple[Any, ...] = (set, frozenset)
_LOCK = type(Lock())
_SHOWN = VALUES - {bytes}
_MAX_SHOWN = 60
_MAX_DEPTH = 6  # of nested containers that are compared by value

Parts = dict[Any, Any]  # by their labels
# The label of an object in place of parts that change while they are read, so that no record is equal.
UNSTEADY = "?"


class Item(NamedTuple):
    """The label of an item. The label of an attribute is its name."""

    key: Any


class Inside(NamedTuple):
    """The label of a part without a name: a field of an extension type, an entry of a cache."""

    position: Any


class ById:
    """A key compared by identity, without calling its own `__hash__` and `__eq__`."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return id(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.key is self.key


@dataclass(eq=False)
class Node:
    """One object with a record of its parts.

    Attributes:
        holder: the garbage collector lists its referents; None for parts that are read otherwise.
        owner: the object that the user knows: the one that has the attributes, or the object itself.
        write: restores them; None if they cannot be restored.
        reads: names of parts that the step has read, if it has read the object.
        is_read: the step can have read the object: it mentions all names in the path.
        is_behind_hook: a hook, or a mode of torch, leads to it.
    """

    holder: Any
    owner: Any
    path: str
    of: str
    read: Callable[[], Parts]
    write: Callable[[Parts], object] | None = None
    ignored: frozenset[Any] = frozenset()
    reads: frozenset[str] = frozenset()
    is_read: bool = False
    is_behind_hook: bool = False
    draws: bool = False
    is_large: bool = False

    def __post_init__(self) -> None:
        self.read = partial(_steady, self.read)
        self.parts = self.read()

    def ignores(self, label: Any) -> bool:
        is_private = PRIVATE in self.ignored and isinstance(label, str) and label.startswith("_")
        return is_private or label in self.ignored

    def was_read(self, label: Any) -> bool:
        """True if the step can have read a part: it mentions the name of an attribute."""
        is_mentioned = not isinstance(label, str) or label in ("", CODE, BASES) or label in self.reads
        return self.is_read and is_mentioned

    def changes(self) -> Iterator[Moved]:
        now = self.read()
        if now.keys() == self.parts.keys() and [*now] != [*self.parts] and not self.ignored:
            yield Moved(self, None, UNSET, UNSET)
        for label in {**self.parts, **now}:
            was, part = self.parts.get(label, UNSET), now.get(label, UNSET)
            if was is part:
                continue
            is_same = was == part if self.draws else same(was, part, self._depth(label))
            if not is_same and not self.ignores(label):
                yield Moved(self, label, was, part)

    def _depth(self, label: Any) -> int:
        """The depth of a comparison by value; 0 for a table of a module, which guards hold."""
        return 0 if label in _TABLES and issubclass(type(self.owner), nn.Module) else _MAX_DEPTH

    def others(self) -> Iterator[Moved]:
        """The parts that were replaced by equal objects, which can change later."""
        for label, part in self.read().items():
            was = self.parts.get(label)
            if part is not was and not self.ignores(label) and not _is_value(part):
                yield Moved(self, label, was, part)

    def put_back(self, parts: Parts) -> None:
        now = self.read()
        if UNSTEADY in now or UNSTEADY in parts or any(moved.is_lasting for moved in self.changes()):
            return
        kept = {label: part for label, part in now.items() if self.ignores(label)}
        parts = {n: kept.get(n, part) for n, part in parts.items() if n in kept or not self.ignores(n)}
        parts |= kept
        is_other = [*now] != [*parts] or any(not _is_one(part, now[n]) for n, part in parts.items())
        if self.write is not None and is_other:
            self.write(parts)


def _steady(read: Callable[[], Parts], tries: int = 100) -> Parts:
    """Read parts, again if they change meanwhile: the `__hash__` of a key lets other threads run."""
    try:
        return read()
    except RuntimeError:  # "mutated during iteration"
        return _steady(read, tries - 1) if tries else {UNSTEADY: object()}


class Moved(NamedTuple):
    """A changed part of an object.

    Attributes:
        label: the label of the part; None if the parts are in another order.
    """

    node: Node
    label: Any
    was: Any
    now: Any

    @property
    def path(self) -> str:
        """The path of the part, as the user would write it."""
        return self.node.path if self.label is None else joined(self.node.path, self.label)

    @property
    def part(self) -> tuple[str, str]:
        """The part that checks clear: of an item that was added or removed, all items of its container.

        A record that grows in every step has another item each time.
        """
        is_other_size = (self.was is UNSET or self.now is UNSET) and type(self.label) is Item
        return self.of, items_of(self.node.path) if is_other_size else self.path

    @property
    def name(self) -> str:
        """The name for users: of an item, the path of its container."""
        is_item = type(self.label) is Item and not _is_table(self.node.path)
        return self.node.path if is_item else self.path

    @property
    def of(self) -> str:
        """The start of the path, in words; empty for a generator of the whole process."""
        return self.node.of

    @property
    def holder(self) -> Any:
        return self.node.owner

    @property
    def draws(self) -> bool:
        return self.node.draws

    @property
    def registered(self) -> str:
        """The kind of tensor that a module registers, "parameter" or "buffer"; else empty."""
        return _REGISTERED.get(self.node.path.rpartition(".")[2], "")

    @property
    def subject(self) -> tuple[str, str]:
        """The part, as several checks that find it name it."""
        return self.name, self.of

    @property
    def is_lasting(self) -> bool:
        """True if the change cannot be undone: as that of a table of locks, by which threads wait."""
        return self.node.write is None or _LOCK in (type(self.was), type(self.now))

    @property
    def is_read(self) -> bool:
        """True if the step can have read the part, by the names that it mentions."""
        return self.node.was_read(self.label)

    @property
    def is_stale(self) -> bool:
        """True if graphs are stale by the change itself: of others, a check tells if they are.

        A hook may collect what a captured step does not read: items, tensors and objects.
        """
        parts = [part for part in (self.was, self.now) if part is not UNSET]
        is_value = type(self.label) is str and all(type(part) in VALUES for part in parts)
        return self.is_read and (is_value or not self.node.is_behind_hook)

    @property
    def attribute(self) -> str:
        """The last name in the path, without indices."""
        return re.sub(r"\[.*?\]", "", self.name).rpartition(".")[2]

    def is_harmless(self, names: Collection[str]) -> bool:
        """True if the user allows the change by one of `names`; for registered tensors, none does."""
        return not self.registered and self.is_under(names)

    def is_under(self, names: Collection[str]) -> bool:
        return any(self.path == at or self.path.startswith((f"{at}.", f"{at}[")) for at in names)

    @property
    def words(self) -> str:
        """The change in words, with both values where they are numbers or texts."""
        is_new = self.was is UNSET and self.now is not UNSET
        verb = "was set" if is_new else "changed"
        return f"`{self.path}` of {self.of} {verb}{in_words(self.was, self.now)}"


def same(was: Any, now: Any, depth: int = _MAX_DEPTH) -> bool:
    """Compare two parts: the same object, or an equal value of the same type."""
    if was is now:
        return True
    kind = type(was)
    if kind is not type(now) or not depth:
        return False
    if kind is complex:
        return same(was.real, now.real) and same(was.imag, now.imag)
    if kind is float and not was and not now:
        return copysign(1.0, was) == copysign(1.0, now)
    if kind in VALUES:
        return bool(was == now or (was != was and now != now))
    inner = depth - 1
    if kind in (tuple, list):
        return len(was) == len(now) and all(map(same, was, now, (inner for _ in was)))
    if kind is dict:
        return same([*was], [*now], inner) and same([*was.values()], [*now.values()], inner)
    if kind in SETS:
        return all(type(member) in VALUES for member in (*was, *now)) and bool(was == now)
    if kind is MethodType:
        return was.__self__ is now.__self__ and was.__func__ is now.__func__
    if kind.__module__ == "numpy" and hasattr(kind, "dtype"):
        is_alike = was.dtype == now.dtype and was.shape == now.shape
        return bool(is_alike and not was.dtype.hasobject and was.tobytes() == now.tobytes())
    return False


def _is_one(was: Any, now: Any) -> bool:
    """Compare two parts by identity, and immutable values by value."""
    return was is now or (_is_value(was) and same(was, now))


def _is_value(part: Any) -> bool:
    if type(part) is tuple:
        return all(map(_is_value, part))
    return type(part) in VALUES or type(part) is MethodType


def in_words(was: Any, now: Any) -> str:
    """Both values of a part, as the end of a sentence; empty unless they are numbers or texts."""
    if type(now) not in _SHOWN or (was is not UNSET and type(was) not in _SHOWN):
        return ""
    since = "" if was is UNSET else f" from {str(was)[:_MAX_SHOWN]}"
    return f"{since} to {str(now)[:_MAX_SHOWN]}"


# The dictionaries in which modules keep attributes that are parameters, buffers or modules.
_TABLES = ("_parameters", "_buffers", "_modules")
_REGISTERED = {"_parameters": "parameter", "_buffers": "buffer"}


def _is_table(path: str) -> bool:
    return path.rpartition(".")[2] in _TABLES


def joined(path: str, label: Any) -> str:
    """The path of a part, as the user would write it."""
    if _is_table(path) and type(label) is Item:  # `layer.weight` for `layer._parameters["weight"]`
        path, label = path.rpartition(".")[0], label.key
    if type(label) is Item:
        return f"{path}[{label.key!r}]" if type(label.key) in VALUES else path
    if type(label) is Inside or label == UNSTEADY:
        return path
    return f"{path}.{label}" if path and label else path or label


def items_of(path: str) -> str:
    """The path of all items of a container."""
    return f"{path}[...]"
