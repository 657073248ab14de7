"""Metric calls of a captured step, and their host parts, which are repeated after each replay.

A metric counts its calls on the host, and rebinds its states. If its arithmetic can be in the graph, a
`GraphCall` updates its host bookkeeping after each replay, as an eager call would. If not, the call is
deferred: the graph copies its arguments at the call, because the step may write into them later, and a
`DeferredCall` makes the call on copies of these after the replay. The step may log the result of a
deferred call, and use it for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.compat.names.torch_names import TreeSpec, tree_flatten, tree_leaves, tree_map
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.errors import CaptureError, see
from lightning_cudagraph.tensors.batch import copied_leaf, map_leaves
from lightning_cudagraph.tensors.host_values import value_of
from lightning_cudagraph.trainer.metrics.model_metrics import metrics_of

# The host bookkeeping of a metric about its calls.
CALL_STATE = ("_update_count", "_computed", "_forward_cache")
# More calls than any run makes: a count below it was set, and not incremented.
_MANY_CALLS = 1 << 40
_UNTOUCHED = object()


class MetricCall:
    """Host part of one call, executed after each replay in the order of the step."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for the comparison with an eager step, by name."""
        return {}

    def outputs(self) -> list[Tensor]:
        """The static tensors of which `make` needs copies."""
        return []

    def make(self, copies: list[Tensor]) -> list[Any]:
        """Execute it with copies of the outputs; return the leaves of a deferred result."""
        raise NotImplementedError


KEEP_SUMS = (
    " If the step computes with it, keep sums in registered buffers in its place (`self.hits +="
    " (out.argmax(1) == y).sum()`, `self.seen += len(y)`)." + see("metrics")
)


@dataclass(eq=False)
class DeferredCall(MetricCall):
    """A call of a metric, ``"forward"`` or ``"update"``, that is made after each replay.

    Attributes:
        arguments: static tensors, as the graph has copied them at the call.
        modes: enter the modes of autograd and autocast at the call.
        given: the tensors among the arguments of the step itself.
    """

    name: str
    metric: Metric | MetricCollection
    method: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    modes: list[Callable[[], AbstractContextManager[Any]]]
    given: list[Tensor]

    def __post_init__(self) -> None:
        self._versions = [*map(_version, self.given)]
        self._rewritten: list[int] = []

    @classmethod
    def of(cls, name: str, metric: Any, method: str, arguments: Any) -> DeferredCall:
        """The call that a captured step is about to make."""
        modes: list[Callable[[], AbstractContextManager[Any]]] = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind))
            for kind in ("cuda", "cpu")
            if torch.is_autocast_enabled(kind)
        ]
        modes.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        given = [leaf.detach() for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        return cls(name, metric, method, map_leaves(arguments, _copied), modes, given)

    def step_ended(self) -> None:
        """Find the arguments that the step has written into since the call."""
        pairs = enumerate(zip(self._versions, map(_version, self.given), strict=True))
        self._rewritten = [index for index, (before, after) in pairs if after is None or before != after]

    def make(self, copies: list[Tensor]) -> list[Any]:
        """Make the call on copies, which the metric may keep; return the leaves of its result."""
        args, kwargs = map_leaves(self.arguments, copied_leaf)
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode())
            results = tree_leaves(getattr(self.metric, self.method)(*args, **kwargs))
        if self._rewritten:  # the metric may have kept a reference, and sees what the step wrote
            kept = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            for index in self._rewritten:
                kept[index].copy_(self.given[index])
        return results

    def tensors(self) -> dict[str, Tensor]:
        leaves = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        return {f"argument {i} of the metric `{self.name}`": leaf for i, leaf in enumerate(leaves)}


def _version(tensor: Tensor) -> int | None:
    """The number of writes into a tensor; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


@dataclass
class _Entry:
    """Changes that a call makes to the bookkeeping of one metric.

    Attributes:
        cache: the structure of the new `_forward_cache`, or `_UNTOUCHED`, or None.
        leaves: indices of the outputs that are its leaves.
    """

    attributes: dict[str, Any]
    calls: int
    clears: bool
    cache: TreeSpec | object | None
    leaves: list[int]


class Probe:
    """Context that finds and undoes a call's changes to the bookkeeping of a metric and its members."""

    def __init__(self, name: str, metric: nn.Module) -> None:
        self._name = name
        self._attributes = [vars(inner) for _, inner in metrics_of(metric)]
        self._before: list[dict[str, Any]] = []

    def __enter__(self) -> Probe:
        self._before = [
            {name: attributes[name] for name in CALL_STATE} for attributes in self._attributes
        ]
        for attributes in self._attributes:
            attributes.update(_update_count=_MANY_CALLS, _computed=_UNTOUCHED, _forward_cache=_UNTOUCHED)
        return self

    def __exit__(self, *error: object) -> None:
        for attributes, before in zip(self._attributes, self._before, strict=True):
            attributes.update(before)

    def call(self) -> GraphCall:
        """The host part of the call; one that a replay could not repeat is refused."""
        outputs: list[Tensor] = []
        entries = [self._entry(attributes, outputs) for attributes in self._attributes]
        return GraphCall(self._name, entries, outputs)

    def _entry(self, attributes: dict[str, Any], outputs: list[Tensor]) -> _Entry:
        calls, computed, cache = (attributes[name] for name in CALL_STATE)
        if type(calls) is not int or calls < _MANY_CALLS:
            self._refuse("resets a metric")
        if computed is not None and computed is not _UNTOUCHED:
            self._refuse("keeps what was computed")
        if cache is None or cache is _UNTOUCHED:
            return _Entry(attributes, calls - _MANY_CALLS, computed is None, cache, [])
        leaves, structure = tree_flatten(cache)
        indices = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                self._refuse(f"returns a `{type(leaf).__qualname__}`")
            index = next((i for i, known in enumerate(outputs) if known is leaf), len(outputs))
            if index == len(outputs):
                outputs.append(leaf)
            indices.append(index)
        return _Entry(attributes, calls - _MANY_CALLS, computed is None, structure, indices)

    def _refuse(self, what: str) -> None:
        raise CaptureError(
            f"A call of the metric `{self._name}` {what}, which a replay would not do.",
            "Call it in `on_train_batch_end`.",
        )


class GraphCall(MetricCall):
    """A call with its arithmetic in the graph; after a replay the host updates the bookkeeping."""

    def __init__(self, name: str, entries: list[_Entry], outputs: list[Tensor]) -> None:
        self.name = name
        self._all = [entry.attributes for entry in entries]
        self._entries = [e for e in entries if e.calls or e.clears or e.cache is not _UNTOUCHED]
        self._outputs = [output.detach() for output in outputs]

    def outputs(self) -> list[Tensor]:
        return self._outputs

    def tensors(self) -> dict[str, Tensor]:
        return {f"result {i} of the metric `{self.name}`": o for i, o in enumerate(self._outputs)}

    def make(self, copies: list[Tensor]) -> list[Any]:
        for entry in self._entries:
            attributes = entry.attributes
            attributes["_update_count"] += entry.calls
            if entry.clears:
                attributes["_computed"] = None
            structure = entry.cache
            if structure is not _UNTOUCHED:
                leaves = [copies[index] for index in entry.leaves]
                # A shortcut: `unflatten` takes many times as long as all the rest.
                is_leaf = isinstance(structure, TreeSpec) and structure.is_leaf()
                attributes["_forward_cache"] = leaves[0] if is_leaf else _unflattened(structure, leaves)
        return []

    def keeps(self, attributes: dict[str, Any]) -> bool:
        """True if these are the attributes of a metric that took part in the call."""
        return any(own is attributes for own in self._all)


class GroupCall(MetricCall):
    """Host part of a collection's call: its compute groups share states, besides its metrics' calls."""

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
        for attributes in self._cleared:
            attributes["_computed"] = None
        for leader, follower in self._followers:
            own, its = vars(leader), vars(follower)
            for state in leader._defaults:
                if state in own and state in its:
                    its[state] = own[state]
                else:  # a wrapper that delegates its states to another metric
                    setattr(follower, state, getattr(leader, state))
            its["_update_count"] = own["_update_count"]
        self._own["_state_is_copy"] = False
        return []


class ReferenceCall(MetricCall):
    """An access to members of a collection (`collection["accuracy"]`), which joins or splits states."""

    def __init__(self, collection: MetricCollection, copy: bool) -> None:
        self._collection = collection
        self._copy = copy

    def make(self, copies: list[Tensor]) -> list[Any]:
        self._collection._compute_groups_create_state_ref(self._copy)
        return []


class Later(Tensor):
    """Placeholder for the result of a deferred call; it may be logged, but not read."""

    # Slots, because the attributes of outputs are searched for tensors, which a metric has.
    __slots__ = ("call", "leaf")

    call: DeferredCall
    leaf: int

    @staticmethod
    def of(call: DeferredCall, leaf: int) -> Later:
        """The placeholder for one leaf of a call's result."""
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
        forbid(
            f"a use of what the metric `{self.call.name}` returns, which is known only after the replay",
            "Log it, or use it in `on_train_batch_end`." + KEEP_SUMS,
            user_location(),
        )


def called_later(call: DeferredCall) -> Any:
    """Placeholders in the structure of the call's result in the step before."""
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


def _copied(leaf: Any) -> Any:
    return copied_leaf(leaf.detach()) if isinstance(leaf, Tensor) else value_of(leaf)


def _unflattened(structure: Any, leaves: list[Tensor]) -> Any:
    return None if structure is None else structure.unflatten(leaves)
