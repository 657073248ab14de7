"""Remaining warm-up steps, by batch signature and accumulation phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.signatures import make_room

__all__ = ["WarmUps"]

# Of a signature that comes after others: optimizer state, gradient buckets and kernels are there, and
# what is left is to see what its code does. Two steps show if a number that it logs changes each time.
_LATER_STEPS = 2


@dataclass
class _Left:
    """The warm-up of a signature.

    Attributes:
        steps: its length.
        by_phase: the steps left; all of them for a phase that is not there.
    """

    steps: int
    by_phase: dict[AccumulationPhase, int] = field(default_factory=dict)


class WarmUps:
    """The warm-ups of an engine, of eager steps on the side stream.

    Args:
        steps: the length of the first signature's.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left: dict[Signature, _Left] = {}

    def left(self, signature: Signature, accumulation: AccumulationPhase) -> int:
        """Return the number of warm-up steps left before a capture."""
        left = self._left.get(signature)
        return self._steps if left is None else left.by_phase.get(accumulation, left.steps)

    def is_at_its_end(self, signature: Signature, accumulation: AccumulationPhase) -> bool:
        """True if the next step can be the last before a capture, and is not the first."""
        return self.left(signature, accumulation) <= min(1, self._steps - 1)

    def is_new(self, signature: Signature) -> bool:
        """True if no step has begun on a batch of this signature."""
        return signature not in self._left

    def begin(self, signature: Signature, is_later: bool = False) -> None:
        """Begin the warm-up of a signature, a short one if it comes later than others."""
        make_room(self._left)
        self._left[signature] = _Left(min(_LATER_STEPS, self._steps) if is_later else self._steps)

    def done(self, signature: Signature, accumulation: AccumulationPhase) -> None:
        """Count a step that has returned."""
        left = self.left(signature, accumulation)
        self._left[signature].by_phase[accumulation] = max(left - 1, 0)

    def forget(self) -> None:
        """Begin every warm-up again."""
        self._left.clear()
