"""Reading and restoring of an object's parts, by its kind, whatever its class.

Only memory is read: no property, `__getattr__` or `__eq__` of the user's runs. Members are copied at
once, before any Python runs in which another thread can write: `[*items]` in place of a loop.
"""

from __future__ import annotations

import copyreg
import gc
import logging
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from io import BytesIO, StringIO
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_cudagraph.checks.walk.held_iterators import is_iterator
from lightning_cudagraph.checks.walk.host_generators import generator_state
from lightning_cudagraph.checks.walk.host_objects import (
    UNSET,
    VALUES,
    attributes_of,
    dict_behind,
    namespace_of,
    slot_value,
    slots_of,
)
from lightning_cudagraph.checks.walk.parts import CODE, SETS, ById, Inside, Item, Node, Parts
from lightning_cudagraph.compat.attributes import TENSOR_HOOKS, do_nothing

# Compared by the value that `_hidden` reads, and by nothing else.
READ_WHOLE = (StringIO, BytesIO, torch.Generator, logging.Logger)
# Top-level modules of classes written in C whose objects a walk sees by their referents, or that have no
# state of the user's; a lock is taken and released.
_SEEN_OTHERWISE = frozenset({"builtins", "_thread", "_queue", "_struct", "torch"})
_OF_COPIES = ("__getstate__", "__getnewargs__", "__getnewargs_ex__")
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_SEQUENCES: tuple[Any, ...] = (list, deque, tuple)
# Of exactly these, the garbage collector shows the members alone.
_CONTAINERS = (dict, OrderedDict, *_SEQUENCES, *SETS)


class How(NamedTuple):
    """The way to read an object.

    Attributes:
        is_fixed: its holder cannot be given another object instead of it.
        draws: of a host random generator, read the state instead of the seed.
    """

    is_attributes: bool = False
    is_fixed: bool = False
    draws: bool = False


HOW = How()


def node_of(value: Any, owner: Any, path: str, of: str, how: How = HOW, **kwargs: Any) -> Node:
    """Record the parts of an object, or of its attribute dictionary."""
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
            write = do_nothing  # during a capture a `HeldIterator` replaces it, and refuses draws
    elif kind is FunctionType:
        read = lambda: _of_function(value)  # noqa: E731
    elif kind is CellType:
        read, write = (lambda: _of_cell(value)), (lambda parts: _write_cell(value, parts))
    elif issubclass(kind, dict):
        read, write = (lambda: _items(value)), (lambda parts: _write_items(value, parts))
    elif (base := next((b for b in _SEQUENCES if issubclass(kind, b)), None)) is not None:
        read = lambda: _members(value, base)  # noqa: E731
        write = None if base is tuple else (lambda parts: _write_members(value, base, parts))
    elif (base := next((b for b in SETS if issubclass(kind, b)), None)) is not None:
        read = lambda: _of_set(value, base)  # noqa: E731
        write = None if base is frozenset else (lambda parts: _write_members(value, base, parts))
    elif issubclass(kind, np.ndarray) and value.dtype.hasobject:
        holder, read = None, lambda: _members(value.ravel().tolist(), list)
    elif (data := _bytes_of(value)) is not None:
        holder, read = None, lambda: {"": (_bytes_of(value), _layout_of(value))}
        kwargs["is_large"] = len(data) > _QUICK_BYTES
        # A NumPy scalar with fields changes, and its buffer cannot be written.
        if not _is_read_only(value):
            write = lambda parts: _write_bytes(value, parts[""][0])  # noqa: E731
    elif slots_of(kind) and not _has_state_in_c(kind):
        read, write = dict, do_nothing  # it has the slots alone
    else:
        read, write = (lambda: _referents(value)), None
    if issubclass(kind, _CONTAINERS) and kind not in _CONTAINERS and holder is not None:
        read, write = _with_rest(value, read, write)
    if not how.is_attributes and not issubclass(kind, type) and (slots := slots_of(kind)):
        read, write = _with_slots(value, slots, read, write)
    node = Node(holder, owner, path, of, read, write, **kwargs)
    node.is_large |= len(node.parts) > _QUICK_MEMBERS
    return node


def node_of_hooks(tensor: torch.Tensor, path: str, of: str) -> Node:
    """Record the hooks of a tensor, which are in no attribute dictionary."""

    def read() -> Parts:
        return {kind: tuple((getattr(tensor, kind) or {}).items()) for kind in TENSOR_HOOKS}

    def write(parts: Parts) -> None:
        for kind, hooks in parts.items():
            if (table := getattr(tensor, kind)) is not None:
                table.clear()
                table.update(hooks)

    return Node(None, tensor, path, of, read, write)


# Larger objects and buffers are compared after pauses, not before each replay.
_QUICK_MEMBERS = 4096
_QUICK_BYTES = 1 << 16


def _write_attributes(attributes: dict[str, Any], parts: Parts) -> None:
    if [*attributes] != [*parts]:  # the order of buffers is that of checkpoints
        attributes.clear()
    attributes.update(parts)


_METHODS = (FunctionType, classmethod, staticmethod, property)


def _of_class(cls: type) -> Parts:
    # Of special names, the methods: Python itself keeps caches under others.
    return {
        n: part
        for n, part in [*namespace_of(cls).items()]
        if not n.startswith(("__", "_abc_")) or type(part) in _METHODS
    }


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
    items = [*_base_of_dict(value).items(value)]
    return {Item(k if type(k) in VALUES else ById(k)): part for k, part in items}


def _write_items(value: dict[Any, Any], parts: Parts) -> None:
    base = _base_of_dict(value)
    base.clear(value)
    for label, part in parts.items():
        key = label.key
        base.__setitem__(value, key.key if type(key) is ById else key, part)


def _members(value: Any, base: Any) -> Parts:
    # Dead weak references are left out: libraries that keep some remove them now and then.
    members = (part for part in [*base.__iter__(value)] if not _is_dead(part))
    return {Item(index): part for index, part in enumerate(members)}


def _is_dead(part: Any) -> bool:
    return type(part) is weakref.ReferenceType and part() is None


def _of_set(value: Any, base: Any) -> Parts:
    return {Inside(k if type(k) in VALUES else ById(k)): k for k in [*base.__iter__(value)]}


def _write_members(value: Any, base: Any, parts: Parts) -> None:
    base.clear(value)
    (base.update if base is set else base.extend)(value, parts.values())


def _has_state_in_c(kind: type) -> bool:
    """True for a class with a base in C other than `object`, such as `partial` or an exception."""
    bases = (base for base in kind.__mro__ if base is not object)
    return any(isinstance(namespace_of(base).get("__new__"), BuiltinFunctionType) for base in bases)


def _with_rest(
    value: Any, read: Callable[[], Parts], write: Callable[[Parts], object] | None
) -> tuple[Callable[[], Parts], Callable[[Parts], object] | None]:
    """The members of a container, and what else it refers to: the factory of a `defaultdict`."""

    def read_both() -> Parts:
        members = read()
        keys = dict.keys(value) if isinstance(value, dict) else ()
        known = {*map(id, members.values()), *map(id, keys)}
        known |= {id(slot_value(slot, value)) for slot in slots_of(type(value)).values()}
        found = [part for label, part in _referents(value).items() if type(label) is Inside]
        rest = [part for part in found if id(part) not in known and not _is_dead(part)]
        return members | {Inside(("", index)): part for index, part in enumerate(rest)}

    def write_members(parts: Parts) -> None:
        assert write is not None
        rest = read_both().keys() - read().keys()
        write({label: part for label, part in parts.items() if label not in rest})

    return read_both, (None if write is None else write_members)


def _with_slots(
    value: Any, slots: dict[str, Any], read: Callable[[], Parts], write: Callable[[Parts], object] | None
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
        CODE: value.__code__,
        **{Inside(index): part for index, part in enumerate(defaults)},
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
        known |= {*map(id, attributes.values())}
    found = (part for part in gc.get_referents(value) if id(part) not in known)
    return {"__class__": type(value), "__dict__": attributes} | {
        Inside(index): part for index, part in enumerate(found)
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


def _layout_of(value: Any) -> tuple[Any, ...]:
    with memoryview(value) as view:
        return view.format, view.shape, view.strides


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
