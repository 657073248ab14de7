"""Recomputation by activation checkpointing in the backward pass, attributed to its layers.

Non-reentrant checkpointing recomputes a whole region when a node needs the first tensor of it. The layer
of that node alone would be charged with the recomputation of all others in the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils import checkpoint

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.timing.layers.layer_calls import Layers

# Saved-tensor hooks of `torch.utils.checkpoint`: around a checkpointed region, and its recomputation.
_HOOKS = ("_checkpoint_hook", "_recomputation_hook")


class Recomputation:
    """Tracker of non-reentrant checkpoints in one step, which is in calls of the layers `here`.

    When a recomputation begins or ends, `moved` is called.
    """

    def __init__(self, here: Callable[[], Layers], moved: Callable[[], None]) -> None:
        self._here = here
        self._moved = moved
        self._around: WeakKeyDictionary[Any, Layers] = WeakKeyDictionary()
        self._under_way: list[Layers] = []

    @property
    def layers(self) -> Layers | None:
        """The layers around the region that is being recomputed; None if there is none."""
        return self._under_way[-1] if self._under_way else None

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Track checkpoints and their recomputation inside the block."""
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
            finally:  # torch ends it by an exception, as soon as enough has been recomputed
                self._under_way.pop()
                self._moved()

        with setting(checkpoint, **dict(zip(_HOOKS, (entered, recomputed), strict=True))):
            yield
