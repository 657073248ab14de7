"""torchmetrics inside the captured step: in the graph where that can be, else put off.

What can be is found out in warm-up (`choice.py`). In a capture a metric is then called
as always; at its end the states are copied to where they were before (`tensors/state.py`), and what the
call did on the host is undone, to be done again after each replay (`calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.checks.audit.host_calls import HostRules
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.compat.features import COUNTED_CLASSES, METRICS
from lightning_cudagraph.compat.tables import notes, require
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.sentry import Location, forbid, user_location
from lightning_cudagraph.tensors.batch import map_leaves, refuse_hidden_tensors
from lightning_cudagraph.tensors.state import StaticState
from lightning_cudagraph.trainer.metrics.calls import (
    BOOKS,
    DeferredCall,
    GraphCall,
    GroupCall,
    MetricCall,
    Probe,
    ReferenceCall,
    called_later,
)
from lightning_cudagraph.trainer.metrics.choice import MetricChoice, calls_members
from lightning_cudagraph.trainer.metrics.fixed_counts import FixedCounts
from lightning_cudagraph.trainer.metrics.of_model import found_metrics, metrics_of, replaced
from lightning_cudagraph.trainer.metrics.reads import MetricReads, metric_reads
from lightning_cudagraph.trainer.metrics.trials import MetricTrials, keep_states, known_only

__all__ = ["StepMetrics"]

# Called by a collection, on the states of its groups, at each look at its members.
_REFERENCES = "_compute_groups_create_state_ref"
_UNKNOWN = "it was called in another way than in warm-up"


class StepMetrics:
    """The metrics of a model whose training step is captured."""

    def __init__(self, model: nn.Module, trainer: Any, backend: Backend, rules: HostRules) -> None:
        self._model = model
        self._choice = MetricChoice(model, MetricTrials(model, trainer, backend, rules))
        if found_metrics(model):
            require(METRICS)
        self._state = StaticState()
        self._live: WeakSet[GraphCall] = WeakSet()
        self._collections: WeakSet[MetricCollection] = WeakSet()
        self._undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._inside = self._in_collection = False
        self._on_host: dict[str, str] = {}
        # In the step under way: what it reads from outside, and the metrics whose calls are put off.
        self._reads = MetricReads()
        self._deferred: dict[int, str] = {}

    @property
    def notes(self) -> list[str]:
        """The metrics that are called on the host after each replay, and why."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self._on_host.items():
            by_reason.setdefault(reason, []).append(f"`{name}`")
        return [
            *(notes(COUNTED_CLASSES) if self._choice.in_graph or self._on_host else ()),
            *(
                f"called on the host after each replay: {', '.join(names)} ({reason})"
                for reason, names in by_reason.items()
            ),
        ]

    def learning(self) -> AbstractContextManager[None]:
        """Try the calls that a warm-up step makes, before it makes them."""
        return self._choice.learning()

    def prepare(self) -> None:
        """Give the states that will be in the graph a place each, before captures."""
        self._state.forget(lambda books: self._is_kept(books))
        for name, metric in self._choice.in_graph.values():
            keep_states(self._state, name, metric)

    @contextmanager
    def recording(self, note: Callable[[MetricCall], None]) -> Iterator[None]:
        """Run calls of metrics inside a captured step, or put them off.

        Args:
            note: told of what each leaves for the host, in order.

        Raises:
            CaptureError: where a metric is computed or reset, or where its state, or what it returns, is
                looked at though its calls are put off; naming the metric and the user's line.
        """
        found = found_metrics(self._model)
        known = {id(inner): inner for _, metric in found for _, inner in metrics_of(metric)}
        self._undo = [(vars(m), _host_part(m)) for m in (*known.values(), *_collections(found))]
        self._reads, self._deferred = MetricReads(), {}
        with ExitStack() as stack:
            stack.callback(self.undo)
            stack.enter_context(known_only({*known}))
            for name, metric in found:
                for method in ("forward", "update"):
                    replaced(stack, metric, method, self._recorded(name, metric, method, note))
                for method in ("compute", "reset"):
                    replaced(stack, metric, method, self._refusing(name, metric, method))
                if isinstance(metric, MetricCollection):
                    replaced(stack, metric, _REFERENCES, self._referring(metric, note))
            if found:
                stack.enter_context(metric_reads(self._read))
            yield

    def tell_reads(self, mentioned: MentionedNames) -> None:
        """Have the reads of a capture of metrics that only the host calls compared."""
        self._reads.tell(mentioned, lambda metric, name: self._is_kept(vars(metric)))

    def write_back(self) -> None:
        """Bring the states to their places, at the end of the step or of a part of it."""
        self._state.write_back()

    def undo(self) -> None:
        """Undo the host's part of calls at the end of the step, as it is done after each replay."""
        for own, before in self._undo:
            own.update(before)
        self._undo = []  # it holds states, and who holds a state gets it for himself

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Have metrics as they were before the step, in the middle of it."""
        now = [(own, {name: own[name] for name in before}) for own, before in self._undo]
        for own, before in self._undo:
            own.update(before)
        try:
            yield
        finally:
            for own, held in now:
                own.update(held)

    def adopt(self) -> None:
        """Bring what the host has made of the states to their places, before a replay."""
        self._state.adopt()

    def count_references(self) -> None:
        """Count references to states after a replay, when nothing else can hold one yet."""
        self._state.count_references()

    def fits(self) -> bool:
        """Tell if all that the host has made of the states can be brought to their places."""
        return self._state.fits()

    def described(self) -> dict[str, str]:
        """The kind of tensor that each state is now."""
        return self._state.described()

    def tensors(self) -> dict[str, Tensor]:
        """The states that a captured step writes, by name."""
        return self._state.tensors()

    def stays_on_host(self, module: Any) -> bool:
        """Tell if a module is a metric or a collection that no graph calls."""
        if isinstance(module, MetricCollection):
            return module not in self._collections
        return isinstance(module, Metric) and not self._is_kept(vars(module))

    def host_names(self, module: nn.Module) -> frozenset[str]:
        """Attributes of a module that the host keeps itself, and no graph has baked in."""
        if isinstance(module, Metric):
            return frozenset((*BOOKS, *module._defaults))
        return frozenset(("_state_is_copy",) if isinstance(module, MetricCollection) else ())

    def _is_kept(self, books: dict[str, Any]) -> bool:
        inside = (m for _, metric in self._choice.in_graph.values() for _, m in metrics_of(metric))
        return any(vars(m) is books for m in inside) or any(c.keeps(books) for c in self._live)

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _recorded(
        self, name: str, metric: Any, method: str, note: Callable[[MetricCall], None]
    ) -> Callable[..., Any]:
        plain = getattr(metric, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return plain(*args, **kwargs)
            if isinstance(metric, MetricCollection) and calls_members(metric, method):
                self._collections.add(metric)
                self._in_collection = True
                try:
                    result = plain(*args, **kwargs)
                finally:
                    self._in_collection = False
                note(GroupCall(metric, method))
                return result
            if id(metric) in self._choice.in_graph:
                if not self._choice.was_tried(metric, method):
                    forbid(
                        f"a call of `{name}.{method}`, which the steps before have not called",
                        "Call the metric in the same way in every step.",
                        user_location(),
                    )
                with self._within(), FixedCounts(), Probe(name, metric) as probe:
                    result = plain(*args, **kwargs)
                    call = probe.call()
                self._live.add(call)
                note(call)
                return result
            return self._defer(name, metric, method, (args, kwargs), note)

        return called

    def _defer(
        self, name: str, metric: Any, method: str, arguments: Any, note: Callable[[MetricCall], None]
    ) -> Any:
        inside = [inner for _, inner in metrics_of(metric)]
        members = {id(inner) for inner in inside}
        if members & self._choice.in_graph.keys():
            forbid(f"a call of `{name}`, because {_UNKNOWN}", "Call it in every step.", user_location())
        refuse_hidden_tensors(arguments, f"what the metric `{name}` is given")
        for inner in inside:
            if (read := self._reads.first_of(inner, _kept_by_host(inner))) is not None:
                _refuse_read(name, *read)
        self._deferred |= dict.fromkeys(members, name)
        refused = self._choice.refused
        self._on_host[name] = next((refused[m] for m in members if m in refused), _UNKNOWN)
        call = DeferredCall(name, metric, method, map_leaves(arguments, _detached))
        note(call)
        return called_later(call) if method == "forward" else None

    def _read(self, metric: Metric, name: str, where: Location | None) -> None:
        """The user's code has asked for an attribute of a metric, from outside of it."""
        if self._inside:
            return
        if id(metric) in self._deferred and name in _kept_by_host(metric):
            _refuse_read(self._deferred[id(metric)], name, where)
        if name in BOOKS and self._is_kept(vars(metric)):
            forbid(
                f"a read of `{name}` of a `{type(metric).__qualname__}`, which the host brings up to"
                " date after the replay",
                "Count in a buffer of the module.",
                where,
            )
        self._reads.note(metric, name, where)

    def _referring(
        self, collection: MetricCollection, note: Callable[[MetricCall], None]
    ) -> Callable[[bool], None]:
        def refer(copy: bool = False) -> None:
            if not self._in_collection:  # that is part of its `GroupCall`
                note(ReferenceCall(collection, copy))

        return refer

    def _refusing(self, name: str, metric: Any, method: str) -> Callable[..., Any]:
        plain = getattr(metric, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                forbid(
                    f"`{name}.{method}()`, because the state of a metric is brought up to date after the"
                    " replay",
                    "Return what it needs from `training_step`, and call it in `on_train_batch_end`.",
                    user_location(),
                )
            return plain(*args, **kwargs)

        return called


def _collections(found: list[tuple[str, Any]]) -> list[MetricCollection]:
    return [metric for _, metric in found if isinstance(metric, MetricCollection)]


def _kept_by_host(metric: Metric) -> frozenset[str]:
    """The attributes that a call that is put off changes after the replay."""
    return frozenset((*BOOKS, *metric._defaults))


def _refuse_read(metric: str, name: str, where: Location | None) -> None:
    forbid(
        f"a read of `{name}` of the metric `{metric}`, whose calls are put off until after the replay",
        "Read it in `on_train_batch_end`, or keep what the step needs in a buffer of the module.",
        where,
    )


def _host_part(module: nn.Module) -> dict[str, Any]:
    """The attributes that a call may change of a metric, or of a collection."""
    names = (*BOOKS, *module._defaults) if isinstance(module, Metric) else ("_state_is_copy",)
    return {name: vars(module)[name] for name in names if name in vars(module)}


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
