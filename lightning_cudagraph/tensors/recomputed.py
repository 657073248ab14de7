"""Attributes that hooks of torch compute anew in every forward pass: pruned and normalised weights.

`torch.nn.utils.prune`, and the older forms of weight and spectral normalisation, keep a parameter under
another name, and set an ordinary attribute under its own before each forward pass. A replay sets no
attribute: it is given what the step has computed, like the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["Recomputed", "detach_recomputed", "recomputed_apart", "recomputed_names"]


@dataclass(frozen=True)
class Recomputed:
    """One such attribute in a captured step.

    Attributes:
        attributes: those of the module.
        name: its name among them.
        value: the static tensor.
    """

    attributes: dict[str, Any]
    name: str
    value: Tensor

    def hand_over(self) -> None:
        """Set it, as the step would have; a copy, because the next replay overwrites the value."""
        self.attributes[self.name] = self.value.clone()


def recomputed_names(module: nn.Module) -> set[str]:
    """The attributes that hooks of torch set before each forward pass of a module."""
    found: set[str] = set()
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            found.add(hook._tensor_name)
        elif isinstance(hook, (WeightNorm, SpectralNorm)):
            found.add(hook.name)
    return found


def detach_recomputed(model: nn.Module) -> None:
    """Let go of the autograd graphs of those that were computed before, elsewhere.

    They keep the nodes alive that accumulate the gradients of their parameters, and with them the stream
    that these were made on: a later capture would have to wait for it.
    """
    for module in model.modules():
        for name in recomputed_names(module):
            if (value := vars(module).get(name)) is not None:
                vars(module)[name] = value.detach()


_MISSING = object()


class RecomputedStep(list[Recomputed]):
    """What was computed in one step.

    Args:
        before: the attributes as they were before it: of which module, under which name, and what.
    """

    def __init__(self, before: list[tuple[dict[str, Any], str, Any]]) -> None:
        super().__init__()
        self._before = before

    def so_far(self) -> list[Recomputed]:
        """What has been computed, while the step is under way."""
        return [
            Recomputed(attributes, name, attributes[name].detach())
            for attributes, name, _ in self._before
            if name in attributes
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the attributes are as they were before the step."""
        now = [
            (attributes, name, attributes.get(name, _MISSING)) for attributes, name, _ in self._before
        ]
        for attributes, name, value in self._before:
            attributes[name] = value
        try:
            yield
        finally:
            for attributes, name, value in now:
                if value is _MISSING:
                    del attributes[name]
                else:
                    attributes[name] = value


@contextmanager
def recomputed_apart(model: nn.Module) -> Iterator[RecomputedStep]:
    """Inside, they are missing until they are computed; afterwards what was there is back.

    Missing, because a step that reads one before it is computed would read that of the capture for ever.

    Yields:
        What was computed inside, filled by the time that this is left.
    """
    before = [
        (vars(module), name, vars(module).pop(name))
        for module in model.modules()
        for name in recomputed_names(module)
        if name in vars(module)
    ]
    found = RecomputedStep(before)
    try:
        yield found
        found += found.so_far()
    finally:
        for attributes, name, value in before:
            attributes[name] = value
