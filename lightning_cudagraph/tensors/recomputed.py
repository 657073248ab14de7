"""Attributes that torch's hooks recompute in every forward pass: pruned and normalised weights.

`torch.nn.utils.prune`, and the older forms of weight and spectral normalisation, keep a parameter under
another name, and set a plain attribute under the original name before each forward pass. A replay sets
no attributes, so they are set after it, to copies of the recomputed tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_cudagraph.compat.attributes import bound


@dataclass(frozen=True)
class Recomputed:
    """A recomputed attribute in a captured step."""

    attributes: dict[str, Any]
    name: str
    value: Tensor

    def hand_over(self) -> None:
        """Set the attribute to a copy, because the next replay overwrites the static tensor."""
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
    """Detach recomputed attributes from the autograd graphs of earlier forward passes.

    These graphs keep the gradient accumulation nodes of the parameters alive, and with them the stream
    that they were made on: a later capture would have to wait for it.
    """
    for module in model.modules():
        for name in recomputed_names(module):
            if (value := vars(module).get(name)) is not None:
                vars(module)[name] = value.detach()


class RecomputedStep(list[Recomputed]):
    """The recomputed attributes of one step."""

    def __init__(self, before: list[tuple[dict[str, Any], str, Any]]) -> None:
        super().__init__()
        self._before = before

    def so_far(self) -> list[Recomputed]:
        """The attributes recomputed so far, in the middle of the step."""
        return [
            Recomputed(attributes, name, attributes[name].detach())
            for attributes, name, _ in self._before
            if name in attributes
        ]

    def as_before(self) -> AbstractContextManager[None]:
        """Restore the attributes from before the step inside the `with` block."""
        return bound(self._before)


@contextmanager
def without_recomputed(model: nn.Module) -> Iterator[RecomputedStep]:
    """Remove recomputed attributes for the `with` block, and restore them after it.

    A step that reads one before it is recomputed would read the tensor of the capture in every replay.
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
