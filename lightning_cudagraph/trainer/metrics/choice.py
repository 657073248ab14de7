"""The choice of the metrics that are in the graph: their calls in warm-up went well on copies.

All calls of a metric in a step take the one way or the other, also those through a collection or a
wrapper, and metrics that share a state go together.

Collections and wrappers are worth it: on one slow core, an eager `update` of a `MulticlassAccuracy`
takes 0.2 ms, that of a collection of four such metrics 0.4 ms, and its `forward` 4 ms; the books of a
call in the graph take 2 µs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.trainer.metrics.of_model import found_metrics, metrics_of, replaced
from lightning_cudagraph.trainer.metrics.trials import MetricTrials

__all__ = ["MetricChoice", "calls_members"]


class MetricChoice:
    """Find out in warm-up steps which metrics can be in the graph.

    Attributes:
        in_graph: the metrics that are, by identity, with their names.
        refused: why others are not.
    """

    def __init__(self, model: nn.Module, trials: MetricTrials) -> None:
        self._model = model
        self._trials = trials
        # Of each metric and method that warm-up has called: why it cannot be called in a graph, or None.
        self._tried: dict[tuple[int, str], tuple[str, Metric, str | None]] = {}
        # In the warm-up step under way: calls of metrics by identity, and updates of collections.
        self._calls: Counter[int] = Counter()
        self._updates: dict[int, tuple[MetricCollection, int]] = {}
        self._put_off: dict[int, str] = {}  # and metrics that it has called in a way that no graph can
        self.refused: dict[int, str] = {}
        self.in_graph: dict[int, tuple[str, Metric]] = {}
        self._inside = False

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Try the calls that a warm-up step makes, before it makes them."""
        found = found_metrics(self._model)
        if not found:
            yield
            return
        self._calls.clear()
        self._updates.clear()
        inner = {id(part): part for _, metric in found for _, part in metrics_of(metric)}
        self._tried = {key: tried for key, tried in self._tried.items() if key[0] in inner}
        self._put_off = {
            ident: "a method of it was replaced"
            for ident, part in inner.items()
            if not {"forward", "reset"}.isdisjoint(vars(part))
        }
        with ExitStack() as stack:
            for name, metric in found:
                for method in ("forward", "update"):
                    replaced(stack, metric, method, self._trying(name, metric, method))
            yield
        self._decide()

    def was_tried(self, metric: nn.Module, method: str) -> bool:
        """Tell if a warm-up step has called a method of a metric."""
        return (id(metric), method) in self._tried

    def _trying(self, name: str, metric: Any, method: str) -> Callable[..., Any]:
        plain = getattr(metric, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return plain(*args, **kwargs)
            if isinstance(metric, MetricCollection):
                if calls_members(metric, method):
                    if method == "update":
                        before = self._updates.get(id(metric), (metric, 0))[1]
                        self._updates[id(metric)] = (metric, before + 1)
                    return plain(*args, **kwargs)
                self._put_off |= {id(m): f"`{name}` is called as a whole" for _, m in metrics_of(metric)}
            else:
                self._calls[id(metric)] += 1
                with _without(metric, ("forward", "update")):
                    reason = self._trials.why_not(name, metric, method, args, kwargs)
                if reason is not None:
                    self._put_off.setdefault(id(metric), reason)
                self._tried[id(metric), method] = (name, metric, reason)
            with self._within():
                return plain(*args, **kwargs)

        return called

    def _decide(self) -> None:
        refused = dict(self._put_off)
        for collection, updates in self._updates.values():
            for leader, *followers in collection._groups.values():
                group = [id(collection._modules[name]) for name in (leader, *followers)]
                calls = [self._calls[ident] for ident in group]
                # Else it matters when in the step the members of the group come to share a state.
                if followers and calls != [updates, *(0 for _ in followers)]:
                    refused |= dict.fromkeys(group, "it shares a state, and is also called alone")
        metrics: dict[int, tuple[str, Metric]] = {}
        for (ident, _), (name, metric, reason) in self._tried.items():
            metrics[ident] = (name, metric)
            if reason is not None:
                refused.setdefault(ident, reason)
        inside = {
            ident: {id(m) for _, m in metrics_of(metric)} for ident, (_, metric) in metrics.items()
        }
        while more := {
            ident: f"`{metrics[ident][0]}` and another metric on the host share one"
            for ident, members in inside.items()
            if ident not in refused and (members & refused.keys() or _overlap(inside, ident, refused))
        }:
            refused |= more
        self.refused = refused
        self.in_graph = {ident: known for ident, known in metrics.items() if ident not in refused}

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


def calls_members(collection: MetricCollection, method: str) -> bool:
    """Tell if a collection does nothing but call its metrics one by one, and let groups share states."""
    own = type(collection)
    if own.forward is not MetricCollection.forward or own.update is not MetricCollection.update:
        return False
    if own._compute_and_reduce is not MetricCollection._compute_and_reduce:
        return False
    if method == "forward":
        # The metrics of a group would have one state between them, and each bind its own.
        return not any(_follower_names(collection))
    # The first update compares states, to form groups.
    return collection._groups_checked or not collection._enable_compute_groups


def _follower_names(collection: MetricCollection) -> list[str]:
    return [name for group in collection._groups.values() for name in group[1:]]


def _overlap(inside: dict[int, set[int]], ident: int, refused: dict[int, str]) -> bool:
    """Tell if a metric has one inside that is also inside a refused one."""
    return any(inside[ident] & inside[other] for other in refused if other in inside)


@contextmanager
def _without(metric: nn.Module, methods: tuple[str, ...]) -> Iterator[None]:
    """Take out what replaces methods of a metric, and of those inside it."""
    spaces = [vars(inner) for inner in metric.modules()]
    taken = [{name: own.pop(name) for name in methods if name in own} for own in spaces]
    try:
        yield
    finally:
        for own, functions in zip(spaces, taken, strict=True):
            own.update(functions)
