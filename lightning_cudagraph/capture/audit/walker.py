"""A generic walk over Python objects: what they hold, compared without knowing their classes.

The garbage collector knows the referents of every object that can hold others: attributes, items,
slots, variables of closures and of suspended generators, entries of caches, fields of extension types.
The buffer protocol shows the bytes of those that hold numbers. So a value is found wherever it is kept,
with no line here about the class that keeps it. Iterators, context variables, weak references, locks
and files in memory hide something from both, and are read by their own means.

Not entered: modules of Python, library functions and classes, tensors (a graph reads their memory), and
objects of a framework that change in every step by themselves, such as a trainer.
"""

from __future__ import annotations

import gc
import logging
import operator
import sys
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import accumulate, chain
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.audit.host_draws import is_iterator
from lightning_cudagraph.capture.audit.host_objects import (
    UNSET,
    VALUES,
    attributes_of,
    is_users_class,
    namespace_of,
    slot_value,
    slots_of,
)
from lightning_cudagraph.capture.sentry import is_users

__all__ = ["PRIVATE", "Moved", "Root", "Walk"]

# Among names that are left out: all that begin with an underscore.
PRIVATE = "_*"

# Objects that are looked into. Where there are more, the rest is left to checks against eager steps.
_MAX_OBJECTS = 20_000
# Larger objects and buffers are compared only after a pause, not before each replay.
_QUICK_MEMBERS = 4096
_QUICK_BYTES = 1 << 16

_CLOSED = (
    *(CodeType, TracebackType, property),
    *(MethodWrapperType, WrapperDescriptorType),
)
# Of these, and of attributes and slots, all parts can be set.
_SEQUENCES: tuple[Any, ...] = (list, deque, set)
_MUTABLE = (dict, *_SEQUENCES)
_SHOWN = VALUES - {bytes}
_MAX_SHOWN = 60
# Nothing else of them is looked at.
_READ_WHOLE = (StringIO, BytesIO, torch.Generator, logging.Logger)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# Compared by identity; what is in them is looked into by itself.
_OWN = ("__class__", "__dict__")
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class Root(NamedTuple):
    """Where a walk begins.

    Attributes:
        value: the object.
        path: its name; empty for an object whose attributes are named by themselves.
        of: what the path starts at, in words.
        left_out: names of attributes, or of items of a dictionary, that are not looked at.
        is_entered: it is looked into even if objects of its class are not.
        in_tuple: it was found in a tuple, in which no other object can be put in its place.
    """

    value: Any
    path: str
    of: str
    left_out: frozenset[str] = frozenset()
    is_entered: bool = False
    in_tuple: bool = False


@dataclass(eq=False)
class _Node:
    """One object whose parts are compared.

    Attributes:
        holder: the object.
        owner: what the user knows it as part of: the object whose attributes it holds, or itself.
        path: its own.
        of: what the path starts at.
        read: its parts, by their labels.
        parts: what these were.
        ignored: labels of parts that are not compared.
        can_be_set: its parts can be put back to what they were.
    """

    holder: Any
    owner: Any
    path: str
    of: str
    read: Callable[[], dict[Any, Any]]
    parts: dict[Any, Any]
    ignored: set[Any]
    can_be_set: bool

    def _ignores(self, label: Any) -> bool:
        is_private = PRIVATE in self.ignored and isinstance(label, str) and label.startswith("_")
        return is_private or label in self.ignored

    def changes(self) -> Iterator[Moved]:
        now = self.read()
        if now.keys() == self.parts.keys() and [*now] != [*self.parts] and not self.ignored:
            yield Moved(self, None, UNSET, UNSET)
        for label in {**self.parts, **now}:
            was, part = self.parts.get(label, UNSET), now.get(label, UNSET)
            if not self._ignores(label) and not _same(was, part):
                yield Moved(self, label, was, part)


class Moved(NamedTuple):
    """A part of an object that is not what it was.

    Attributes:
        node: the object.
        label: of the part; None if the parts are in another order.
        was: what it was; `UNSET` if there was nothing.
        now: what it is; `UNSET` if there is nothing.
    """

    node: _Node
    label: Any
    was: Any
    now: Any

    @property
    def path(self) -> str:
        """That of the part, as the user would write it."""
        return self.node.path if self.label is None else _joined(self.node.path, self.label)

    @property
    def of(self) -> str:
        """The start of the path, in words."""
        return self.node.of

    @property
    def holder(self) -> Any:
        """The object that holds the part."""
        return self.node.owner

    @property
    def can_be_set(self) -> bool:
        """True if the part can be put back to what it was."""
        return self.node.can_be_set

    @property
    def words(self) -> str:
        """The change in words, with both values where they are numbers or texts."""
        label = f"`{self.path}` of {self.of}"
        if type(self.was) in _SHOWN and type(self.now) in _SHOWN:
            return f"{label} changed from {str(self.was)[:_MAX_SHOWN]} to {str(self.now)[:_MAX_SHOWN]}"
        return f"{label} changed"

    def contents(self) -> Any:
        """The parts of the object now, as far as `put_back` needs them."""
        holder = self.node.holder
        base = next((base for base in _SEQUENCES if issubclass(type(holder), base)), None)
        return self.node.read().get(self.label, UNSET) if base is None else [*base.__iter__(holder)]

    def put_back(self, contents: Any) -> None:
        """Bring the part back to what it was when `contents` was called."""
        holder = self.node.holder
        base: Any = next((base for base in _SEQUENCES if issubclass(type(holder), base)), None)
        if base is not None:
            base.clear(holder)
            (base.update if base is set else base.extend)(holder, contents)
        elif issubclass(type(holder), dict):
            key = self.label.key if type(self.label) is _Item else self.label
            key = key.key if type(key) is _ById else key
            dict.pop(holder, key, None) if contents is UNSET else dict.__setitem__(holder, key, contents)
        elif (slot := slots_of(type(holder)).get(self.label)) is not None and contents is not UNSET:
            slot.__set__(holder, contents)


def _same(was: Any, now: Any) -> bool:
    """Compare two parts: the same object, or a value that says the same."""
    if was is now:
        return True
    kind = type(was)
    if kind is not type(now):
        return False
    if kind in VALUES:
        return bool(was == now or (was != was and now != now))
    if kind is tuple:
        return len(was) == len(now) and all(map(_same, was, now))
    return kind is MethodType and was.__self__ is now.__self__ and was.__func__ is now.__func__


class _Item(NamedTuple):
    """The label of an item; those of attributes are texts."""

    key: Any


class _Inside(NamedTuple):
    """The label of what has no name: a field of an extension type, an entry of a cache."""

    position: int


def _joined(path: str, label: Any) -> str:
    if type(label) is _Item:
        return f"{path}[{label.key!r}]" if type(label.key) in VALUES else path
    if type(label) is _Inside:
        return path
    return f"{path}.{label}" if path and label else path or label


class _ById:
    """A key that is no plain value, known by its identity, without its own `__hash__` and `__eq__`."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return id(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.key is self.key


def _items(value: dict[Any, Any]) -> dict[Any, Any]:
    items = _base_of_dict(value).items(value)
    return {_Item(k if type(k) in VALUES else _ById(k)): part for k, part in items}


def _base_of_dict(value: dict[Any, Any]) -> Any:
    """The class whose methods read it: the order of an OrderedDict is kept apart from its items."""
    return OrderedDict if issubclass(type(value), OrderedDict) else dict


def _attributes(attributes: dict[str, Any]) -> dict[Any, Any]:
    return dict(attributes)


def _of_class(cls: type) -> dict[Any, Any]:
    return {n: part for n, part in namespace_of(cls).items() if not n.startswith(("__", "_abc_"))}


def _members(value: Any, base: Any) -> dict[Any, Any]:
    return {_Item(index): part for index, part in enumerate(base.__iter__(value))}


def _slots(value: Any, slots: dict[str, Any]) -> dict[Any, Any]:
    found = {}
    for name, slot in slots.items():
        part = slot_value(slot, value)
        if part is not UNSET:
            found[name] = part
    return found


def _of_function(value: FunctionType) -> dict[Any, Any]:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    return {
        **dict(cells),
        "__code__": value.__code__,
        "__defaults__": value.__defaults__,
        "__kwdefaults__": value.__kwdefaults__,
    }


def _referents(value: Any) -> dict[Any, Any]:
    """The referents of an object beside its attributes, which can lie in it or in their dictionary."""
    attributes = attributes_of(value)
    known = {id(attributes), id(type(value))}
    if attributes is not None:
        known |= {id(part) for part in attributes.values()}
    found = (part for part in gc.get_referents(value) if id(part) not in known)
    return {"__class__": type(value), "__dict__": attributes} | {
        _Inside(index): part for index, part in enumerate(found)
    }


def _hidden(value: Any) -> Callable[[], Any] | None:
    """How to read what neither the collector nor a buffer shows."""
    kind = type(value)
    if kind in _PROXIES:
        return lambda: value.__dir__.__self__
    if issubclass(kind, weakref.ReferenceType):
        return lambda: weakref.ReferenceType.__call__(value)
    if kind is ContextVar:
        return lambda: value.get(UNSET)
    if issubclass(kind, (StringIO, BytesIO)):
        return lambda: kind.getvalue(value)
    if issubclass(kind, torch.Generator):
        return lambda: value.initial_seed()
    if issubclass(kind, logging.Logger):
        return lambda: (value.getEffectiveLevel(), value.disabled, value.manager.disable)
    if kind.__module__ == "_thread" and hasattr(kind, "locked"):
        return lambda: kind.locked(value)
    if is_iterator(value):  # of Python itself, so that nothing of the user's runs
        own = vars(kind)
        if "__repr__" in own and kind.__module__ == "itertools":
            return lambda: repr(value)  # `count(5)`
        if "__reduce__" in own and kind.__module__ == "builtins":
            return lambda: value.__reduce__()  # what a copy would go on with
    return None


def _buffer(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


def _is_globals(value: dict[Any, Any]) -> bool:
    """Whether it is the namespace of a module."""
    module = sys.modules.get(str(dict.get(value, "__name__")))
    return module is not None and vars(module) is value


class Walk:
    """What can be reached from some roots, as it is when this is made.

    Args:
        roots: where it begins.
        stops: classes whose objects are not entered.
        ignored: parts that are not compared: what their paths start at, and the paths.

    Attributes:
        is_whole: everything that was found was looked into.
    """

    def __init__(
        self,
        roots: Iterable[Root],
        stops: tuple[type, ...] = (),
        ignored: Collection[tuple[str, str]] = (),
    ) -> None:
        self._stops = (*_CLOSED, *stops)
        self._ignored = ignored
        self._seen: dict[int, Any] = {}  # keeps them alive, so that no number comes twice
        self._is_held = False
        self._nodes: list[_Node] = []
        self._large: list[_Node] = []
        self._queue: deque[Root] = deque(roots)
        while self._queue and len(self._seen) < _MAX_OBJECTS:
            root = self._queue.popleft()
            if id(root.value) not in self._seen and (root.is_entered or self._enters(root.value)):
                self._seen[id(root.value)] = root.value
                self._look_into(root)
        self.is_whole = not self._queue
        self._queue.clear()
        # Of these the parts are compared in C, all in one go.
        self._held = [node for node in self._nodes if node.holder is not None]
        self._holders = [*map(_compared, self._held)]
        dicts = (holder for holder in self._holders if issubclass(type(holder), dict))
        self._keys = [_base_of_dict(holder).keys(holder) for holder in dicts]
        self._read = [node for node in self._nodes if node.holder is None]
        self._remember(self._now())

    def changes(self, everything: bool = False) -> list[Moved]:
        """The parts that are not what they were.

        Args:
            everything: look at large objects and buffers too.
        """
        found: list[Moved] = []
        now = self._now()
        if len(now) != len(self._were):
            nodes = self._held
        else:
            places = [i for i, same in enumerate(map(operator.is_, now, self._were)) if not same]
            nodes = self._at(places)
        for node in (*nodes, *self._read, *(self._large if everything else ())):
            found += [moved for moved in node.changes() if (moved.of, moved.path) not in self._ignored]
        if nodes and not found:
            self._remember(now)  # other objects that say the same
        return found

    def _at(self, places: list[int]) -> list[_Node]:
        """The objects that hold the parts at some places of the comparison."""
        if places and places[-1] >= self._ends[-1]:
            return self._held  # a key
        return [self._held[index] for index in sorted({bisect_right(self._ends, at) for at in places})]

    def _remember(self, now: list[Any]) -> None:
        self._were = now
        counts = [len(gc.get_referents(holder)) for holder in self._holders]
        self._ends = [*accumulate(counts)] or [0]

    def _now(self) -> list[Any]:
        return [*gc.get_referents(*self._holders), *chain.from_iterable(self._keys)]

    def _enters(self, value: Any) -> bool:
        kind = type(value)
        if kind in VALUES or issubclass(kind, self._stops):
            return False
        if issubclass(kind, type):
            return is_users_class(value)
        if kind is FunctionType:
            return is_users(value.__code__, value.__globals__)
        if kind is BuiltinFunctionType:
            return not isinstance(value.__self__, (ModuleType, type, type(None)))
        if issubclass(kind, ModuleType):  # others are looked at by the names that the step mentions
            return getattr(value, "__spec__", None) is None and value.__name__ != "__main__"
        if issubclass(kind, _READ_WHOLE):
            return True
        module = str(namespace_of(kind).get("__module__", ""))
        return not module.startswith(("torch._", "lightning_cudagraph."))

    def _look_into(self, root: Root) -> None:
        value, path, of, names = root[:4]
        kind = type(value)
        # In a capture, the audit puts an object in its place that refuses to be drawn from.
        self._is_held = is_iterator(value) and not root.in_tuple
        if issubclass(kind, type):
            self._add(value, value, "", f"the class `{value.__qualname__}`", lambda: _of_class(value))
            self._queue.append(Root(kind, "", ""))
            return
        if kind in (MethodType, BuiltinFunctionType):
            self._queue.append(Root(value.__self__, path, of))
            return
        attributes = attributes_of(value)
        if issubclass(kind, nn.Module) and attributes is not None and not names:
            # Not one of the model's: what a metric keeps for itself, its states too, is its own.
            names = frozenset({PRIVATE, "training", *attributes.get("_defaults", ())})
            for table in _MODULE_TABLES:
                self._queue.append(Root(attributes.get(table), path, of))
        if attributes is not None:
            self._add(attributes, value, path, of, lambda: _attributes(attributes), names)
            self._seen[id(attributes)] = attributes
        if issubclass(kind, (nn.Module, Tensor)):
            return
        if (read := _hidden(value)) is not None:
            self._add(None, value, path, of, lambda: {"": read()})
            if kind in _PROXIES or issubclass(kind, _READ_WHOLE):
                return
        if kind is FunctionType:
            self._add(value, value, path, of, lambda: _of_function(value))
        elif issubclass(kind, dict):
            if not _is_globals(value):
                self._add(value, value, path, of, lambda: _items(value), frozenset(map(_Item, names)))
        elif (base := next((b for b in (list, tuple, deque) if issubclass(kind, b)), None)) is not None:
            self._add(value, value, path, of, lambda: _members(value, base))
        elif slots := slots_of(kind):
            self._add(value, value, path, of, lambda: {**_slots(value, slots), "__class__": type(value)})
        elif issubclass(kind, np.ndarray) and value.dtype.hasobject:
            self._add(None, value, path, of, lambda: _members(value.ravel().tolist(), list))
        elif (view := _buffer(value)) is not None:
            self._add(None, value, path, of, lambda: {"": view.tobytes()}, view=view)
        else:
            self._add(value, value, path, of, lambda: _referents(value))
        if is_users_class(kind):
            self._queue.append(Root(kind, "", ""))

    def _add(
        self,
        holder: Any,
        owner: Any,
        path: str,
        of: str,
        read: Callable[[], dict[Any, Any]],
        left_out: frozenset[Any] = frozenset(),
        view: memoryview | None = None,
    ) -> None:
        ignored: set[Any] = {*left_out}
        is_mutable = holder is not owner or issubclass(type(owner), _MUTABLE) or slots_of(type(owner))
        can_be_set = self._is_held or (holder is not None and bool(is_mutable))
        node = _Node(holder, owner, path, of, read, read(), ignored, can_be_set)
        is_large = len(node.parts) > _QUICK_MEMBERS or (view is not None and view.nbytes > _QUICK_BYTES)
        (self._large if is_large else self._nodes).append(node)
        for label, part in node.parts.items():
            if type(part) not in VALUES and not node._ignores(label) and label not in _OWN:
                in_tuple = issubclass(type(owner), tuple)
                self._queue.append(Root(part, _joined(path, label), of, in_tuple=in_tuple))


def _compared(node: _Node) -> Any:
    """The object of a node whose referents are compared."""
    if issubclass(type(node.holder), type):
        return gc.get_referents(namespace_of(node.holder))[0]  # the dictionary behind the proxy
    return node.holder
