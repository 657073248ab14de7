"""Selection of the layers to time, by the arguments of `LayerTimings`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lightning_cudagraph.errors import ConfigurationError, wrong_argument

Placement = Literal["forked", "serial"]

_OUT = "out to have the layers chosen; `timings=None` times nothing."
# A layer has up to four events, and as many scalars per timed step.
_MOST_LAYERS = 1000
_NAMES_SHOWN = 12
# More curves than these would bury the user's own.
MOST_CURVES = 12


@dataclass(frozen=True, kw_only=True)
class LayerTimings:
    """The layers of a model that are timed, and how often, in a graph or without one.

    ``CUDAGraphCallback(timings=LayerTimings(...))`` times them by events in the graph,
    ``LayerTimingsMonitor(LayerTimings(...))`` in a run without graphs, to be compared with that.

    `modules`, `types` and `depth` choose together: a layer is timed if it satisfies each that is given.
    Without any of them the layers are chosen automatically, level by level from the outside in, as deep
    as `max_layers` allows: the model is covered, and containers stay beside their members. If the
    outermost level alone is more than that, the first so many of it are timed. Tables and pictures show
    all of them; of the automatic choice, layers of the model itself and containers have curves, twelve
    at most from the outside in; where there is room, members of a container that is never called too.
    ``modules=["*"]`` gives each layer its curves.

    Args:
        modules: glob patterns of module names as `named_modules` gives them, such as
            ``["blocks.*", "head"]``. ``*`` crosses dots.
        types: names of classes, such as ``["Linear"]`` or ``["torch.nn.Linear"]``. Classes that are
            derived from them count.
        depth: how many levels are timed, from the outside in: 1 for the children of the model. A
            `ModuleList` or `ModuleDict` without a `forward` is no level: it is never called itself.
        max_layers: how many layers the automatic choice may take, at most.
        every_n_steps: the last of so many steps of the optimizer is timed, with all batches whose
            gradients it takes, as `log_every_n_steps` counts; the others replay a graph without events.
            None: every step; but one in 50 from the 200th on, where the host bounds the run and events
            would take more than 3 % of it, in a run of one process with graphs.
        placement: ``"forked"``: events are recorded on a branch of the graph that no kernel waits for.
            ``"serial"``: they are recorded between two kernels, and each adds about 4 µs.
        window_steps: aggregates are made over so many timed steps.
        trace_steps: how many of the last timed steps are written as a Chrome trace; 0 for none.

    Raises:
        ConfigurationError: if one is invalid.

    Example::

        CUDAGraphCallback(timings=LayerTimings(types=["Linear"], every_n_steps=10))
    """

    modules: Sequence[str] = ()
    types: Sequence[str] = ()
    depth: int | None = None
    max_layers: int = 32
    every_n_steps: int | None = None
    placement: Placement = "forked"
    window_steps: int = 200
    trace_steps: int = 0

    def __post_init__(self) -> None:
        for name, example in (("modules", "blocks.*"), ("types", "Linear")):
            self._check_strings(name, getattr(self, name), example)
            # A list could change, and is not hashable.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("depth", "max_layers", "every_n_steps", "window_steps", "trace_steps"):
            if name not in ("depth", "every_n_steps") or getattr(self, name) is not None:
                self._check_whole(name, least=int(name != "trace_steps"))
        if self.max_layers > _MOST_LAYERS:
            raise self._wrong(
                "max_layers",
                f"at most {_MOST_LAYERS}, because each layer adds events to the graph and scalars to"
                " every timed step. Choose by `modules`, `types` or `depth` what you want to see",
            )
        if self.placement not in ("forked", "serial"):
            raise self._wrong("placement", "'forked' or 'serial'")

    def _wrong(self, name: str, expected: str) -> ConfigurationError:
        return wrong_argument("LayerTimings", name, getattr(self, name), expected)

    def _check_strings(self, name: str, value: Any, example: str) -> None:
        if isinstance(value, str):
            raise self._wrong(name, f"a list of strings, found one string. Pass `[{value!r}]`")
        if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, f'a list of strings, such as `["{example}"]`')

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            nothing = ". To time nothing, pass `CUDAGraphCallback(timings=None)`" if least else ""
            raise self._wrong(name, f"an int of at least {least}{nothing}")


AUTOMATIC_LAYERS = LayerTimings()


def _is_automatic(timings: LayerTimings) -> bool:
    return not (timings.modules or timings.types or timings.depth is not None)


def _children(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        is_metric = any("torchmetrics" in base.__module__ for base in type(child).__mro__)
        is_trained = any(True for _ in child.parameters())
        if (
            isinstance(child, (nn.ModuleList, nn.ModuleDict))
            and type(child).forward is nn.Module.forward  # some subclasses have their own
        ):
            found += _children(path, child)  # these containers are never called themselves
        elif is_trained or not (isinstance(child, nn.Identity) or is_metric):
            found.append((path, child))
    return found


def _levels(model: nn.Module) -> Iterator[list[str]]:
    """The names of the layers, level by level, from the outermost to the innermost."""
    level = _children("", model)
    seen: set[int] = set()
    while level:
        # A module with several names counts once, at its outermost level.
        fresh: dict[int, tuple[str, nn.Module]] = {}
        for name, module in level:
            if id(module) not in seen:
                fresh.setdefault(id(module), (name, module))
        seen.update(fresh)
        level = list(fresh.values())
        yield [name for name, _ in level]
        level = [child for name, module in level for child in _children(name, module)]


def _all_names(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by all their names; a shared module has several."""
    found: dict[str, nn.Module] = {}

    def walk(prefix: str, module: nn.Module, around: frozenset[int]) -> None:
        around |= {id(module)}
        for name, child in module._modules.items():
            if child is not None and id(child) not in around:  # a module may contain itself
                found[prefix + name] = child
                walk(f"{prefix}{name}.", child, around)

    walk("", model, frozenset())
    return found


def _has_type(module: nn.Module, name: str) -> bool:
    outside, _, _ = name.rpartition(".")
    # Public names differ from those of the defining module: `torch.nn.Linear` is in
    # `torch.nn.modules.linear`.
    public = getattr(sys.modules.get(outside), name[len(outside) + 1 :], None) if outside else None
    return any(
        base is public or name in (base.__name__, f"{base.__module__}.{base.__qualname__}")
        for base in type(module).__mro__
        if issubclass(base, nn.Module)
    )


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:_NAMES_SHOWN]) + (", ..." if len(shown) > _NAMES_SHOWN else "")


def _matched(model: nn.Module, timings: LayerTimings, named: dict[str, nn.Module]) -> set[str]:
    """The names that satisfy `modules`, `types` and `depth`."""
    of_model = f"of `{type(model).__qualname__}`, which has"
    chosen = set(named)
    if timings.modules:
        by_pattern: set[str] = set()
        for pattern in timings.modules:
            # Compared as a name too: brackets in a name would be a set in a pattern.
            matched = {name for name in named if name == pattern or fnmatchcase(name, pattern)}
            if not matched:
                raise ConfigurationError(
                    f"`LayerTimings(modules=...)`: the pattern {pattern!r} matches no module {of_model}:"
                    f" {_some(named)}. Correct the pattern, or leave `modules` {_OUT}"
                )
            by_pattern |= matched
        chosen &= by_pattern
    if timings.types:
        by_type: set[str] = set()
        for type_name in timings.types:
            matched = {name for name, module in named.items() if _has_type(module, type_name)}
            if not matched:
                there = Counter(type(module).__name__ for module in named.values()).most_common()
                raise ConfigurationError(
                    f"`LayerTimings(types=...)`: {type_name!r} is the class of no module {of_model}:"
                    f" {_some(f'{name} ({number})' for name, number in there)}. Correct the name, or"
                    f" leave `types` {_OUT}"
                )
            by_type |= matched
        chosen &= by_type
    if timings.depth is not None:
        levels = zip(range(timings.depth), _levels(model), strict=False)
        outermost = {id(named[name]) for _, level in levels for name in level}
        chosen = {name for name in chosen if id(named[name]) in outermost}
    if not chosen and named:
        raise ConfigurationError(
            f"`LayerTimings(modules={list(timings.modules)!r}, types={list(timings.types)!r},"
            f" depth={timings.depth!r})`: no module {of_model} {len(named)}, satisfies all of them;"
            " expected at least one. Leave one of them out."
        )
    return chosen


def _levels_with_room(model: nn.Module, max_layers: int) -> set[str]:
    """The automatic choice: the layers of all whole levels that fit, or the first of the outermost.

    So the whole model is covered, and containers are listed with all of their members, which makes sums
    easy to check.
    """
    chosen: set[str] = set()
    for level in _levels(model):
        if len(chosen) + len(level) > max_layers:
            return chosen or set(level[:max_layers])
        chosen |= set(level)
    return chosen


def select_layers(model: nn.Module, timings: LayerTimings) -> dict[str, nn.Module]:
    """The modules to time, by name, in the order of `named_modules`.

    A module with several names is timed once, under the first that was asked for. A pattern or type that
    matches no module is an error, and so are too many layers.
    """
    named = _all_names(model)
    if _is_automatic(timings):
        chosen = _levels_with_room(model, timings.max_layers)
    else:
        chosen = _matched(model, timings, named)
    by_module: dict[int, str] = {}
    for name, module in named.items():
        if name in chosen:
            by_module.setdefault(id(module), name)
    if len(by_module) > _MOST_LAYERS:
        raise ConfigurationError(
            f"`LayerTimings`: modules={list(timings.modules)!r}, types={list(timings.types)!r},"
            f" depth={timings.depth!r} select {len(by_module)} layers of `{type(model).__qualname__}`;"
            f" expected at most {_MOST_LAYERS}, because each adds events to the graph and scalars to"
            f" every timed step. Narrow them, or leave all three {_OUT}"
        )
    return {name: named[name] for name in by_module.values()}


def without_curves(model: nn.Module, timings: LayerTimings) -> set[str]:
    """The timed layers that only tables and pictures show: the inner ones of the automatic choice.

    Curves show its containers, and the layers of the model itself, level by level from the outside in.
    """
    named = select_layers(model, timings)
    if not _is_automatic(timings):
        return set()
    shown: list[str] = []
    for level in _levels(model):
        level = [name for name in level if name in named]
        outer = [name for name in level if "." not in name or _children(name, named[name])]
        if shown and len(shown) + len(outer) > MOST_CURVES:
            break
        shown += outer
    return set(named) - set(shown[:MOST_CURVES])


def layers_at(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The current modules of some names, without names that have none; hooks may replace modules."""
    found = {}
    for name in names:
        module: Any = model
        for part in name.split("."):
            module = getattr(module, part, None)
        if isinstance(module, nn.Module):
            found[name] = module
    return found


def never_timed(before: Mapping[str, str] | None, now: Mapping[str, str]) -> dict[str, str]:
    """Reasons for layers that no step so far has timed; steps may differ in the layers that they call.

    `before` are those that were untimed in all steps before `now`; None if there are none.
    """
    return {what: why for what, why in now.items() if before is None or what in before}


def untimed_notes(untimed: Mapping[str, str]) -> list[str]:
    """Sentences for the report about what is not timed, one for each reason."""
    by_reason: dict[str, list[str]] = {}
    for what, reason in untimed.items():
        by_reason.setdefault(reason, []).append(what)
    return [f"not timed: {_some(names)}: {reason}" for reason, names in by_reason.items()]
