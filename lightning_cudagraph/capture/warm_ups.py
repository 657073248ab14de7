"""How much of its warm-up each kind of step has behind it."""

from __future__ import annotations

from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.tensors.batch import Signature

__all__ = ["WarmUps"]

# Signatures whose warm-up is remembered. A loader whose batches never look alike (a string in each)
# would otherwise fill the memory with them.
_MAX_SIGNATURES = 64
# Batch signatures without a capture after which the user is told.
_MANY_SIGNATURES = 5


class WarmUps:
    """The warm-ups of a run, by batch signature and place.

    Args:
        steps: ordinary training steps on the side stream before a capture.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left: dict[Signature, dict[Place, int]] = {}

    def left(self, signature: Signature, place: Place) -> int:
        """How many steps are still to come before a capture."""
        return self._left.get(signature, {}).get(place, self._steps)

    def is_at_its_end(self, signature: Signature, place: Place) -> bool:
        """Whether the next step can be the last one before a capture, and is not the first one."""
        return self.left(signature, place) <= min(1, self._steps - 1)

    def is_new(self, signature: Signature) -> bool:
        """Whether no step was done on such a batch."""
        return signature not in self._left

    def begin(self, signature: Signature) -> None:
        """The first step on such a batch is about to be done."""
        if len(self._left) >= _MAX_SIGNATURES:
            del self._left[next(iter(self._left))]
        self._left[signature] = {}

    def done(self, signature: Signature, place: Place) -> None:
        """A step went through."""
        self._left[signature][place] = max(self.left(signature, place) - 1, 0)

    def variety(self, signature: Signature) -> str:
        """Why nothing is captured, if the first batch of this signature comes after many others."""
        if len(self._left) != _MANY_SIGNATURES:
            return ""
        first = next(iter(self._left))
        return (
            f"{_MANY_SIGNATURES} different batch signatures and none came up more than"
            f" {self._steps} times: {first.difference(signature)}. Pad to one shape, and"
            " leave out of the batch what differs in each (names, ids), or pass it as a tensor"
        )

    def forget(self) -> None:
        """Every warm-up begins anew."""
        self._left.clear()
