"""Parts of one Python object: read, compare and restore them, whatever its class.

Only memory is read: no property, `__getattr__` or `__eq__` of the user's runs.
"""

from __future__ import annotations

import copyreg
import gc
import logging
import re
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO, StringIO
from math import copysign
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_cudagraph.checks.audit.host_draws import generator_state, is_iterator
from lightning_cudagraph.checks.audit.host_objects import (
    UNSET,
    VALUES,
    attributes_of,
    dict_behind,
    namespace_of,
    slot_value,
    slots_of,
)

# Among ignored names: a wildcard for all that begin with an underscore.
PRIVATE = "_*"

# Compared by the value that `_hidden` reads, and by nothing else.
READ_WHOLE = (StringIO, BytesIO, torch.Generator, logging.Logger)
# Top-level modules of classes written in C whose objects a walk sees by their referents, or that have no
# state of the user's; a lock is taken and released.
_SEEN_OTHERWISE = frozenset({"builtins", "_thread", "_queue", "_struct", "torch"})
_OF_COPIES = ("__getstate__", "__getnewargs__", "__getnewargs_ex__")
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_SEQUENCES: tuple[Any, ...] = (list, deque, tuple)
_SETS: tuple[Any, ...] = (set, frozenset)
_SHOWN = VALUES - {bytes}
_MAX_SHOWN = 60
_MAX_DEPTH = 6  # of nested containers that are compared by value

Parts = dict[Any, Any]  # by their labels


class Item(NamedTuple):
    """The label of an item. The label of an attribute is its name."""

    key: Any


class How(NamedTuple):
    """The way to read an object.

    Attributes:
        is_attributes: it is the attribute dictionary of its owner.
        is_fixed: its holder cannot be given another object instead of it.
        draws: of a host random generator, read the state instead of the seed.
    """

    is_attributes: bool = False
    is_fixed: bool = False
    draws: bool = False


HOW = How()


class _Inside(NamedTuple):
    """The label of a part without a name: a field of an extension type, an entry of a cache."""

    position: Any


class _ById:
    """A key compared by identity, without calling its own `__hash__` and `__eq__`."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return id(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.key is self.key


@dataclass(eq=False)
class Node:
    """One object with a record of its parts.

    Attributes:
        holder: the garbage collector lists its referents; None for parts that are read otherwise.
        owner: the object that the user knows: the one that has the attributes, or the object itself.
        path: its path, as the user would write it.
        of: the start of the path, in words.
        read: reads its parts.
        write: restores them; None if they cannot be restored.
        parts: the recorded parts.
        ignored: labels of parts that are not compared.
        reads: names of parts that the step has read, if it has read the object.
        is_read: the step can have read the object: it mentions all names in the path.
        draws: it is a random generator.
        is_large: it is compared after pauses only.
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
    draws: bool = False
    is_large: bool = False

    def __post_init__(self) -> None:
        self.parts = self.read()

    def ignores(self, label: Any) -> bool:
        """True for a part that is not compared."""
        is_private = PRIVATE in self.ignored and isinstance(label, str) and label.startswith("_")
        return is_private or label in self.ignored

    def was_read(self, label: Any) -> bool:
        """True if the step can have read a part: it mentions the name of an attribute."""
        return self.is_read and (not isinstance(label, str) or not label or label in self.reads)

    def changes(self) -> Iterator[Moved]:
        """The parts that differ from the record."""
        now = self.read()
        if now.keys() == self.parts.keys() and [*now] != [*self.parts] and not self.ignored:
            yield Moved(self, None, UNSET, UNSET)
        for label in {**self.parts, **now}:
            was, part = self.parts.get(label, UNSET), now.get(label, UNSET)
            if was is part:
                continue
            is_same = was == part if self.draws else same(was, part)
            if not is_same and not self.ignores(label):
                yield Moved(self, label, was, part)

    def others(self) -> Iterator[str]:
        """The paths of parts that were replaced by equal objects, which can change later."""
        for label, part in self.read().items():
            if part is not self.parts.get(label) and not self.ignores(label) and not _is_value(part):
                yield joined(self.path, label)

    def put_back(self, parts: Parts) -> None:
        """Restore the compared parts to `parts`."""
        if self.write is None:
            return
        now = self.read()
        kept = {label: part for label, part in now.items() if self.ignores(label)}
        parts = {n: kept.get(n, part) for n, part in parts.items() if n in kept or not self.ignores(n)}
        parts |= kept
        if [*now] != [*parts] or any(not _is_one(part, now[label]) for label, part in parts.items()):
            self.write(parts)


class Moved(NamedTuple):
    """A changed part of an object.

    Attributes:
        label: the label of the part; None if the parts are in another order.
        was: the recorded part; `UNSET` if there was none.
        now: the present part; `UNSET` if there is none.
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
        """The object that holds the part."""
        return self.node.owner

    @property
    def draws(self) -> bool:
        """True for a random generator that was drawn from."""
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
    def is_read(self) -> bool:
        """True if the step can have read the part, by the names that it mentions."""
        return self.node.was_read(self.label)

    @property
    def attribute(self) -> str:
        """The last name in the path, without indices."""
        return re.sub(r"\[.*?\]", "", self.name).rpartition(".")[2]

    def is_harmless(self, names: Collection[str]) -> bool:
        """True if the user allows the change by one of `names`; for registered tensors, none does."""
        return not self.registered and self.is_under(names)

    def is_under(self, names: Collection[str]) -> bool:
        """True if the path is one of `names`, or lies under one."""
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
    if kind is float and not was and not now:
        return copysign(1.0, was) == copysign(1.0, now)
    if kind in VALUES:
        return bool(was == now or (was != was and now != now))
    inner = depth - 1
    if kind in (tuple, list):
        return len(was) == len(now) and all(map(same, was, now, (inner for _ in was)))
    if kind is dict:
        return same([*was], [*now], inner) and same([*was.values()], [*now.values()], inner)
    if kind in _SETS:
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
    if type(label) is _Inside:
        return path
    return f"{path}.{label}" if path and label else path or label


def items_of(path: str) -> str:
    """The path of all items of a container."""
    return f"{path}[...]"


# ---- reading and writing the parts, by the kind of object


def node_of(value: Any, owner: Any, path: str, of: str, how: How = HOW, **kwargs: Any) -> Node:
    """Record the parts of an object.

    Args:
        value: the object, or its attribute dictionary.
        of: the start of `path`, in words.
    """
    kind = type(value)
    holder: Any = value
    read: Callable[[], Parts]
    write: Callable[[Parts], object] | None = None
    if how.is_attributes:
        read, write = (lambda: dict(value)), (lambda parts: _write_attributes(value, parts))
    elif issubclass(kind, type):
        holder = dict_behind(namespace_of(value))
        read, write = (lambda: _of_class(value)), (lambda parts: _write_class(value, parts))
    elif how.draws and (state := generator_state(value)) is not None:
        holder = None
        kwargs["draws"] = True
        read, write = (lambda: {"": state[0]()}), (lambda parts: state[1](parts[""]))
    elif (hidden := _hidden(value)) is not None:
        holder = None
        read = lambda: {"": hidden()}  # noqa: E731
        if is_iterator(value) and not how.is_fixed:
            write = _nothing  # during a capture a `HeldIterator` replaces it, and refuses draws
    elif kind is FunctionType:
        read = lambda: _of_function(value)  # noqa: E731
    elif kind is CellType:
        read, write = (lambda: _of_cell(value)), (lambda parts: _write_cell(value, parts))
    elif issubclass(kind, dict):
        read, write = (lambda: _items(value)), (lambda parts: _write_items(value, parts))
    elif (base := next((b for b in _SEQUENCES if issubclass(kind, b)), None)) is not None:
        read = lambda: _members(value, base)  # noqa: E731
        write = None if base is tuple else (lambda parts: _write_members(value, base, parts))
    elif (base := next((b for b in _SETS if issubclass(kind, b)), None)) is not None:
        read = lambda: _of_set(value, base)  # noqa: E731
        write = None if base is frozenset else (lambda parts: _write_members(value, base, parts))
    elif issubclass(kind, np.ndarray) and value.dtype.hasobject:
        holder, read = None, lambda: _members(value.ravel().tolist(), list)
    elif (data := _bytes_of(value)) is not None:
        holder, read = None, lambda: {"": _bytes_of(value)}
        kwargs["is_large"] = len(data) > _QUICK_BYTES
        if not _is_read_only(
            value
        ):  # a NumPy scalar with fields changes, and its buffer cannot be written
            write = lambda parts: _write_bytes(value, parts[""])  # noqa: E731
    elif slots_of(kind) and not _has_state_in_c(kind):
        read, write = dict, _nothing  # it has the slots alone
    else:
        read, write = (lambda: _referents(value)), None
    if not how.is_attributes and not issubclass(kind, type) and (slots := slots_of(kind)):
        read, write = _with_slots(value, slots, read, write)
    node = Node(holder, owner, path, of, read, write, **kwargs)
    node.is_large |= len(node.parts) > _QUICK_MEMBERS
    return node


# Larger objects and buffers are compared after pauses, not before each replay.
_QUICK_MEMBERS = 4096
_QUICK_BYTES = 1 << 16


def _nothing(parts: Parts) -> None:
    pass


def _write_attributes(attributes: dict[str, Any], parts: Parts) -> None:
    if [*attributes] != [*parts]:  # the order of buffers is that of checkpoints
        attributes.clear()
    attributes.update(parts)


def _of_class(cls: type) -> Parts:
    return {n: part for n, part in namespace_of(cls).items() if not n.startswith(("__", "_abc_"))}


def _write_class(cls: type, parts: Parts) -> None:
    now = _of_class(cls)
    for name in now.keys() - parts.keys():
        type.__delattr__(cls, name)
    for name, value in parts.items():
        if now.get(name) is not value:
            type.__setattr__(cls, name, value)


def _base_of_dict(value: dict[Any, Any]) -> Any:
    """The class whose methods read the items: an OrderedDict keeps their order apart."""
    return OrderedDict if issubclass(type(value), OrderedDict) else dict


def _items(value: dict[Any, Any]) -> Parts:
    items = _base_of_dict(value).items(value)
    return {Item(k if type(k) in VALUES else _ById(k)): part for k, part in items}


def _write_items(value: dict[Any, Any], parts: Parts) -> None:
    base = _base_of_dict(value)
    base.clear(value)
    for label, part in parts.items():
        key = label.key
        base.__setitem__(value, key.key if type(key) is _ById else key, part)


def _members(value: Any, base: Any) -> Parts:
    # Dead weak references are left out: libraries that keep some remove them now and then.
    members = (part for part in base.__iter__(value) if not _is_dead(part))
    return {Item(index): part for index, part in enumerate(members)}


def _is_dead(part: Any) -> bool:
    return type(part) is weakref.ReferenceType and part() is None


def _of_set(value: Any, base: Any) -> Parts:
    return {_Inside(k if type(k) in VALUES else _ById(k)): k for k in base.__iter__(value)}


def _write_members(value: Any, base: Any, parts: Parts) -> None:
    base.clear(value)
    (base.update if base is set else base.extend)(value, parts.values())


def _has_state_in_c(kind: type) -> bool:
    """True for a class with a base in C other than `object`, such as `partial` or an exception."""
    bases = (base for base in kind.__mro__ if base is not object)
    return any(isinstance(namespace_of(base).get("__new__"), BuiltinFunctionType) for base in bases)


def _with_slots(
    value: Any,
    slots: dict[str, Any],
    read: Callable[[], Parts],
    write: Callable[[Parts], object] | None,
) -> tuple[Callable[[], Parts], Callable[[Parts], object] | None]:
    """The parts of an object and those in its slots."""
    names = {*slots, "__class__"}

    def write_both(parts: Parts) -> None:
        assert write is not None
        write({name: part for name, part in parts.items() if name not in names})
        _write_slots(value, slots, {name: part for name, part in parts.items() if name in names})

    return (lambda: {**read(), **_slots(value, slots)}), (None if write is None else write_both)


def _slots(value: Any, slots: dict[str, Any]) -> Parts:
    found = {name: slot_value(slot, value) for name, slot in slots.items()}
    return {name: part for name, part in found.items() if part is not UNSET} | {"__class__": type(value)}


def _write_slots(value: Any, slots: dict[str, Any], parts: Parts) -> None:
    for name in _slots(value, slots).keys() - parts.keys():
        slots[name].__delete__(value)
    for name, part in parts.items():
        if name in slots:
            slots[name].__set__(value, part)


def _of_function(value: FunctionType) -> Parts:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    defaults = (*(value.__defaults__ or ()), value.__kwdefaults__)
    return {
        **dict(cells),
        "__code__": value.__code__,
        **{_Inside(index): part for index, part in enumerate(defaults)},
    }


def _of_cell(cell: CellType) -> Parts:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # it is empty
        return {}


def _write_cell(cell: CellType, parts: Parts) -> None:
    if parts:
        cell.cell_contents = parts[""]
    else:
        del cell.cell_contents


def _referents(value: Any) -> Parts:
    """The class, the attribute dictionary, and the referents of an object that are no attributes."""
    attributes = attributes_of(value)
    known = {id(attributes), id(type(value))}
    if attributes is not None:
        known |= {id(part) for part in attributes.values()}
    found = (part for part in gc.get_referents(value) if id(part) not in known)
    return {"__class__": type(value), "__dict__": attributes} | {
        _Inside(index): part for index, part in enumerate(found)
    }


def _behind(proxy: Any) -> Any:
    """The object that a weak proxy stands for; `UNSET` if it is gone."""
    try:
        return proxy.__dir__.__self__
    except ReferenceError:
        return UNSET


def hides_state(value: Any) -> bool:
    """True for an object written in C with state that a walk cannot see, such as a database connection.

    Python itself cannot copy it either.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] in _SEEN_OTHERWISE or kind in copyreg.dispatch_table:
        return False
    copies = {getattr(kind, name) for name in ("__reduce__", "__reduce_ex__")}
    is_plain = copies == {object.__reduce__, object.__reduce_ex__}
    if not is_plain or _hidden(value) is not None or _bytes_of(value) is not None:
        return False
    if any(isinstance(getattr(kind, name, None), FunctionType) for name in _OF_COPIES):  # user code
        return False
    try:
        object.__reduce_ex__(value, 2)
    except TypeError:
        return True
    return False


def _hidden(value: Any) -> Callable[[], Any] | None:
    """A function that reads state which neither the garbage collector nor a buffer shows; or None."""
    kind = type(value)
    if kind in PROXIES:
        return lambda: _behind(value)
    if issubclass(kind, weakref.ReferenceType):
        return lambda: weakref.ReferenceType.__call__(value)
    if kind is ContextVar:
        return lambda: value.get(UNSET)
    if issubclass(kind, (StringIO, BytesIO)):
        return lambda: (kind.getvalue(value), kind.tell(value))
    if issubclass(kind, torch.Generator):
        return lambda: value.initial_seed()
    if issubclass(kind, logging.Logger):
        return lambda: (value.getEffectiveLevel(), value.disabled, value.manager.disable)
    if kind.__module__ == "_thread" and hasattr(kind, "locked"):
        return lambda: kind.locked(value)
    if is_iterator(value):  # of Python itself, so that no user code runs
        own = vars(kind)
        if "__repr__" in own and kind.__module__ == "itertools":
            return lambda: repr(value)  # `count(5)`
        if "__reduce__" in own and kind.__module__ == "builtins":
            return lambda: value.__reduce__()  # the position that a copy would start from
    return None


def _bytes_of(value: Any) -> bytes | None:
    """The contents of a buffer. The view is closed, because a buffer with a view cannot be resized."""
    try:
        with memoryview(value) as view:
            return view.tobytes()
    except (TypeError, ValueError, BufferError):
        return None


def _is_read_only(value: Any) -> bool:
    with memoryview(value) as view:
        return view.readonly


def _write_bytes(value: Any, data: bytes) -> None:
    with memoryview(value) as view, view.cast("B") as flat:
        is_as_long = len(flat) == len(data)
        if is_as_long:
            flat[:] = data
    if is_as_long:
        return
    # Python's own buffers that can grow; with the view closed, because it keeps them from that.
    if isinstance(value, bytearray):
        bytearray.__setitem__(value, slice(None), data)
    elif isinstance(value, array):
        array.__delitem__(value, slice(None))
        array.frombytes(value, data)
