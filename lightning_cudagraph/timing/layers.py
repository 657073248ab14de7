"""Which layers of a model are timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_cudagraph.errors import ConfigurationError

__all__ = ["LayerTimings", "select_layers"]


@dataclass(frozen=True)
class LayerTimings:
    """Which layers are timed by events inside the graph.

    Args:
        modules: glob patterns of module names as `named_modules` gives them, such as
            ``["blocks.*", "head"]``. Empty: chosen automatically, from the outside in, as deep as
            `max_layers` allows.
        max_layers: how many layers the automatic choice may take, at most. Patterns are not limited
            by it.

    Raises:
        ConfigurationError: if `max_layers` is not positive.
    """

    modules: Sequence[str] = ()
    max_layers: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.modules, str):
            raise ConfigurationError(
                f"`LayerTimings(modules={self.modules!r})`: expected a list of patterns, found one"
                f" string. Pass `[{self.modules!r}]`."
            )
        if self.max_layers < 1:
            raise ConfigurationError(
                f"`LayerTimings(max_layers={self.max_layers})`: expected at least 1. To time nothing,"
                " pass `CUDAGraphCallback(timings=None)`."
            )


def _is_a_layer(module: nn.Module) -> bool:
    """Whether a module without parameters is worth timing; torchmetrics are modules too."""
    return not isinstance(module, nn.Identity) and "torchmetrics" not in type(module).__module__


def _children(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _children(path, child)  # never called themselves
        elif any(True for _ in child.parameters()) or _is_a_layer(child):
            found.append((path, child))
    return found


def select_layers(model: nn.Module, timings: LayerTimings) -> dict[str, nn.Module]:
    """The modules to time, by name, in the order of `named_modules`.

    Args:
        model: the model whose submodules are chosen from.
        timings: the user's choice.

    Returns:
        Name and module of each timed layer. A module known under two names is timed under its first.

    Raises:
        ConfigurationError: if a pattern matches no module.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if timings.modules:
        chosen: set[str] = set()
        for pattern in timings.modules:
            matched = {name for name in named if fnmatchcase(name, pattern)}
            if not matched:
                some = ", ".join(list(named)[:12]) + (", ..." if len(named) > 12 else "")
                raise ConfigurationError(
                    f"`LayerTimings(modules=...)`: the pattern {pattern!r} matches no module of"
                    f" `{type(model).__qualname__}`, which has: {some}. Correct the pattern, or leave"
                    " `modules` out to have the layers chosen; `timings=None` times nothing."
                )
            chosen |= matched
    else:
        # Level by level, while the whole level still fits: the model stays covered, and containers
        # stay beside their members, so that sums can be checked by eye.
        level = _children("", model)
        chosen = set()
        while level and len(chosen) + len(level) <= timings.max_layers:
            chosen |= {name for name, _ in level}
            level = [child for name, module in level for child in _children(name, module)]
        if not chosen:
            chosen = {name for name, _ in level[: timings.max_layers]}  # wide and flat
    return {name: module for name, module in named.items() if name in chosen}
