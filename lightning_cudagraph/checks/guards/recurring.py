"""Attributes with values that recur, such as a phase that a hook sets: each value has graphs of its own.

The first changes of an attribute make graphs stale. Once a value comes back that was there before, the
attribute is part of the signature instead: the graphs stay, for the values that they were made with.
Values that never recur, such as a counter, go on to make graphs stale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

from lightning_cudagraph.checks.walk.host_objects import UNSET, VALUES
from lightning_cudagraph.checks.walk.parts import Item, Moved, Node
from lightning_cudagraph.tensors.batch import comparable
from lightning_cudagraph.tensors.host_values import HostAttribute

# Attributes, and values of one, that are remembered.
_MAX_REMEMBERED = 64


class RecurringValues:
    """The attributes whose values recur.

    Attributes:
        attributes: those of the signatures, which several guards may share, by object and label.
    """

    def __init__(self) -> None:
        self.attributes: dict[tuple[int, Any], HostAttribute] = {}
        self._seen: dict[tuple[str, str], set[Hashable]] = {}
        self._before: list[Hashable] = []

    def has(self, moved: Moved) -> bool:
        """True for a change of an attribute that is part of the signature, from one value to another."""
        return bool(self.attributes) and _place(moved) in self.attributes and is_value(moved.now)

    def add(self, moved: Moved) -> HostAttribute | None:
        """Make an attribute part of the signature if its value was there before; else remember it."""
        if not can_recur(moved):
            return None
        was, now = form(moved.was), form(moved.now)
        if moved.part not in self._seen and len(self._seen) >= _MAX_REMEMBERED:
            return None
        seen = self._seen.setdefault(moved.part, set())
        recurs = now in seen
        if len(seen) < _MAX_REMEMBERED:
            seen |= {was, now}
        if not recurs or self.has(moved) or len(self.attributes) >= _MAX_REMEMBERED:
            return None
        of = moved.of.replace("`", "").removeprefix("the ").removeprefix("class ")
        name = moved.path if of.startswith("closure of ") else f"{of}.{moved.path}"
        made = HostAttribute(name, was, _reader(moved.node, moved.label))
        self.attributes[_place(moved)] = made
        return made

    def begin_step(self) -> None:
        """Note the values of a step."""
        self._before = [attribute.read() for attribute in self.attributes.values()]

    def changed(self) -> str:
        """A change since the step has begun, in words; empty if there is none."""
        for attribute, before in zip(self.attributes.values(), self._before, strict=True):
            if attribute.read() != before:
                return f"`{attribute.name}` changed"
        return ""

    def forget(self) -> None:
        """Forget the values of the step, when the graphs are released; what recurs is remembered."""
        self._before = []


def is_value(part: Any) -> bool:
    """True for an immutable value."""
    return type(part) in VALUES or isinstance(part, Enum)


def form(part: Any) -> tuple[type, Any]:
    """The type of a part, and a form of it that equals those of equal values only; None for others."""
    if isinstance(part, Enum):
        return type(part), part.value if part.name is None else part.name
    return type(part), comparable(part) if is_value(part) else None


def can_recur(moved: Moved) -> bool:
    """True for a change from one immutable value of a named part to another."""
    label = moved.label
    is_named = type(label) is str or (type(label) is Item and type(label.key) in VALUES)
    return is_named and is_value(moved.was) and is_value(moved.now)


def _place(moved: Moved) -> tuple[int, Any]:
    return id(moved.holder), moved.label


def _reader(node: Node, label: Any) -> Callable[[], tuple[type, Any]]:
    """A function that reads a part of a node, whose object lives as long."""
    key = label.key if type(label) is Item else label
    if type(node.holder) is dict:
        return lambda: form(node.holder.get(key, UNSET))
    return lambda: form(node.read().get(label, UNSET))
