"""Recomputation by activation checkpointing in the backward pass, and the layers that it belongs to.

Without reentrance, torch recomputes all that is checkpointed when a node needs the first tensor of it.
By the node alone, its layer would be charged with the others', and with what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils import checkpoint

__all__ = ["Recomputation"]

# Of `torch.utils.checkpoint`: entered around what is checkpointed, and around its recomputation.
_HOOKS = ("_checkpoint_hook", "_recomputation_hook")

_Layers = frozenset[str]


class Recomputation:
    """Follows checkpoints without reentrance through one step."""

    def __init__(self, here: Callable[[], _Layers], moved: Callable[[], None]) -> None:
        self._here = here
        self._moved = moved
        self._around: WeakKeyDictionary[Any, _Layers] = WeakKeyDictionary()
        self._under_way: list[_Layers] = []

    @property
    def layers(self) -> _Layers | None:
        """Those in whose calls lies what is being recomputed; None if nothing is."""
        return self._under_way[-1] if self._under_way else None

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice checkpoints and their recomputation inside."""
        enter, recompute = (getattr(checkpoint, name) for name in _HOOKS)

        def entered(frame: Any) -> Any:
            self._around[frame] = self._here()
            return enter(frame)

        @contextmanager
        def recomputed(frame: Any, *args: Any) -> Iterator[None]:
            self._under_way.append(self._around.get(frame(), frozenset()))
            self._moved()
            try:
                with recompute(frame, *args):
                    yield
            finally:  # an exception ends it, as soon as enough has been recomputed
                self._under_way.pop()
                self._moved()

        for name, function in zip(_HOOKS, (entered, recomputed), strict=True):
            setattr(checkpoint, name, function)
        try:
            yield
        finally:
            for name, function in zip(_HOOKS, (enter, recompute), strict=True):
                setattr(checkpoint, name, function)
