"""Walk over Python objects: record what some roots reach, and compare it later, whatever the classes.

The garbage collector lists the referents of every object that can hold others: attributes, items, slots,
variables of closures and of suspended generators, entries of caches, fields of extension types. The
buffer protocol shows the bytes of objects that hold numbers. So a value is found wherever it is kept,
without code for the class that keeps it. Iterators, context variables, weak references, locks and files
in memory hide state from both, and are read in ways of their own (`kinds.py`).

Not entered: library functions, tensors (a graph reads their memory), and framework objects that change
in every step by themselves, such as a trainer. Of these, of imported modules, and of classes and layers
of libraries, only parts under names that the step mentions are compared.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from io import FileIO, TextIOWrapper
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_cudagraph.checks.walk.held_iterators import HeldIterators
from lightning_cudagraph.checks.walk.host_generators import generator_state
from lightning_cudagraph.checks.walk.host_objects import (
    PLAIN_OF_PYTHON,
    UNSET,
    VALUES,
    attributes_of,
    is_users_class,
    lineage,
    namespace_of,
    slot_value,
    slots_of,
)
from lightning_cudagraph.checks.walk.kinds import PROXIES, READ_WHOLE, How, node_of, node_of_hooks
from lightning_cudagraph.checks.walk.parts import BASES, Item, Moved, Node, items_of, joined
from lightning_cudagraph.checks.walk.quick import QuickComparison
from lightning_cudagraph.checks.walk.scope import Namespace, Root, Scope
from lightning_cudagraph.compat.names.torch_names import _BaseDataLoaderIter
from lightning_cudagraph.device.lines.user_lines import is_users
from lightning_cudagraph.tensors.layouts import has_strides, layout_of

# Entered by name alone: these change in every step by themselves; writes to logs and files are refused
# when made.
_STOPS = (
    Optimizer,
    LRScheduler,
    DataLoader,
    _BaseDataLoaderIter,
    DistributedDataParallel,
    logging.Handler,
    FileIO,
    TextIOWrapper,
)
# Objects that a walk enters. The rest is left to checks against eager steps.
_MAX_OBJECTS = 20_000

_CLOSED = (CodeType, TracebackType, WrapperDescriptorType)
_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, FunctionType, MethodType, CellType, partial)
# Labels of parts that are compared by identity, and entered by code of their own.
_OWN = ("__class__", "__dict__")
_EVERYTHING = Scope()


def _is_imported(module: ModuleType) -> bool:
    """True for a module of which only the names are compared that the step mentions."""
    return getattr(module, "__spec__", None) is not None or module.__name__ == "__main__"


def _is_globals(value: dict[Any, Any]) -> bool:
    module = sys.modules.get(str(dict.get(value, "__name__")))
    return module is not None and vars(module) is value


class Walk:
    """A record of the objects that some roots reach, made when the roots are added.

    Args:
        is_ignored: True for a change that is none of a record; asked at each comparison.
    """

    def __init__(
        self,
        roots: Iterable[Root] = (),
        scope: Scope = _EVERYTHING,
        is_ignored: Callable[[Moved], bool] = lambda moved: False,
    ) -> None:
        self._is_ignored = is_ignored
        self._scope = scope
        self._stops = (*(stop for stop in _STOPS if stop not in scope.enters), *scope.stops)
        self._roots = [*roots]
        self._begin()

    def _begin(self) -> None:
        # By id; holds the objects, so that no id is reused.
        self._seen: dict[int, Any] = {id(each): each for each in self._scope.closed}
        self._nodes: list[Node] = []
        self.owners: dict[int, Any] = {}
        self._held = HeldIterators(self._scope.harmless)
        self._picked: list[Node] = []
        self._tensors: list[Node] = []
        # Objects that the step can have read come first, so that any path to them marks them as read.
        self._queue: deque[Root] = deque()
        self._behind: deque[Root] = deque()  # hooks
        self._unread: deque[Root] = deque()
        self.hidden: dict[str, nn.Module] = {}
        self._paths: Counter[str] = Counter()
        self._is_cut = False
        self.add(*self._roots)

    def add(self, *roots: Root) -> None:
        for root in roots:
            self._enqueue(root)
        while (queue := self._queue or self._behind or self._unread) and len(self._seen) < _MAX_OBJECTS:
            root = queue.popleft()
            if issubclass(type(root.value), Optimizer) and self._scope.is_foreign(root.value):
                root = replace(root, by_name=True)  # what the step names of it does not move by itself
            if id(root.value) not in self._seen and (root.is_entered or self._enters(root)):
                self._seen[id(root.value)] = root.value
                self._enter(root)
        self._is_cut |= bool(self._queue or self._behind)
        for each in (self._queue, self._behind, self._unread):
            each.clear()

    def _enqueue(self, root: Root) -> None:
        read = self._queue if root.behind is None else self._behind
        (read if root.is_read else self._unread).append(root)

    @property
    def reached(self) -> list[Any]:
        return [*self._seen.values()]

    @property
    def between_pauses(self) -> list[str]:
        """Parts that the step can have read and `quick_changes` leaves out, in words."""
        return [f"`{node.path}` of {node.of}" for node in self._nodes if node.is_large and node.is_read]

    @property
    def end(self) -> str:
        """The objects at which the walk has ended before it was complete, in words; or an empty text."""
        return f"the first {_MAX_OBJECTS:,}" if self._is_cut else ""

    def watches(self, holder: Any) -> bool:
        """True if this very object is compared."""
        return self.owners.get(id(holder), self) is holder

    def recorded(self, holder_id: int, label: Any) -> list[Any]:
        """The records of a part of an object, one for each way to it; none if it is not compared."""
        nodes = (node for node in self._all_nodes() if id(node.owner) == holder_id)
        return [node.parts[label] for node in nodes if label in node.parts]

    def changes(self) -> list[Moved]:
        """The parts that differ from the record."""
        return [moved for node in self._all_nodes() for moved in self._of(node)]

    def _all_nodes(self) -> list[Node]:
        return [*self._nodes, *self._picked, *self._tensors]

    def _of(self, node: Node) -> Iterator[Moved]:
        return filter(self._counts, node.changes())

    def _counts(self, moved: Moved) -> bool:
        return (moved.of, moved.path) not in self._scope.ignored and not self._is_ignored(moved)

    def record_again(self) -> None:
        for node in self._all_nodes():
            node.parts = node.read()

    def put_back(self) -> None:
        for node in self._all_nodes():
            node.put_back(node.parts)

    def release(self) -> None:
        """Put the iterators back."""
        for node in (*self._nodes, *self._picked):
            self._held.put_back(node)

    # ---- the comparison before each replay

    def quick_changes(self, everything: bool = False) -> list[Moved]:
        """The same as `changes`, fast if nothing has changed. Needs `be_quick` first.

        Equal objects that replaced recorded ones are recorded instead of them. Large objects and buffers
        are compared if `everything` is.
        """
        quick = self.quick
        written = quick.dicts.changed()
        moved = quick.moved()
        suspects = [*(quick.in_dicts[index] for index in written), *moved]
        nodes = [*suspects, *quick.read, *(quick.large if everything else ())]
        found = [change for node in nodes for change in self._of(node)]
        if suspects and not found:
            if any(self._counts(other) for node in suspects for other in node.others()):
                # Enter the new objects, which can change by themselves.
                found = self.renew(self._scope.ignored)
            elif moved:
                quick.remember()
            else:
                quick.dicts.remember(written)
        return found

    def renew(self, ignored: Collection[tuple[str, str]]) -> list[Moved]:
        """Record what the roots reach now.

        Args:
            ignored: parts that are not compared from now on.

        Returns:
            The changes of large objects, which `quick_changes` may not have compared before.
        """
        found = [change for node in self.quick.large for change in self._of(node)]
        self._scope = replace(self._scope, ignored=ignored)
        self._begin()
        self.be_quick()
        return found

    def be_quick(self) -> None:
        """Prepare `quick_changes`: compare all parts at once in C from now on."""
        self.quick = QuickComparison(self._nodes, self._picked, self._tensors)

    # ---- entering objects

    def _enters(self, root: Root) -> bool:
        value = root.value
        kind = type(value)
        if kind in VALUES or issubclass(kind, _CLOSED):
            return False
        if kind is Namespace:
            return True
        if issubclass(kind, self._stops):
            return root.by_name
        if issubclass(kind, type) and not is_users_class(value):
            return not self._scope.in_capture
        if kind is FunctionType:
            # One of a library has state if it has attributes: `functools.singledispatch` makes such.
            has_state = bool(vars(value)) and not self._scope.in_capture
            return has_state or is_users(value.__code__, value.__globals__)
        if kind in (BuiltinFunctionType, MethodWrapperType):
            return not isinstance(value.__self__, (ModuleType, type, type(None)))
        if issubclass(kind, ModuleType) and _is_imported(value):
            return not self._scope.in_capture
        if issubclass(kind, (ModuleType, type, Tensor, nn.Module)):
            return True
        if self._scope.in_capture:
            is_known = kind in PLAIN_OF_PYTHON or issubclass(kind, _CONTAINERS)
            return is_known or is_users_class(kind) or generator_state(value) is not None
        if issubclass(kind, READ_WHOLE):
            return True
        module = str(namespace_of(kind).get("__module__", ""))
        return not module.startswith(("torch._", "lightning_cudagraph."))

    def _enter(self, root: Root) -> None:
        value = root.value
        kind = type(value)
        if kind is Namespace:
            self._pick(value.names, value.names, root, by_name=False)
        elif issubclass(kind, ModuleType) and _is_imported(value):
            self._pick(vars(value), value, replace(root, path="", of=f"`{value.__name__}`"))
        elif issubclass(kind, type):
            of_class = replace(root, path="", of=f"the class `{value.__qualname__}`")
            if is_users_class(value):
                self._add(of_class)
                self._add_bases(of_class)
                self._add_classes(root, lineage(value)[1:])
                self._enqueue(Root(kind, "", "", is_read=root.is_read))
            else:
                self._pick(namespace_of(value), value, of_class)
        elif kind in _BOUND:
            self._enqueue(replace(root, value=value.__self__, is_fixed=True))
        elif issubclass(kind, nn.Module) and not root.is_entered:
            self._enter_hidden_module(root)
        elif issubclass(kind, (nn.Module, Tensor)):
            self._add_attributes(root)
            if issubclass(kind, nn.Module):
                self._add_classes(root, lineage(kind))
            elif self._scope.in_capture and value.requires_grad and value.is_leaf:
                self._tensors.append(node_of_hooks(value, root.path, root.of))
            elif root.is_read and root.path:
                self._add_layout(root)
        else:
            self._add_attributes(root)
            if root.by_name and not issubclass(kind, _CONTAINERS):
                self._add_slots(root)
            elif not (issubclass(kind, dict) and _is_globals(value)):
                self._add(root)
            if kind not in PROXIES:
                self._add_classes(root, lineage(kind))

    def _enter_hidden_module(self, root: Root) -> None:
        del self._seen[id(root.value)]
        path = root.path or type(root.value).__qualname__
        # Of another object, such as the model of an earlier run, a path can be the same.
        self._paths[path] += 1
        same = self._paths[path]
        self.hidden[f"{path} ({same})" if same > 1 else path] = root.value
        found = self._scope.modules(root.value, root.path, root.of)
        for each in found:
            self._enqueue(replace(each, is_read=each.is_read and root.is_read))

    def _add_attributes(self, root: Root) -> None:
        attributes = attributes_of(root.value)
        if attributes is None:
            return
        self._seen[id(attributes)] = attributes
        if root.by_name:
            self._pick(attributes, root.value, root)
        else:
            self._add(root, attributes)

    def _add_classes(self, root: Root, classes: Iterable[type]) -> None:
        """Enter the classes of an object or a class: what it has not itself is read of them."""
        for base in classes:
            if is_users_class(base):
                self._enqueue(Root(base, "", "", is_read=root.is_read))
            elif root.by_name:
                self._enqueue(Root(base, "", "", reads=root.reads, is_read=root.is_read))

    def _add_bases(self, root: Root) -> None:
        """Compare the bases of a class, and theirs: they are in no dictionary."""
        read = lambda: {BASES: lineage(root.value)}  # noqa: E731
        self._nodes.append(Node(root.value, root.value, "", root.of, read, **self._reading(root)))

    def _add_slots(self, root: Root) -> None:
        value = root.value
        slots = {n: s for n, s in slots_of(type(value)).items() if n in self._names_of(root)}
        if slots:
            read = lambda: {name: slot_value(slot, value) for name, slot in slots.items()}  # noqa: E731
            self._take(Node(None, value, root.path, root.of, read, **self._reading(root)), root)

    def _add_layout(self, root: Root) -> None:
        """Compare the layout of a tensor that the step can have read."""
        value = root.value
        if self._scope.in_capture or not has_strides(value):
            return
        read = lambda: {"": layout_of(value)}  # noqa: E731
        self._tensors.append(Node(None, value, root.path, root.of, read, **self._reading(root)))

    def _names_of(self, root: Root) -> frozenset[str]:
        names = root.behind if root.reads is None else root.reads
        return self._scope.reads if names is None else names

    def _reading(self, root: Root) -> dict[str, Any]:
        # The graph reads the state of a generator, and the seed with it.
        is_read = root.is_read and not issubclass(type(root.value), torch.Generator)
        is_behind = root.behind is not None
        return {"reads": self._names_of(root), "is_read": is_read, "is_behind_hook": is_behind}

    def _pick(self, space: Any, owner: Any, root: Root, by_name: bool = True) -> None:
        """Record the parts of a dictionary of names that the step mentions."""
        names = frozenset(n for n in self._names_of(root) if n not in root.left_out)
        if not names:
            return

        def read() -> dict[Any, Any]:
            parts = {name: space.get(name, UNSET) for name in sorted(space.keys() & names)}
            return {name: part for name, part in parts.items() if part is not UNSET}

        is_class = isinstance(owner, type)
        put: Any = partial(type.__setattr__, owner) if is_class else partial(operator.setitem, space)
        remove: Any = partial(type.__delattr__, owner) if is_class else partial(operator.delitem, space)

        def write(parts: dict[Any, Any]) -> None:
            for name in names:
                if name in parts:
                    put(name, parts[name])
                elif name in space:
                    remove(name)

        reading = {**self._reading(root), "reads": names}
        node = Node(space, owner, root.path, root.of, read, write, **reading)
        if self._scope.in_capture:
            self._held.hold(node)
        self._picked.append(node)
        self._queue_parts(node, replace(root, by_name=by_name))

    def _add(self, root: Root, attributes: dict[str, Any] | None = None) -> None:
        value, path, of, names = root.value, root.path, root.of, root.left_out
        is_attributes = attributes is not None
        ignored: frozenset[Any] = names
        if not is_attributes and issubclass(type(value), dict):
            names = names | (self._scope.omitted(value) if root.by_name else frozenset())
            ignored = frozenset({Item(name) for name in names})
        if not is_attributes and (of, items_of(path)) in self._scope.ignored:
            return
        how = How(is_attributes, root.is_fixed, self._scope.in_capture)
        seen = attributes if is_attributes else value
        self._take(node_of(seen, value, path, of, how, ignored=ignored, **self._reading(root)), root)

    def _take(self, node: Node, root: Root) -> None:
        if self._scope.in_capture and node.write is not None:
            self._held.hold(node)
        self._nodes.append(node)
        self.owners.setdefault(id(node.owner), node.owner)
        self._queue_parts(node, root)

    def _queue_parts(self, node: Node, root: Root) -> None:
        if node.draws:
            return
        is_fixed = node.write is None and (root.is_fixed or not issubclass(type(node.owner), tuple))
        not_entered = {
            *_OWN,
            *(self._scope.by_identity if issubclass(type(node.owner), nn.Module) else ()),
        }
        is_of_modules = issubclass(type(node.owner), type) and issubclass(node.owner, nn.Module)
        is_of_modules &= not self._scope.in_capture
        for label, part in node.parts.items():
            if type(part) in VALUES or node.ignores(label) or label in not_entered:
                continue
            if is_of_modules and not node.was_read(label):
                continue  # a method that the step does not call
            path, of = joined(node.path, label), node.of
            if type(part) is CellType and type(node.owner) is FunctionType:
                path, of = str(label), f"the closure of `{node.owner.__name__}`"
            self._enqueue(
                Root(
                    part,
                    path,
                    of,
                    is_read=node.was_read(label),
                    by_name=root.by_name,
                    is_fixed=is_fixed,
                    behind=root.behind,
                )
            )
