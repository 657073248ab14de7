"""Calls of torchmetrics inside a captured step, and what each leaves for the host to do.

A metric counts its calls on the host, and binds new tensors to its state. Where its arithmetic can be
in the graph, a `GraphCall` keeps the host's books after each replay, as an eager call would have. Where
not, the call is put off: a `DeferredCall` holds the static tensors that the metric was given, and makes
the call on copies of them. What such a call returns is known only after the replay. The step may log it,
and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.compat.names.torch_names import TreeSpec, tree_flatten, tree_leaves, tree_map
from lightning_cudagraph.device.sentry.sentry import forbid, user_location
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.batch import copied_leaf, map_leaves
from lightning_cudagraph.trainer.metrics.of_model import metrics_of

__all__ = [
    "BOOKS",
    "DeferredCall",
    "GraphCall",
    "GroupCall",
    "Later",
    "MetricCall",
    "Probe",
    "ReferenceCall",
    "called_later",
]

# What every metric keeps on the host about its calls.
BOOKS = ("_update_count", "_computed", "_forward_cache")
# More than any run makes, so that a count that was set and not raised is known.
_MANY_CALLS = 1 << 40
_UNTOUCHED = object()


class MetricCall:
    """The part of one call that the host does after each replay, in the order of the step."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that can be compared with an eager step, by name."""
        return {}

    def outputs(self) -> list[Tensor]:
        """The static tensors of which `make` wants copies."""
        return []

    def make(self, copies: list[Tensor]) -> list[Any]:
        """Do it, with copies of the outputs; returns the leaves of what was not known before."""
        raise NotImplementedError


@dataclass(eq=False)
class DeferredCall(MetricCall):
    """A call of a metric, to be made after each replay.

    Attributes:
        name: of the metric in the module.
        metric: the metric, or collection of metrics.
        method: ``"forward"`` or ``"update"``.
        arguments: positional and keyword arguments, static tensors among them.
    """

    name: str
    metric: Metric | MetricCollection
    method: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def make(self, copies: list[Tensor]) -> list[Any]:
        """Make the call on copies, which the metric may keep; returns the leaves of its result."""
        args, kwargs = map_leaves(self.arguments, copied_leaf)
        return tree_leaves(getattr(self.metric, self.method)(*args, **kwargs))

    def tensors(self) -> dict[str, Tensor]:
        leaves = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        return {f"argument {i} of the metric `{self.name}`": leaf for i, leaf in enumerate(leaves)}


@dataclass
class _Entry:
    """The changes that a call makes to the books of one metric.

    Attributes:
        books: the metric's attributes.
        calls: by how much it raises `_update_count`.
        clears: it makes a result that was computed before out of date.
        cache: the structure of `_forward_cache`, or `_UNTOUCHED`, or None.
        leaves: which of the outputs are in it.
    """

    books: dict[str, Any]
    calls: int
    clears: bool
    cache: TreeSpec | object | None
    leaves: list[int]


class Probe:
    """Learn what a call changes in the books of a metric and of those inside it, and undo it."""

    def __init__(self, name: str, metric: nn.Module) -> None:
        self._name = name
        self._books = [vars(inner) for _, inner in metrics_of(metric)]
        self._before: list[dict[str, Any]] = []

    def __enter__(self) -> Probe:
        self._before = [{name: books[name] for name in BOOKS} for books in self._books]
        for books in self._books:
            books.update(_update_count=_MANY_CALLS, _computed=_UNTOUCHED, _forward_cache=_UNTOUCHED)
        return self

    def __exit__(self, *error: object) -> None:
        for books, before in zip(self._books, self._before, strict=True):
            books.update(before)

    def call(self) -> GraphCall:
        """Return the call.

        Raises:
            CaptureError: if that is not what every call does.
        """
        outputs: list[Tensor] = []
        entries = [self._entry(books, outputs) for books in self._books]
        return GraphCall(self._name, entries, outputs)

    def _entry(self, books: dict[str, Any], outputs: list[Tensor]) -> _Entry:
        calls, computed, cache = (books[name] for name in BOOKS)
        if type(calls) is not int or calls < _MANY_CALLS:
            self._refuse("resets a metric")
        if computed is not None and computed is not _UNTOUCHED:
            self._refuse("keeps what was computed")
        if cache is None or cache is _UNTOUCHED:
            return _Entry(books, calls - _MANY_CALLS, computed is None, cache, [])
        leaves, structure = tree_flatten(cache)
        indices = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                self._refuse(f"returns a `{type(leaf).__qualname__}`")
            index = next((i for i, known in enumerate(outputs) if known is leaf), len(outputs))
            if index == len(outputs):
                outputs.append(leaf)
            indices.append(index)
        return _Entry(books, calls - _MANY_CALLS, computed is None, structure, indices)

    def _refuse(self, what: str) -> None:
        raise CaptureError(
            f"A call of the metric `{self._name}` {what}, which a replay would not do.",
            "Call it in `on_train_batch_end`.",
        )


class GraphCall(MetricCall):
    """A call whose arithmetic is in the graph; after a replay the host keeps the books.

    Args:
        name: of the metric in the module.
        entries: what is to be written.
        outputs: static tensors that it returned.
    """

    def __init__(self, name: str, entries: list[_Entry], outputs: list[Tensor]) -> None:
        self.name = name
        self._all = [entry.books for entry in entries]
        self._entries = [e for e in entries if e.calls or e.clears or e.cache is not _UNTOUCHED]
        self._outputs = [output.detach() for output in outputs]

    def outputs(self) -> list[Tensor]:
        return self._outputs

    def tensors(self) -> dict[str, Tensor]:
        return {f"result {i} of the metric `{self.name}`": o for i, o in enumerate(self._outputs)}

    def make(self, copies: list[Tensor]) -> list[Any]:
        for entry in self._entries:
            books = entry.books
            books["_update_count"] += entry.calls
            if entry.clears:
                books["_computed"] = None
            structure = entry.cache
            if structure is not _UNTOUCHED:
                leaves = [copies[index] for index in entry.leaves]
                # `unflatten` takes many times as long as all the rest.
                is_leaf = isinstance(structure, TreeSpec) and structure.is_leaf()
                books["_forward_cache"] = leaves[0] if is_leaf else _unflattened(structure, leaves)
        return []

    def keeps(self, books: dict[str, Any]) -> bool:
        """Tell if these are the attributes of a metric that took part in the call."""
        return any(own is books for own in self._all)


class GroupCall(MetricCall):
    """The part of a collection in a call, besides its metrics: members of a group share a state."""

    def __init__(self, collection: MetricCollection, method: str) -> None:
        self._own = vars(collection)
        members = {name: vars(metric) for name, metric in collection._modules.items()}
        updates = method == "update"
        self._cleared = [*members.values()] if updates and collection._groups_checked else []
        self._followers = [
            (collection._modules[group[0]], collection._modules[follower])
            for group in collection._groups.values()
            for follower in group[1:]
            if updates and collection._groups_checked
        ]

    def make(self, copies: list[Tensor]) -> list[Any]:
        for books in self._cleared:
            books["_computed"] = None
        for leader, follower in self._followers:
            own, its = vars(leader), vars(follower)
            for state in leader._defaults:
                if state in own and state in its:
                    its[state] = own[state]
                else:  # a wrapper, that shows the states of another metric
                    setattr(follower, state, getattr(leader, state))
            its["_update_count"] = own["_update_count"]
        self._own["_state_is_copy"] = False
        return []


class ReferenceCall(MetricCall):
    """A look at the members of a collection (`collection["accuracy"]`), which parts or joins states.

    Args:
        collection: the collection.
        copy: whether the members of a group get copies of its state.
    """

    def __init__(self, collection: MetricCollection, copy: bool) -> None:
        self._collection = collection
        self._copy = copy

    def make(self, copies: list[Tensor]) -> list[Any]:
        self._collection._compute_groups_create_state_ref(self._copy)
        return []


class Later(Tensor):
    """A placeholder of what a metric returns after the replay; it may be logged, but not looked at."""

    call: DeferredCall
    leaf: int

    @staticmethod
    def of(call: DeferredCall, leaf: int) -> Later:
        """The placeholder of one leaf of what a call returns."""
        value: Later = torch.Tensor._make_subclass(Later, torch.empty(()))
        value.call, value.leaf = call, leaf
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        later = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Later))
        if func is not Tensor.detach:
            later.refuse()
        return later

    def refuse(self) -> None:
        """Refuse a use of the value."""
        forbid(
            f"a use of what the metric `{self.call.name}` returns, which is known only after the replay",
            "Log it, or use it in `on_train_batch_end`.",
            user_location(),
        )


def called_later(call: DeferredCall) -> Any:
    """Something of the shape of what the call returned in the step before, with nothing in it."""
    metric = call.metric
    if isinstance(metric, Metric):
        last = metric._forward_cache
    else:
        members = metric.items(keep_base=True, copy_state=False)
        last = {metric._set_name(name): member._forward_cache for name, member in members}
        if any(isinstance(value, dict) for value in last.values()):
            forbid(
                f"the result of the collection `{call.name}`, one of whose metrics returns a dictionary",
                f"Call its metrics one by one, or only `{call.name}.update(...)`.",
                user_location(),
            )
    index = iter(range(len(tree_leaves(last))))
    return tree_map(lambda _: Later.of(call, next(index)), last)


def _unflattened(structure: Any, leaves: list[Tensor]) -> Any:
    return None if structure is None else structure.unflatten(leaves)
