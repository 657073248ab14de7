"""Metrics of torchmetrics in a captured step: in the graph if possible, deferred otherwise.

Warm-up finds the metrics that can be in the graph (`choice.py`). In a capture these are called as usual.
At its end, the states are copied into their static tensors (`tensors/state.py`), and the call's effects
on the host are undone, to be repeated after each replay (`calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.compat.attributes import bound, setting
from lightning_cudagraph.compat.features import COUNTED_CLASSES, METRICS
from lightning_cudagraph.compat.tables import notes, require
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.errors import Location
from lightning_cudagraph.tensors.batch import refuse_hidden_tensors
from lightning_cudagraph.tensors.state import StaticState
from lightning_cudagraph.tensors.writes import storage_id
from lightning_cudagraph.trainer.metrics.calls import (
    CALL_STATE,
    KEEP_SUMS,
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
from lightning_cudagraph.trainer.metrics.model_metrics import found_metrics, metrics_of
from lightning_cudagraph.trainer.metrics.reads import MetricReads, metric_reads
from lightning_cudagraph.trainer.metrics.trials import MetricTrials, keep_states, known_only

# The method by which a collection joins or splits the states of its groups at an access to members.
_REFERENCES = "_compute_groups_create_state_ref"
_UNKNOWN = "it was called in another way than in warm-up"


class StepMetrics:
    """The metrics of a model whose training step is captured."""

    def __init__(self, model: nn.Module, trainer: Any, backend: Backend, rules: HostRules) -> None:
        self._model = model
        self._choice = MetricChoice(model, MetricTrials(model, trainer, backend, rules))
        if found_metrics(model):
            require(METRICS)
        self.state = StaticState()
        self._live: WeakSet[GraphCall] = WeakSet()
        self._collections: WeakSet[MetricCollection] = WeakSet()
        self._undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._inside = self._in_collection = False
        self._on_host: dict[str, str] = {}
        # Of the step under way: reads by user code, and names of metrics with deferred calls.
        self._reads = MetricReads()
        self._deferred: dict[int, str] = {}

    @property
    def notes(self) -> list[str]:
        """Sentences that name the metrics with deferred calls, and the reasons."""
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
        """Context of a warm-up step, which tries its calls on copies."""
        return self._choice.learning()

    def prepare(self) -> None:
        """Give each state that will be in the graph a static tensor, before captures."""
        self.state.forget(lambda attributes: self._is_kept(attributes))
        for name, metric in self._choice.in_graph.values():
            keep_states(self.state, name, metric)

    @contextmanager
    def recording(self, note: Callable[[MetricCall], None]) -> Iterator[None]:
        """Context of a captured step, in which calls of metrics are captured or deferred.

        Raises:
            CaptureError: if a metric is computed or reset, or if the state or the result of a deferred
                metric is read. The message names the metric and the user's line.
        """
        found = found_metrics(self._model)
        known = {id(inner): inner for _, metric in found for _, inner in metrics_of(metric)}
        self._undo = [(vars(m), _host_part(m)) for m in (*known.values(), *_collections(found))]
        self._reads, self._deferred = MetricReads(), {}
        deferred: list[DeferredCall] = []

        def noted(call: MetricCall) -> None:
            if isinstance(call, DeferredCall):
                deferred.append(call)
            note(call)

        with ExitStack() as stack:
            stack.callback(self.undo)
            stack.enter_context(known_only({*known}))
            for name, metric in found:
                patches = {
                    **{m: self._recorded(name, metric, m, noted) for m in ("forward", "update")},
                    **{m: self._refusing(name, metric, m) for m in ("compute", "reset")},
                }
                if isinstance(metric, MetricCollection):
                    patches[_REFERENCES] = self._referring(metric, note)
                stack.enter_context(bound((vars(metric), *patch) for patch in patches.items()))
            if found:
                stack.enter_context(metric_reads(self._read))
            yield
            for call in deferred:
                call.step_ended()

    def tell_reads(self, mentioned: MentionedNames) -> None:
        """Guard the attributes, read in the capture, of metrics that are not in the graph."""
        self._reads.tell(mentioned, lambda metric, name: self._is_kept(vars(metric)))

    def undo(self) -> None:
        """Undo the host part of calls at the end of the capture: it is repeated after each replay."""
        for own, before in self._undo:
            own.update(before)
        self._undo = []  # it refers to states, and a state with an external reference is copied out

    def as_before(self) -> AbstractContextManager[None]:
        """Context in the middle of the step, in which metrics are as before the step."""
        return bound((own, *item) for own, before in self._undo for item in before.items())

    def stays_on_host(self, module: Any) -> bool:
        """True if a module is a metric or a collection without calls in a graph."""
        if isinstance(module, MetricCollection):
            return module not in self._collections
        return isinstance(module, Metric) and not self._is_kept(vars(module))

    def host_names(self, module: nn.Module) -> frozenset[str]:
        """Attributes of a module that the host part of calls updates, so that no graph bakes them in."""
        if isinstance(module, Metric):
            return frozenset((*CALL_STATE, *module._defaults))
        return frozenset(("_state_is_copy",) if isinstance(module, MetricCollection) else ())

    def _is_kept(self, attributes: dict[str, Any]) -> bool:
        inside = (m for _, metric in self._choice.in_graph.values() for _, m in metrics_of(metric))
        return any(vars(m) is attributes for m in inside) or any(c.keeps(attributes) for c in self._live)

    def _recorded(
        self, name: str, metric: Any, method: str, note: Callable[[MetricCall], None]
    ) -> Callable[..., Any]:
        plain = getattr(metric, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return plain(*args, **kwargs)
            if isinstance(metric, MetricCollection) and calls_members(metric, method):
                self._collections.add(metric)
                with setting(self, _in_collection=True):
                    result = plain(*args, **kwargs)
                note(GroupCall(metric, method))
                return result
            if id(metric) in self._choice.in_graph:
                if (id(metric), method) not in self._choice.tried:
                    forbid(
                        f"a call of `{name}.{method}`, which the steps before have not called",
                        "Call the metric in the same way in every step.",
                        user_location(),
                    )
                with setting(self, _inside=True), FixedCounts(), Probe(name, metric) as probe:
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
        if members & self._choice.draw_early:
            forbid(
                f"a draw of random numbers by the metric `{name}`, which is called after the replay,"
                " before other draws of the step",
                "Call it in `on_train_batch_end`, or at the end of the step.",
                user_location(),
            )
        reasons = self._choice.outside.reasons
        if (reason := next((reasons[m] for m in members if m in reasons), None)) is not None:
            forbid(
                f"a call of the metric `{name}`, which is called after the replay and {reason}",
                "Call it in `on_train_batch_end`, or give it what it needs as an argument.",
                user_location(),
            )
        keeps = any(isinstance(default, list) for m in inside for default in m._defaults.values())
        call = DeferredCall.of(name, metric, method, arguments)
        if keeps and self._outlive(call.given):
            forbid(
                f"a call of the metric `{name}` with a parameter or a buffer: it keeps a reference, and"
                " later steps change that",
                "Give it a copy: `.clone()`.",
                user_location(),
            )
        note(call)
        return called_later(call) if method == "forward" else None

    def _outlive(self, tensors: list[Tensor]) -> bool:
        """True if tensors are in the memory of parameters or buffers of the model."""
        own = {storage_id(each) for each in (*self._model.parameters(), *self._model.buffers())}
        return any(storage_id(tensor) in own for tensor in tensors)

    def _read(self, metric: Metric, name: str, where: Location | None) -> None:
        """Handle a read of a metric's attribute by user code outside of the metric."""
        if self._inside:
            return
        if id(metric) in self._deferred and name in _kept_by_host(metric):
            _refuse_read(self._deferred[id(metric)], name, where)
        if name in CALL_STATE and self._is_kept(vars(metric)):
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
            if not self._in_collection:  # there it is part of a `GroupCall`
                note(ReferenceCall(collection, copy))

        return refer

    def _refusing(self, name: str, metric: Any, method: str) -> Callable[..., Any]:
        plain = getattr(metric, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                forbid(
                    f"`{name}.{method}()`, because the state of a metric is brought up to date after the"
                    " replay",
                    "Log or read it in `on_train_batch_end`." + KEEP_SUMS,
                    user_location(),
                )
            return plain(*args, **kwargs)

        return called


def _collections(found: list[tuple[str, Any]]) -> list[MetricCollection]:
    return [metric for _, metric in found if isinstance(metric, MetricCollection)]


def _kept_by_host(metric: Metric) -> frozenset[str]:
    """The attributes that a deferred call changes after the replay."""
    return frozenset((*CALL_STATE, *metric._defaults))


def _refuse_read(metric: str, name: str, where: Location | None) -> None:
    forbid(
        f"a read of `{name}` of the metric `{metric}`, whose calls are put off until after the replay",
        "Read it in `on_train_batch_end`, or keep what the step needs in a buffer of the module.",
        where,
    )


def _host_part(module: nn.Module) -> dict[str, Any]:
    """The attributes of a metric or collection that a call may change, with their values."""
    names = (*CALL_STATE, *module._defaults) if isinstance(module, Metric) else ("_state_is_copy",)
    return {name: vars(module)[name] for name in names if name in vars(module)}
