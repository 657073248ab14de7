"""Metrics of a model, their members, and their states."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

# The depth of nested containers in which metrics are searched.
_MAX_DEPTH = 3


def is_metric(module: Any) -> bool:
    """True if a module is a metric, or a collection of metrics."""
    return isinstance(module, (Metric, MetricCollection))


def metrics_of(metric: nn.Module) -> list[tuple[str, Metric]]:
    """A metric and the metrics inside it, with their paths."""
    return [(path, module) for path, module in metric.named_modules() if isinstance(module, Metric)]


def states_of(metric: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """All states of a metric and its members: path, the attributes that hold the state, and its name.

    A state that a wrapper delegates to the metric inside it is listed once, for the latter.
    """
    parts = metrics_of(metric)
    held = {id(inner._defaults) for _, inner in parts if inner._defaults.keys() <= vars(inner).keys()}
    return [
        (path, vars(inner), name)
        for path, inner in parts
        for name in inner._defaults
        if name in vars(inner) or id(inner._defaults) not in held
    ]


def found_metrics(model: nn.Module) -> list[tuple[str, Any]]:
    """All metrics and collections of a model by name, those in plain Python containers too."""
    found: dict[int, tuple[str, Any]] = {}

    def look(value: Any, path: str, depth: int) -> None:
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                if is_metric(module):
                    name = path + (f".{inner}" if inner else "")
                    found.setdefault(id(module), (name, module))
        elif depth <= _MAX_DEPTH and type(value) in (dict, list, tuple):
            pairs = value.items() if type(value) is dict else enumerate(value)
            for key, part in [*pairs]:  # at once: another thread may write
                look(part, f"{path}[{key!r}]", depth + 1)

    for name, module in model.named_modules():
        if is_metric(module):
            found.setdefault(id(module), (name, module))
    for name, module in model.named_modules():
        if id(module) not in found:
            for attribute, value in [*vars(module).items()]:
                if type(value) in (dict, list, tuple) or is_metric(value):
                    look(value, f"{name}.{attribute}" if name else attribute, 1)
    return [*found.values()]
