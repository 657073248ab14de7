"""Python values that a captured step has read, and whether they are still the same.

Which attributes a step reads cannot be seen without slowing everything down; which names its code
mentions can. While the step is captured, the names of all code that runs are collected. Afterwards what
can be reached along these names (`reach.py`) is remembered. It is compared before every replay: a loss
weight that a hook changes every epoch leads to a new capture, and not to a stale one. The same goes for
values that move seldom and were read through a getter, such as the epoch.

First is asked whether the same objects are in their places, in loops that run in C. Only if not, they
are compared by what they are, and what is new but equal is remembered in the place of what was there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from lightning_cudagraph.capture.audit.host_objects import UNSET, VALUES
from lightning_cudagraph.capture.audit.mentions import MentionedNames
from lightning_cudagraph.capture.audit.reach import Container, Reach, as_bytes
from lightning_cudagraph.capture.checks.layouts import Layouts
from lightning_cudagraph.capture.checks.members import Members

__all__ = ["MentionedNames", "PythonValues"]


def _same(was: Any, now: Any) -> bool:
    """Whether one object is as good as another: it is the same one, or says the same for ever."""
    if was is now:
        return True
    kind = type(was)
    if kind is not type(now):
        return False
    if kind in VALUES:
        return bool(was == now or (was != was and now != now))
    if kind in (list, tuple):
        return len(was) == len(now) and all(map(_same, was, now))
    if kind is dict:
        return _same([*was], [*now]) and _same([*was.values()], [*now.values()])
    if kind in (set, frozenset):
        return all(type(member) in VALUES for member in (*was, *now)) and bool(was == now)
    if kind is MethodType:
        return was.__self__ is now.__self__ and was.__func__ is now.__func__
    array = as_bytes(was)
    return array is not None and array == as_bytes(now)


class PythonValues:
    """The values under the mentioned names, as they were at a capture.

    Args:
        model: the model whose modules' attributes are watched.
        mentioned: what the captured step mentions.
        unwatched: names of attributes that are not compared.
        stays_on_host: whether a module is only called on the host, such as a metric.
        around: objects of a framework, by name, that are watched if their own name is mentioned.
        host_names: attributes of a module that are not compared, because the host keeps them.

    Attributes:
        hidden: modules that the step can reach and that the model does not know as its own, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        mentioned: MentionedNames,
        unwatched: frozenset[str],
        stays_on_host: Callable[[nn.Module], bool],
        around: Mapping[str, Any],
        host_names: Callable[[nn.Module], frozenset[str]],
    ) -> None:
        self._model = model
        self._mentioned = mentioned
        self._unwatched = unwatched
        self._stays_on_host = stays_on_host
        self._around = around
        self._host_names = host_names
        self._cells = [*mentioned.cells()]
        self._take()
        self.hidden = self._reach.hidden

    def _take(self) -> None:
        users = self._mentioned.of_users_objects()
        reach = Reach(
            self._mentioned.names | users,
            users,
            self._unwatched,
            self._stays_on_host,
            self._host_names,
            bool(self._around),
            self._mentioned.all_texts(),
        )
        reach.add_model(self._model)
        for namespace, name in self._mentioned.user_globals:
            if name in namespace and name not in self._unwatched:
                reach.add_value(namespace, name, name, f"`{namespace.get('__name__', 'a module')}`")
        for namespace, name, where in self._mentioned.attributes:
            reach.add_namespace(namespace, {name}, where)
        for cell, name, function in self._cells:
            if name not in self._unwatched:
                reach.add_cell(cell, name, function)
        for name, framework_object in self._around.items():
            if name in users:
                where = f"the `{type(framework_object).__qualname__}`"
                reach.add_namespace(vars(framework_object), users, where)
        for root, name, where in self._mentioned.roots:
            if all(root is not known for known in self._around.values()):
                reach.add_root(root, name, where)
        reach.walk()
        self._reach = reach
        self._namespaces = [held.namespace for held in reach.held]
        self._names = [held.name for held in reach.held]
        self._values = [held.value for held in reach.held]
        self._members = Members([part for c in reach.containers for part in c.parts])
        self._large = [c.value for c in reach.large]
        self._lengths = [*map(len, self._large)]
        self._spaces = [space for space, _, _ in reach.spaces]
        self._sizes = [*map(len, self._spaces)]
        self._present = [space.keys() & names for space, _, names in reach.spaces]
        self._tensors = [tensor for tensor, _ in reach.tensors]
        self._layouts = Layouts(self._tensors)
        self._of_each = [Layouts([tensor]) for tensor in self._tensors]
        self._reads = [(read, label, read()) for label, read in self._mentioned.reads.items()] + [
            (r.read, r.label, r.value) for r in reach.reads
        ]

    def _unmoved(self) -> bool:
        """Whether the same objects are in their places."""
        try:
            now = map(operator.getitem, self._namespaces, self._names)
            if not all(map(operator.is_, now, self._values)):
                return False
        except KeyError:
            return False
        return (
            [*map(len, self._spaces)] == self._sizes
            and not self._members.changed()
            and [*map(len, self._large)] == self._lengths
            and not self._layouts.changed(self._tensors)
        )

    def changed(self) -> str | None:
        """The first value that is not as it was, in words, or None."""
        if not self._unmoved():
            if change := self._in_words():
                return change
            self._take_again()
        for read, label, was in self._reads:
            if not _same(was, now := read()):
                return f"{label} changed{_shown(was, now)}"
        return None

    def _in_words(self) -> str | None:
        for held in self._reach.held:
            now = held.namespace.get(held.name, UNSET)
            if not _same(held.value, now):
                return f"{held.label} changed{_shown(held.value, now)}"
        for container in self._reach.containers:
            if change := _first_member(container):
                return change
        for container, length in zip(self._reach.large, self._lengths, strict=True):
            if len(container.value) != length:
                return f"{container.label} changed its length"
        for (tensor, label), layout in zip(self._reach.tensors, self._of_each, strict=True):
            if layout.changed([tensor]):
                return f"{label} changed"
        for (space, label, names), present in zip(self._reach.spaces, self._present, strict=True):
            for name in (space.keys() & names) - present - self._unwatched:
                return f"`{label.format(name)} was set{_shown(UNSET, space[name])}"
        return None

    def _take_again(self) -> None:
        """Other objects are there that say the same. Numbers are noted here, all else is found anew."""
        for index, held in enumerate(self._reach.held):
            now = held.namespace[held.name]
            if now is not held.value and type(now) in VALUES:
                self._values[index] = held.value = now
        self._sizes = [*map(len, self._spaces)]
        if not self._unmoved():
            self._take()


def _first_member(container: Container) -> str | None:
    was, now = container.members, container.now()
    if len(was) != len(now):
        return f"{container.label} changed its length"
    for index, (one, other) in enumerate(zip(was, now, strict=True)):
        if not _same(one, other):
            return f"{container.label_of(index)} changed{_shown(one, other)}"
    return None


def _shown(was: Any, now: Any) -> str:
    if was is UNSET:
        return f" to {now!s}" if type(now) in VALUES else ""
    return f" from {was!s} to {now!s}" if type(was) in VALUES and type(now) in VALUES else ""
