"""Tensors that say whether numbers are finite, so that a branch on one is known for a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

_ASK_IF_FINITE = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
)


class FiniteChecks:
    """The tensors of one capture that say whether numbers are finite."""

    def __init__(self) -> None:
        # By id, which another tensor may have once this one is gone.
        self._known: dict[int, ref[Tensor]] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a function of torch that has run: a check, or one that combines checks."""
        if not isinstance(result, Tensor) or result.is_floating_point():
            return
        if func in _ASK_IF_FINITE or any(map(self.knows, (*args, *kwargs.values()))):
            self._known[id(result)] = ref(result)

    def knows(self, value: Any) -> bool:
        """True for a result of a check, or of a combination of checks."""
        found = self._known.get(id(value))
        return found is not None and found() is value
