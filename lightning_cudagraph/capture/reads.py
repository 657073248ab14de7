"""Python values that a captured step has read, and whether they are still the same.

Which attributes a step reads cannot be seen without slowing everything down; which names its code
mentions can. While the step is captured, the names of all code that runs are collected. Afterwards the
attributes that have one of these names and a value that can be compared are remembered, of the model's
modules, of the plain objects, classes and modules of the user's that the step mentions, and of the
globals of the user's code. They are compared before every replay: a loss weight that a hook changes
every epoch leads to a new capture, and not to a stale one. The same goes for values that move seldom and
were read through a getter, such as the epoch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.host_objects import (
    attributes_of,
    is_plain_object,
    is_users_class,
    lineage,
    namespace_of,
    slot_value,
    slots_of,
)

__all__ = ["MentionedNames", "PythonValues"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MISSING = object()
# Of nested containers. More is not looked at before every replay.
_MAX_DEPTH = 4
_MAX_MEMBERS = 1000


@dataclass
class MentionedNames:
    """What the code of a step mentions.

    Attributes:
        names: of attributes and globals.
        user_globals: the global namespaces of the user's code among it, with the names from each.
        reads: values that move seldom and were read, by what the user knows them as, with a way to read
            them again.
    """

    names: set[str] = field(default_factory=set)
    user_globals: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    reads: dict[str, Callable[[], Any]] = field(default_factory=dict)

    @classmethod
    def union(cls, parts: Iterable[MentionedNames]) -> MentionedNames:
        """What several steps mention together."""
        whole = cls()
        for part in parts:
            whole.names |= part.names
            whole.user_globals += part.user_globals
            whole.reads |= part.reads
        return whole


def _comparable(value: Any, depth: int = 0) -> Any:
    """What to compare of a value: itself, or its contents; `_MISSING` if it cannot be."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return (id(value), value.data_ptr())
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return id(value)
    if isinstance(value, MethodType):
        return (id(value.__self__), id(value.__func__))
    if depth > _MAX_DEPTH or not isinstance(value, (list, tuple, set, frozenset, dict)):
        return _MISSING
    if len(value) > _MAX_MEMBERS:
        return _MISSING
    if isinstance(value, (set, frozenset)):
        return frozenset(value) if all(isinstance(member, _PLAIN) for member in value) else _MISSING
    if isinstance(value, dict):
        members = _comparable(list(value.values()), depth)
        return _MISSING if members is _MISSING else (tuple(value), members)
    members = [_comparable(member, depth + 1) for member in value]
    return _MISSING if any(member is _MISSING for member in members) else tuple(members)


def _changed(was: Any, now: Any) -> bool:
    # A NaN is not equal to itself.
    return type(now) is not type(was) or (now != was and not (now != now and was != was))


def _is_mutable(value: Any) -> bool:
    """Whether an object can have other contents and still be the same one."""
    if isinstance(value, tuple):
        return any(_is_mutable(member) for member in value)
    return isinstance(value, (Tensor, list, set, dict))


@dataclass(frozen=True)
class _Held:
    """A value as it was: where, under which name, what it is called, and the object itself.

    `contents` is what to compare of it if it is still the same object; nothing, if it cannot change.
    """

    namespace: Any
    name: str
    label: str
    value: Any
    contents: Any

    def changed(self) -> str | None:
        now = self.namespace.get(self.name, _MISSING)
        if now is self.value:
            if self.contents is not _MISSING and _changed(self.contents, _comparable(now)):
                return f"{self.label} changed"
            return None
        was = _comparable(self.value) if self.contents is _MISSING else self.contents
        if _changed(was, _comparable(now)):
            return f"{self.label} changed{_shown(self.value, now)}"
        return None


class _Unmoved:
    """Whether the same objects are in their places: three loops in C, because there are many of them."""

    def __init__(self, held: list[_Held]) -> None:
        plain = [h for h in held if type(h.namespace) is dict]
        self._namespaces = [h.namespace for h in plain]
        self._names = [h.name for h in plain]
        self._values = [h.value for h in plain]
        self._of_classes = [h for h in held if type(h.namespace) is not dict]

    def holds(self) -> bool:
        now = map(dict.get, self._namespaces, self._names, repeat(_MISSING))
        if not all(map(operator.is_, now, self._values)):
            return False
        return all(h.namespace.get(h.name, _MISSING) is h.value for h in self._of_classes)


class PythonValues:
    """The values under the mentioned names, as they were at a capture.

    Args:
        model: the model whose modules' attributes are watched.
        mentioned: what the captured step mentions.
        frameworks_own: attributes that torch and Lightning keep for themselves in every module.
        stays_on_host: whether a module is only called on the host, such as a metric.
    """

    def __init__(
        self,
        model: nn.Module,
        mentioned: MentionedNames,
        frameworks_own: frozenset[str],
        stays_on_host: Callable[[nn.Module], bool],
    ) -> None:
        self._held: list[_Held] = []
        self._seen: dict[Any, Any] = {}
        self._reads = [(read, label, read()) for label, read in mentioned.reads.items()]
        # `__doc__` and the like, and what every module has, nobody sets on one module.
        settable = {
            name
            for name in mentioned.names
            if not (name.startswith("__") and name.endswith("__")) and not hasattr(nn.Module, name)
        }
        for path, module in model.named_modules():
            if stays_on_host(module):
                continue
            where = f"`{path}`" if path else f"the `{type(module).__qualname__}`"
            for name, value in vars(module).items():
                if name in mentioned.names and name not in frameworks_own:
                    self._hold(vars(module), name, f"`{name}` of {where}", value)
                    self._look_into(value, name, where, settable)
            self._hold_class_attributes(type(module), vars(module), "", where, settable)
        for namespace, name in mentioned.user_globals:
            where = f"`{namespace.get('__name__', 'a module')}`"
            self._hold(namespace, name, f"`{name}` of {where}", namespace[name])
            self._look_into(namespace[name], name, where, settable)
        self._quick = _Unmoved([held for held in self._held if held.contents is _MISSING])
        self._slow = [held for held in self._held if held.contents is not _MISSING]

    def _hold(self, namespace: Any, name: str, label: str, value: Any) -> None:
        comparable = _comparable(value)
        if comparable is not _MISSING:
            contents = comparable if _is_mutable(value) else _MISSING
            self._held.append(_Held(namespace, name, label, value, contents))

    def _hold_class_attributes(
        self, cls: type, attributes: dict[str, Any], path: str, where: str, names: set[str]
    ) -> None:
        """A class attribute stands for the object's own, until somebody sets that."""
        for base in lineage(cls):
            namespace = namespace_of(base)
            for name in (namespace.keys() & names) - attributes.keys():
                if isinstance(namespace[name], _PLAIN):
                    label = f"`{path}{name}` of {where}"
                    self._held.append(_Held(attributes, name, label, _MISSING, _MISSING))
                    if (id(base), name) not in self._seen:
                        self._seen[id(base), name] = base
                        self._held.append(_Held(namespace, name, label, namespace[name], _MISSING))

    def _look_into(self, value: Any, path: str, where: str, names: set[str]) -> None:
        """One level into a plain object or a class of the user's."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, type):
            if is_users_class(value):
                self._hold_class_attributes(value, {}, f"{path}.", where, names)
            return
        if not is_plain_object(type(value)):
            return
        attributes = attributes_of(value) or {}
        for name in attributes.keys() & names:
            self._hold(attributes, name, f"`{path}.{name}` of {where}", attributes[name])
        self._hold_class_attributes(type(value), attributes, f"{path}.", where, names)
        for name, slot in slots_of(type(value)).items():
            if name in names and isinstance(now := slot_value(slot, value), _PLAIN):
                label = f"`{path}.{name}` of {where}"
                self._reads.append((partial(slot_value, slot, value), label, now))

    def changed(self) -> str | None:
        """The first value that is not as it was, in words, or None."""
        suspects = self._slow if self._quick.holds() else self._held
        for held in suspects:
            if (change := held.changed()) is not None:
                return change
        for read, label, was in self._reads:
            if _changed(was, now := read()):
                return f"{label} changed{_shown(was, now)}"
        return None


def _shown(was: Any, now: Any) -> str:
    if was is _MISSING:
        return f" to {now!s}" if isinstance(now, _PLAIN) else ""
    return f" from {was!s} to {now!s}" if isinstance(was, _PLAIN) and isinstance(now, _PLAIN) else ""
