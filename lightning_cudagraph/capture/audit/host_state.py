"""The state of Python objects around a step: what it was, what has changed, and how it is put back.

From the attributes of a model's modules, and the globals and closures of the user's code, the walk goes
into built-in containers and plain objects of the user's classes. It reads memory and runs no code of
theirs: no property, no `__getattr__`, no `__eq__`. Tensors are not looked into, because a graph writes
them; nor are objects of torch, of Lightning and of Python's own library.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_cudagraph.capture.audit.host_draws import HeldIterator, generator_state, is_iterator
from lightning_cudagraph.capture.audit.host_objects import (
    VALUES,
    attributes_of,
    is_plain_object,
    is_users_class,
    is_users_part,
    mapping_access,
    member_access,
    namespace_of,
    slot_access,
    slots_of,
)
from lightning_cudagraph.capture.sentry import is_users

__all__ = ["Change", "HostState"]

_MAX_DEPTH = 6
_MAX_OBJECTS = 20_000
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_Contents = Any  # a dict of attributes, a tuple of members, or the state of a generator


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    Attributes:
        name: its path, as the user would write it.
        of: what the path starts at, in words; empty for a generator of the whole process.
        holder: the object that was changed.
        draws: whether it is a random generator that was drawn from.
    """

    name: str
    of: str
    holder: Any
    draws: bool

    @property
    def attribute(self) -> str:
        """The last name in the path, without indices."""
        return re.sub(r"\[.*?\]", "", self.name).rpartition(".")[2]


def _same(a: Any, b: Any) -> bool:
    """Whether a value is the one that was there: the same object, or an equal number or string."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in VALUES:
        return bool(a == b)
    if kind is tuple:
        return len(a) == len(b) and all(map(_same, a, b))
    return kind is MethodType and a.__self__ is b.__self__ and a.__func__ is b.__func__


@dataclass
class _Entry:
    """One object: its contents as they were, and how they are read and written."""

    holder: Any
    path: str
    of: str
    read: Callable[[], _Contents]
    write: Callable[[_Contents], None]
    draws: bool = False
    before: _Contents = None

    def changes(self) -> Iterator[Change]:
        now = self.read()
        if isinstance(self.before, dict):
            for name in {**now, **self.before}:
                if not (name in now and name in self.before and _same(self.before[name], now[name])):
                    yield Change(_joined(self.path, name), self.of, self.holder, False)
        elif self.draws:
            if now != self.before:
                yield Change(self.path, self.of, self.holder, True)
        elif not _same(self.before, now):
            yield Change(self.path, self.of, self.holder, False)

    def exchange(self, old: Callable[[Any], bool], new: Callable[[Any, str], Any]) -> None:
        """Write `new` in the place of every member that is `old`."""
        contents = self.read()
        if isinstance(contents, dict):
            if any(map(old, contents.values())):
                self.write(
                    {n: new(v, _joined(self.path, n)) if old(v) else v for n, v in contents.items()}
                )
        elif not self.draws and any(map(old, contents)):
            self.write(tuple(new(v, self.path) if old(v) else v for v in contents))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class HostState:
    """The state of all objects that were added, as they were when they were added.

    Iterators and generators cannot be put back once they have been drawn from. While this lives, others
    stand in their places, which refuse to be drawn from.

    Args:
        harmless: paths at which anything may change.
        on_cpu: the captured device is the CPU, where torch's generators draw afresh in every replay.
    """

    def __init__(self, harmless: frozenset[str], on_cpu: bool = False) -> None:
        self._harmless = harmless
        self._on_cpu = on_cpu
        self._entries: list[_Entry] = []
        self._holders: dict[int, _Entry] = {}
        self._seen: dict[int, Any] = {}  # keeps them alive, so that no number comes twice
        self._globals: set[tuple[int, str]] = set()

    def add_module(self, module: nn.Module, of: str) -> None:
        """Watch the attributes of a module, and what can be reached from them."""
        attributes = vars(module)
        self._add_namespace(attributes, "", of)
        for table in _MODULE_TABLES:
            self._add_namespace(attributes[table], "", of, into=False)
            self._seen[id(attributes[table])] = attributes[table]
        for name, value in attributes.items():
            self._walk(value, name, of, 1)
        for cls in type(module).__mro__:
            self._walk(cls, "", of, 1)

    def add_generator(self, generator: Any, name: str) -> None:
        """Watch a random generator of the whole process."""
        self._walk(generator, name, "", 1)

    def add_trainer(self, trainer: Any, of: str) -> None:
        """Watch the numbers, switches and texts that the trainer holds, and no more."""
        values = vars(trainer)
        names = [name for name, value in values.items() if type(value) in VALUES]
        self._add_names(values, names, "", of)

    def add_global(self, namespace: dict[str, Any], name: str) -> None:
        """Watch one name of a module of the user's, and what can be reached from it."""
        if (id(namespace), name) in self._globals:
            return
        self._globals.add((id(namespace), name))
        of = f"`{namespace.get('__name__', 'a module')}`"
        self._add_names(namespace, [name], "", of)
        self._walk(namespace[name], name, of, 1)

    def add_cell(self, cell: CellType, name: str, of: str) -> None:
        """Watch a variable of a closure, and what can be reached from it."""
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell

        def write(held: dict[str, Any]) -> None:
            cell.cell_contents = held[name]

        self._add(_Entry(cell, "", of, lambda: {name: cell.cell_contents}, write))
        self._walk(cell.cell_contents, name, of, 1)

    def add_attributes(self, namespace: dict[str, Any], watched: dict[str, Any], of: str) -> None:
        """Watch some names of an object, and what can be reached from their values."""
        self._add_names(namespace, [*watched], "", of)
        for name, value in watched.items():
            self._walk(value, name, of, 1)

    def add_value(self, value: Any, path: str, of: str) -> None:
        """Watch what can be reached from a value."""
        self._walk(value, path, of, 1)

    def add_handed(self, value: Any, name: str) -> None:
        """Watch an object that the step is handed: the attributes of the user's own by their names."""
        kind = type(value)
        attributes = attributes_of(value) if is_plain_object(kind) else None
        if attributes is None:
            self._walk(value, name, "the step", 1)
            return
        of = f"the `{kind.__qualname__}`"
        self._add_namespace(attributes, "", of, value)
        self._seen[id(value)] = value
        for attribute, part in attributes.items():
            self._walk(part, attribute, of, 1)
        self._walk(kind, "", of, 1)

    def watches(self, holder: Any) -> bool:
        """Whether this very object is one of those that are compared."""
        entry = self._holders.get(id(holder))
        return entry is not None and entry.holder is holder

    def changed(self) -> Change | None:
        """The first change that is not harmless, or None."""
        return next(
            (
                change
                for entry in self._entries
                for change in entry.changes()
                if change.name not in self._harmless
            ),
            None,
        )

    def restore(self) -> None:
        """Put everything back as it was."""
        for entry in self._entries:
            if any(entry.changes()):
                entry.write(entry.before)

    def release(self) -> None:
        """Put the iterators back in their places."""
        for entry in self._entries:
            entry.exchange(lambda v: type(v) is HeldIterator, lambda v, _: v.give_back())

    def _add(self, entry: _Entry) -> None:
        entry.exchange(
            is_iterator, lambda v, path: v if path in self._harmless else HeldIterator(v, path, entry.of)
        )
        entry.before = entry.read()
        self._entries.append(entry)
        self._holders.setdefault(id(entry.holder), entry)

    def _add_namespace(
        self, namespace: dict[str, Any], path: str, of: str, holder: Any = None, into: bool = True
    ) -> None:
        def write(held: dict[str, Any]) -> None:
            if [*namespace] != [*held]:  # the order of buffers is that of checkpoints
                namespace.clear()
            namespace.update(held)

        if into:
            self._seen[id(namespace)] = namespace
        holder = namespace if holder is None else holder
        self._add(_Entry(holder, path, of, lambda: dict(namespace), write))

    def _add_names(self, namespace: dict[str, Any], names: list[str], path: str, of: str) -> None:
        def write(held: dict[str, Any]) -> None:
            for name in names:
                if name in held:
                    namespace[name] = held[name]
                else:
                    namespace.pop(name, None)

        def read() -> dict[str, Any]:
            return {name: namespace[name] for name in names if name in namespace}

        self._add(_Entry(namespace, path, of, read, write))

    def _walk(self, root: Any, root_path: str, root_of: str, root_depth: int) -> None:
        queue = deque([(root, root_path, root_of, root_depth)])
        while queue and len(self._seen) < _MAX_OBJECTS:
            value, path, of, depth = queue.popleft()
            if type(value) in VALUES or depth > _MAX_DEPTH or id(value) in self._seen:
                continue
            if issubclass(type(value), type):
                path, of = "", f"the class `{value.__qualname__}`"
            parts = self._look_into(value, path, of)
            if parts is not None:
                self._seen[id(value)] = value
                queue += [(part, at, of, depth + 1) for part, at in parts if type(part) not in VALUES]

    def _look_into(self, value: Any, path: str, of: str) -> list[tuple[Any, str]] | None:
        """Watch one object; returns what it holds, with paths, or None if it is not for us."""
        kind = type(value)
        if issubclass(kind, (torch.Tensor, nn.Module)):
            return None
        if self._on_cpu and issubclass(kind, torch.Generator):
            return None
        state = generator_state(value)
        if state is not None:
            self._add(_Entry(value, path, of, *state, draws=True))
            return []
        if kind is FunctionType:
            return self._look_into_function(value, path, of)
        if kind is MethodType:
            return [(value.__self__, path)]
        if kind is partial:
            return [(value.func, path), (value.args, path), (value.keywords, path)]
        if issubclass(kind, type):
            return self._look_into_class(value, path, of) if is_users_class(value) else None
        parts = self._look_into_container(value, path, of)
        if is_plain_object(kind) or is_users_part(kind):
            parts = [*(parts or []), *self._look_into_object(value, path, of)]
        return parts

    def _look_into_function(self, value: Any, path: str, of: str) -> list[tuple[Any, str]] | None:
        if not is_users(value.__code__, value.__globals__):
            return None
        self._add_namespace(value.__dict__, path, of)
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(part, path) for part in defaults]

    def _look_into_class(self, cls: type, path: str, of: str) -> list[tuple[Any, str]]:
        def read() -> dict[str, Any]:
            return {n: v for n, v in namespace_of(cls).items() if not n.startswith(("__", "_abc_"))}

        def write(held: dict[str, Any]) -> None:
            now = read()
            for name in now.keys() - held.keys():
                type.__delattr__(cls, name)
            for name, value in held.items():
                if now.get(name) is not value:
                    type.__setattr__(cls, name, value)

        entry = _Entry(cls, path, of, read, write)
        self._add(entry)
        return [(value, _joined(path, name)) for name, value in entry.before.items()]

    def _look_into_container(self, value: Any, path: str, of: str) -> list[tuple[Any, str]] | None:
        kind = type(value)
        if issubclass(kind, (tuple, frozenset)):
            members = tuple.__iter__(value) if issubclass(kind, tuple) else frozenset.__iter__(value)
            return [(part, f"{path}[{i}]") for i, part in enumerate(members)]
        if issubclass(kind, dict):
            self._add(_Entry(value, path, of, *mapping_access(value)))
            items = OrderedDict.items(value) if issubclass(kind, OrderedDict) else dict.items(value)
            return [(part, f"{path}[{key!r}]" if type(key) in VALUES else path) for key, part in items]
        base = next((base for base in (list, deque, set) if issubclass(kind, base)), None)
        if base is None:
            return None
        self._add(_Entry(value, path, of, *member_access(value, base)))
        return [(part, f"{path}[{i}]") for i, part in enumerate(base.__iter__(value))]

    def _look_into_object(self, value: Any, path: str, of: str) -> list[tuple[Any, str]]:
        kind = type(value)
        parts: list[tuple[Any, str]] = [(kind, "")]
        namespace = attributes_of(value)
        if namespace is not None:
            self._add_namespace(namespace, path, of, value)
            parts += [(part, _joined(path, name)) for name, part in namespace.items()]
        if slots := slots_of(kind):
            entry = _Entry(value, path, of, *slot_access(value, slots))
            self._add(entry)
            parts += [(part, _joined(path, name)) for name, part in entry.before.items()]
        return parts
