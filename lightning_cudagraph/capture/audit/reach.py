"""What a step can have read: a walk from the objects of a run along the names that its code mentions.

From the attributes of modules, globals and variables of closures, into containers, and into the user's
objects under mentioned names. Like the audit (`host_state.py`), it runs no code of the user's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.audit.host_objects import (
    UNSET,
    VALUES,
    attributes_of,
    is_frameworks,
    is_plain_object,
    is_users_class,
    is_users_part,
    lineage,
    namespace_of,
    slot_value,
    slots_of,
)
from lightning_cudagraph.capture.recomputed import recomputed_names
from lightning_cudagraph.capture.sentry import is_users

__all__ = ["Container", "Reach", "as_bytes"]

# Of objects in one another. More is not looked at before every replay.
_MAX_DEPTH = 6
_MAX_MEMBERS = 1000  # of one container; of larger ones only the length
_MAX_WATCHED = 2000  # altogether, of what is found below the first level
_MAX_ARRAY_BYTES = 4096


@dataclass
class Held:
    """A value in a namespace, and what it is called."""

    namespace: Any
    name: str
    label: str
    value: Any


@dataclass
class Container:
    """A container, its members as they were, and what they are called."""

    value: Any
    path: str
    where: str
    members: list[Any]

    @property
    def parts(self) -> list[Collection[Any]]:
        """Live views of it; of a dictionary the keys too."""
        if issubclass(type(self.value), dict):
            return [dict.keys(self.value), dict.values(self.value)]
        return [self.value]

    @property
    def label(self) -> str:
        """Itself in words."""
        return f"`{self.path}` of {self.where}"

    def label_of(self, index: int) -> str:
        """A member in words."""
        key: Any = index
        if issubclass(type(self.value), dict):
            key = self.members[index - len(self.members) // 2]
        if type(key) not in VALUES or issubclass(type(self.value), set):
            return self.label
        return f"`{self.path}[{key!r}]` of {self.where}"

    def now(self) -> list[Any]:
        """The members as they are."""
        return [member for part in self.parts for member in part]


@dataclass
class Read:
    """A value that is read by a call."""

    read: Callable[[], Any]
    label: str
    value: Any


@dataclass
class Reach:
    """Everything that was found.

    Args:
        names: mentioned names of attributes of modules.
        users: names of attributes of other objects of the user's.
        unwatched: names of attributes that are left out.
        stays_on_host: whether a module is only called on the host, such as a metric.
        host_names: attributes of a module that are left out, because the host keeps them.
        into_frameworks: look into objects of a framework too, under the names that the user mentions.
        texts: in the user's code.
    """

    names: set[str]
    users: set[str]
    unwatched: frozenset[str]
    stays_on_host: Callable[[nn.Module], bool]
    host_names: Callable[[nn.Module], frozenset[str]]
    into_frameworks: bool = False
    texts: Collection[str] = ()
    held: list[Held] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    large: list[Container] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    tensors: list[tuple[Tensor, str]] = field(default_factory=list)
    spaces: list[tuple[dict[str, Any], str, set[str]]] = field(default_factory=list)
    hidden: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen: dict[Any, Any] = {}  # keeps them alive, so that no number comes twice
        self._watched = 0
        self._queue: deque[tuple[Any, str, str, int]] = deque()
        # `__doc__` and the like nobody sets; what every module has, nobody sets on one class.
        self.users = {n for n in self.users - self.unwatched if not _is_dunder(n)}
        self._of_classes = {
            n for n in self.names - self.unwatched if not _is_dunder(n) and not hasattr(nn.Module, n)
        }

    def add_model(self, model: nn.Module) -> None:
        """The modules of the model that is trained."""
        self._seen |= {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._seen |= {id(module): module for module in model.modules()}
        self._add_modules(model, "")

    def _add_modules(self, model: nn.Module, prefix: str) -> None:
        for path, module in model.named_modules(prefix=prefix):
            if self.stays_on_host(module):
                continue
            where = f"`{path}`" if path else f"the `{type(module).__qualname__}`"
            kind = type(module)
            # The code of a framework does not read what a class of the user's own calls by that name.
            foreign = self.names - self.users if _is_users_alone(kind) else set()
            known = {name for base in lineage(kind) for name in namespace_of(base)} | {"_hparams"}
            left_out = (foreign - known) | recomputed_names(module) | self.host_names(module)
            self.add_namespace(vars(module), self.names, where, left_out=left_out)
            self._add_class_attributes(kind, vars(module), "", where, self._of_classes)

    def add_namespace(
        self,
        namespace: dict[str, Any],
        names: set[str],
        where: str,
        path: str = "",
        depth: int = 1,
        left_out: Collection[str] = (),
    ) -> None:
        """The attributes of one object under certain names; also those that it does not have yet."""
        for name in namespace:
            if name in names and name not in self.unwatched and name not in left_out:
                self.add_value(namespace, name, path + name, where, depth)
        self.spaces.append((namespace, f"{path}{{}}` of {where}", names.difference(left_out)))

    def add_value(self, namespace: Any, name: str, path: str, where: str, depth: int = 1) -> None:
        """One name of a namespace."""
        value = namespace[name]
        self.held.append(Held(namespace, name, f"`{path}` of {where}", value))
        self._queue.append((value, path, where, depth))

    def add_cell(self, cell: CellType, name: str, function: str) -> None:
        """A variable of a closure."""
        where = f"the closure of `{function}`"
        value = _contents(cell)
        self.reads.append(Read(partial(_contents, cell), f"`{name}` of {where}", value))
        self._queue.append((value, name, where, 1))

    def add_root(self, value: Any, name: str, where: str) -> None:
        """What a getter of a framework has handed to the user's code."""
        self._queue.append((value, name, where, 1))

    def walk(self) -> None:
        """Follow what was added."""
        while self._queue and self._watched < _MAX_WATCHED:
            value, path, where, depth = self._queue.popleft()
            if type(value) in VALUES or depth > _MAX_DEPTH or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._look_into(value, path, where, depth + 1)

    def _look_into(self, value: Any, path: str, where: str, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, Tensor):
            if value.layout is torch.strided:
                self.tensors.append((value, f"`{path}` of {where}"))
        elif issubclass(kind, nn.Module):
            self._add_hidden(value, path)
        elif issubclass(kind, type):
            if is_users_class(value):
                self._add_class_attributes(value, {}, f"{path}.", where, self.users)
        elif (array := as_bytes(value)) is not None:
            self._watched += 1
            self.reads.append(Read(partial(as_bytes, value), f"`{path}` of {where}", array))
        else:
            found = [*self._parts_of(value, path, where), *self._attributes(value, path, where, depth)]
            self._watched += len(found)
            self._queue += [(part, at, where, depth) for part, at in found if type(part) not in VALUES]

    def _parts_of(self, value: Any, path: str, where: str) -> Iterator[tuple[Any, str]]:
        kind = type(value)
        if issubclass(kind, MethodType):
            yield value.__self__, path
        elif kind is partial:
            yield from ((value.func, path), (value.args, path), (value.keywords, path))
        elif kind is FunctionType:
            if is_users(value.__code__, value.__globals__):
                defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
                yield from ((part, path) for part in defaults)
        elif issubclass(kind, (tuple, frozenset)):
            members = (tuple if issubclass(kind, tuple) else frozenset).__iter__(value)
            yield from ((part, f"{path}[{i}]") for i, part in enumerate(members) if i < _MAX_MEMBERS)
        elif kind is dict and self._leaves_out_rate(value):
            for key in value.keys() - {"lr", "initial_lr"}:
                self.held.append(Held(value, key, f"`{path}[{key!r}]` of {where}", value[key]))
                yield value[key], f"{path}[{key!r}]"
        elif _is_container(kind):
            container = Container(value, path, where, [])
            if len(value) > _MAX_MEMBERS:
                self.large.append(container)
                return
            container.members = container.now()
            self.containers.append(container)
            if issubclass(kind, dict):
                items = dict.items(value)
                yield from ((p, f"{path}[{k!r}]" if type(k) in VALUES else path) for k, p in items)
            else:
                yield from ((part, f"{path}[{i}]") for i, part in enumerate(container.members))

    def _leaves_out_rate(self, value: dict[Any, Any]) -> bool:
        """Whether it is a param group of which the step wants the parameters, and not their rate."""
        return (
            "params" in value
            and "params" in self.texts
            and "lr" not in self.texts
            and self.users.isdisjoint(("items", "values"))
        )

    def _attributes(self, value: Any, path: str, where: str, depth: int) -> Iterator[tuple[Any, str]]:
        kind = type(value)
        if kind is FunctionType:
            if is_users(value.__code__, value.__globals__):
                self.add_namespace(value.__dict__, self.users, where, f"{path}.", depth)
            return
        known = is_plain_object(kind) or is_users_part(kind)
        if not known and not (self.into_frameworks and is_frameworks(kind)):
            return
        attributes = attributes_of(value)
        if attributes is not None:
            self.add_namespace(attributes, self.users, where, f"{path}.", depth)
        self._add_class_attributes(kind, attributes or {}, f"{path}.", where, self.users)
        for name, slot in slots_of(kind).items():
            if name in self.users:
                now = slot_value(slot, value)
                label = f"`{path}.{name}` of {where}"
                self.reads.append(Read(partial(slot_value, slot, value), label, now))
                yield now, f"{path}.{name}"

    def _add_class_attributes(
        self, cls: type, attributes: dict[str, Any], path: str, where: str, names: set[str]
    ) -> None:
        """A class attribute stands for the object's own, until somebody sets that."""
        for base in lineage(cls):
            namespace = namespace_of(base)
            users = is_users_class(base)
            for name in (namespace.keys() & names) - attributes.keys() - self.unwatched:
                value = namespace[name]
                if (users or type(value) in VALUES) and (id(base), name) not in self._seen:
                    self._seen[id(base), name] = base
                    self.add_value(namespace, name, path + name, where)

    def _add_hidden(self, module: nn.Module, path: str) -> None:
        """A module in a place where the model does not know it as its own."""
        if self.stays_on_host(module):
            return
        self.hidden[path] = module
        self._seen |= {id(t): t for t in (*module.parameters(), *module.buffers())}
        self._seen |= {id(inner): inner for inner in module.modules()}
        self._add_modules(module, path)


def as_bytes(value: Any) -> tuple[Any, ...] | None:
    """The contents of a number or a small array of NumPy's; None for everything else."""
    kind = type(value)
    if kind.__module__ != "numpy" or not hasattr(kind, "tobytes") or value.nbytes > _MAX_ARRAY_BYTES:
        return None
    return (kind, str(value.dtype), value.shape, value.tobytes())


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return UNSET


def _is_container(kind: type) -> bool:
    """Whether objects of this class can be asked for their members without code of the user's."""
    if issubclass(kind, dict):
        return kind.__len__ is dict.__len__ or kind is OrderedDict
    return any(
        issubclass(kind, base) and kind.__iter__ is base.__iter__ and kind.__len__ is base.__len__
        for base in (list, set, deque)
    )


def _is_users_alone(kind: type) -> bool:
    """Whether a class of modules has its attributes from the user alone, from no layer of torch."""
    bases = lineage(kind)
    roots = [nn.Module, *(base for base in bases if base.__name__ == "LightningModule")]
    allowed = {above for root in roots for above in lineage(root)}
    return all(is_users_class(base) or base in allowed for base in bases)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
