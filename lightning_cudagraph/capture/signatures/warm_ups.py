"""Remaining warm-up steps, by batch signature and accumulation phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from lightning_cudagraph.capture.signatures.by_signature import GraphsBySignature
from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.signatures import make_room

# They create lazy state and library handles, and settle the allocator. With a `DistributedDataParallel`
# more are needed: `is_settled` in processes/ddp.py.
WARMUP_STEPS = 3
# Of a signature that comes after others: optimizer state, gradient buckets and kernels are there, and
# what is left is to see what its code does. Two steps show if a number that it logs changes each time.
_LATER_STEPS = 2


@dataclass
class _WarmUp:
    """The warm-up of a signature.

    Attributes:
        done: the signatures of its steps. They were equal; once a capture has read a host value, those
            of steps with another value of it are not any more, and such steps do not count.
    """

    steps: int
    done: dict[AccumulationPhase, list[Signature]] = field(default_factory=dict)


class WarmUps:
    """The warm-ups of an engine, of eager steps on the side stream; the first has `steps` steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begun: dict[Signature, _WarmUp] = {}
        self._first: list[Signature] = []  # steps of warm-ups that are forgotten

    def left(self, signature: Signature, accumulation: AccumulationPhase) -> int:
        """Return the number of warm-up steps left before a capture."""
        if (warm_up := self._of(signature)) is None:
            return self._steps
        done = sum(each == signature for each in warm_up.done.get(accumulation, ()))
        return max(warm_up.steps - done, 0)

    def is_new(self, signature: Signature) -> bool:
        """True if no step has begun on a batch of this signature."""
        return self._of(signature) is None

    def _of(self, signature: Signature) -> _WarmUp | None:
        """The warm-up of a signature, or what other ones have of it, since a value was read."""
        if (warm_up := self._begun.get(signature)) is not None:
            return warm_up
        parts = _WarmUp(self._steps)
        for other in self._begun.values():
            for accumulation, done in other.done.items():
                if same := [each for each in done if each == signature]:
                    parts.done.setdefault(accumulation, []).extend(same)
        if parts.done:
            self._begun[signature] = parts
        return self._begun.get(signature)

    def of_others(self, captured: GraphsBySignature[Any]) -> list[Signature]:
        """The signatures of the run's first warm-up steps that have no graph."""
        return [each for each in self._first or self._done() if each not in captured]

    def _done(self) -> list[Signature]:
        steps = (each for warm_up in self._begun.values() for each in warm_up.done.values())
        return [*chain.from_iterable(steps)]

    def begin(self, signature: Signature, is_later: bool = False) -> None:
        """Begin the warm-up of a signature, a short one if it comes later than others."""
        make_room(self._begun)
        self._begun[signature] = _WarmUp(min(_LATER_STEPS, self._steps) if is_later else self._steps)

    def done(self, signature: Signature, accumulation: AccumulationPhase) -> None:
        if self.left(signature, accumulation) > 0:
            self._begun[signature].done.setdefault(accumulation, []).append(signature)

    def forget(self) -> None:
        """Begin every warm-up again."""
        self._first = self._first or self._done()
        self._begun.clear()
