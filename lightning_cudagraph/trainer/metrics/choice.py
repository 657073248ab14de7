"""Choice of the metrics that are in the graph, by trials of their calls on copies in warm-up.

All calls of a metric in a step are either in the graph or deferred, those through a collection or a
wrapper too, and metrics that share a state go together.

Collections and wrappers are worth it: on one slow core, an eager `update` of a `MulticlassAccuracy`
takes 0.2 ms, that of a collection of four such metrics 0.4 ms, and its `forward` 4 ms; the bookkeeping
of a call in the graph takes 2 µs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.compat.attributes import bound, setting
from lightning_cudagraph.trainer.metrics.model_metrics import found_metrics, metrics_of
from lightning_cudagraph.trainer.metrics.outside import OutsideTensors
from lightning_cudagraph.trainer.metrics.trials import MetricTrials


class MetricChoice:
    """The metrics that can be in the graph, found in warm-up steps, and reasons for the others."""

    def __init__(self, model: nn.Module, trials: MetricTrials) -> None:
        self._model = model
        self._trials = trials
        # Calls tried in warm-up, by metric and method: name, metric, and the reason against the graph.
        self.tried: dict[tuple[int, str], tuple[str, Metric, str | None]] = {}
        # In the warm-up step under way: calls of metrics by identity, updates of collections, and
        # metrics with a call that no graph can hold, with the reason.
        self._calls: Counter[int] = Counter()
        self._updates: dict[int, tuple[MetricCollection, int]] = {}
        self._unsupported: dict[int, str] = {}
        # Calls that draw random numbers, with the generators' states before and after.
        self._draws: list[tuple[int, Tensor, Tensor]] = []
        # Metrics that draw before other draws of the step: after the replay they would get others.
        self.draw_early: set[int] = set()
        self.outside = OutsideTensors(model)
        self.refused: dict[int, str] = {}
        self.in_graph: dict[int, tuple[str, Metric]] = {}
        self._inside = False

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Context of a warm-up step: try each of its calls on a copy, before the step makes it."""
        found = found_metrics(self._model)
        if not found:
            yield
            return
        self._calls.clear()
        self._updates.clear()
        self._draws.clear()
        inner = {id(part): part for _, metric in found for _, part in metrics_of(metric)}
        self.tried = {key: tried for key, tried in self.tried.items() if key[0] in inner}
        self._unsupported = {
            ident: "a method of it was replaced"
            for ident, part in inner.items()
            if not {"forward", "reset"}.isdisjoint(vars(part))
        }
        with ExitStack() as stack:
            for name, metric in found:
                for method in ("forward", "update"):
                    tried = self._trying(name, metric, method)
                    stack.enter_context(bound([(vars(metric), method, tried)]))
            yield
        self._decide()

    def _trying(self, name: str, metric: Any, method: str) -> Callable[..., Any]:
        plain = getattr(metric, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return plain(*args, **kwargs)
            if isinstance(metric, MetricCollection):
                if calls_members(metric, method):
                    if method == "update":
                        updates = self._updates.get(id(metric), (metric, 0))[1]
                        self._updates[id(metric)] = (metric, updates + 1)
                    return plain(*args, **kwargs)
                self._unsupported |= {
                    id(inner): f"`{name}` is called as a whole" for _, inner in metrics_of(metric)
                }
            else:
                self._calls[id(metric)] += 1
                with _without(metric, ("forward", "update")):
                    reason = self._trials.why_not(name, metric, method, args, kwargs)
                if reason is not None:
                    self._unsupported.setdefault(id(metric), reason)
                self.tried[id(metric), method] = (name, metric, reason)
            before = self._trials.rng_state()
            is_deferred = any(id(inner) in self._unsupported for _, inner in metrics_of(metric))
            watch = self.outside.watched(metric, args, kwargs) if is_deferred else nullcontext()
            with setting(self, _inside=True), watch:
                result = plain(*args, **kwargs)
            after = self._trials.rng_state()
            if not torch.equal(before, after):
                self._draws.append((id(metric), before, after))
            return result

        return called

    def _decide(self) -> None:
        self.outside.step_ended()
        self.draw_early = set()
        end = self._trials.rng_state()
        for ident, before, after in reversed(self._draws):
            if torch.equal(after, end):
                end = before
            else:
                self.draw_early.add(ident)
        refused = dict(self._unsupported)
        for collection, updates in self._updates.values():
            for leader, *followers in collection._groups.values():
                group = [id(collection._modules[name]) for name in (leader, *followers)]
                calls = [self._calls[ident] for ident in group]
                # Otherwise the point in the step at which the group's members share a state matters.
                if followers and calls != [updates, *(0 for _ in followers)]:
                    refused |= dict.fromkeys(group, "it shares a state, and is also called alone")
        metrics: dict[int, tuple[str, Metric]] = {}
        for (ident, _), (name, metric, reason) in self.tried.items():
            metrics[ident] = (name, metric)
            if reason is not None:
                refused.setdefault(ident, reason)
        inside = {
            ident: {id(m) for _, m in metrics_of(metric)} for ident, (_, metric) in metrics.items()
        }
        while more := {
            ident: f"`{metrics[ident][0]}` and another metric on the host share one"
            for ident, members in inside.items()
            if ident not in refused
            and any(members & {other, *inside.get(other, ())} for other in refused)
        }:
            refused |= more
        self.refused = refused
        self.in_graph = {ident: known for ident, known in metrics.items() if ident not in refused}


def calls_members(collection: MetricCollection, method: str) -> bool:
    """True if a collection only calls its metrics one by one, and joins the states of its groups."""
    own = type(collection)
    if own.forward is not MetricCollection.forward or own.update is not MetricCollection.update:
        return False
    if own._compute_and_reduce is not MetricCollection._compute_and_reduce:
        return False
    if method == "forward":
        # The metrics of a group share one state, but each call of `forward` rebinds its own.
        return all(len(group) < 2 for group in collection._groups.values())
    # The first update compares states on the host, to form groups.
    return collection._groups_checked or not collection._enable_compute_groups


@contextmanager
def _without(metric: nn.Module, methods: tuple[str, ...]) -> Iterator[None]:
    """Remove method patches from a metric and its members inside the block."""
    spaces = [vars(inner) for inner in metric.modules()]
    taken = [{name: own.pop(name) for name in methods if name in own} for own in spaces]
    try:
        yield
    finally:
        for own, functions in zip(spaces, taken, strict=True):
            own.update(functions)
