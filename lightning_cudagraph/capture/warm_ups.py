"""Warm-up steps that are left, by batch signature and accumulation phase."""

from __future__ import annotations

from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.tensors.batch import Signature
from lightning_cudagraph.tensors.signatures import make_room

__all__ = ["WarmUps"]


class WarmUps:
    """The warm-ups of an engine; each takes `steps` ordinary steps on the side stream."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left: dict[Signature, dict[Place, int]] = {}

    def left(self, signature: Signature, place: Place) -> int:
        """Number of steps that are still to come before a capture."""
        return self._left.get(signature, {}).get(place, self._steps)

    def is_at_its_end(self, signature: Signature, place: Place) -> bool:
        """True if the next step can be the last one before a capture, and is not the first one."""
        return self.left(signature, place) <= min(1, self._steps - 1)

    def is_new(self, signature: Signature) -> bool:
        """True if no step was done on such a batch."""
        return signature not in self._left

    def begin(self, signature: Signature) -> None:
        """The first step on such a batch is about to be done."""
        make_room(self._left)
        self._left[signature] = {}

    def done(self, signature: Signature, place: Place) -> None:
        """A step has returned."""
        self._left[signature][place] = max(self.left(signature, place) - 1, 0)

    def forget(self) -> None:
        """Begin every warm-up again."""
        self._left.clear()
