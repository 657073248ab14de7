"""Remaining warm-up steps, by batch signature and accumulation phase."""

from __future__ import annotations

from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.tensors.batch import Signature
from lightning_cudagraph.tensors.signatures import make_room

__all__ = ["WarmUps"]


class WarmUps:
    """The warm-ups of an engine, each of `steps` eager steps on the side stream."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left: dict[Signature, dict[AccumulationPhase, int]] = {}

    def left(self, signature: Signature, accumulation: AccumulationPhase) -> int:
        """Return the number of warm-up steps left before a capture."""
        return self._left.get(signature, {}).get(accumulation, self._steps)

    def is_at_its_end(self, signature: Signature, accumulation: AccumulationPhase) -> bool:
        """True if the next step can be the last before a capture, and is not the first."""
        return self.left(signature, accumulation) <= min(1, self._steps - 1)

    def is_new(self, signature: Signature) -> bool:
        """True if no step has begun on a batch of this signature."""
        return signature not in self._left

    def begin(self, signature: Signature) -> None:
        """Begin the warm-up of a signature."""
        make_room(self._left)
        self._left[signature] = {}

    def done(self, signature: Signature, accumulation: AccumulationPhase) -> None:
        """Count a step that has returned."""
        self._left[signature][accumulation] = max(self.left(signature, accumulation) - 1, 0)

    def forget(self) -> None:
        """Begin every warm-up again."""
        self._left.clear()
