"""The batch signatures of a run: how many get graphs, and how many came before one had any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_cudagraph.errors import Location, Wording
from lightning_cudagraph.tensors.batch_signature import Signature

K = TypeVar("K")
V = TypeVar("V")

_MAX_REMEMBERED = 64
# Signatures without a capture after which the user is told.
_MANY = 5


def make_room(known: dict[K, V], is_idle: Callable[[V], bool] = lambda value: True) -> list[V]:
    """Forget the oldest idle entry if too many signatures are remembered.

    A loader of which no two batches look alike (a string in each) would otherwise fill the memory.
    """
    forgotten: list[V] = []
    while len(known) >= _MAX_REMEMBERED:
        oldest = next((key for key, value in known.items() if is_idle(value)), None)
        if oldest is None:
            break
        forgotten.append(known.pop(oldest))
    return forgotten


class NotCaptured(str):
    """The reason why nothing is captured, and a remedy, in words; and the user's line."""

    what = ""
    remedy = ""
    location: Location | None = None

    @classmethod
    def of(cls, what: str, remedy: str, location: Location | None) -> NotCaptured:
        made = cls(f"{what}. {remedy}")
        made.what, made.remedy, made.location = what, f"{remedy}.", location
        return made


class Signatures:
    """The signatures that have graphs, in all engines of a run, and those that came before any had."""

    def __init__(self, max_captured: int, warmup_steps: int, wording: Wording) -> None:
        self._max_captured = max_captured
        self._warmup_steps = warmup_steps
        self._wording = wording
        self._captured: dict[Signature, None] = {}
        self._before: dict[Signature, None] = {}

    def captured(self, signature: Signature) -> None:
        self._captured[signature] = None
        self._before.clear()

    def dropped(self, signatures: Iterable[Signature]) -> None:
        for signature in signatures:
            self._captured.pop(signature, None)

    def has_others(self, signature: Signature) -> bool:
        return any(other != signature for other in self._captured)

    @property
    def is_any(self) -> bool:
        return bool(self._captured)

    @property
    def is_full(self) -> bool:
        return len(self._captured) >= self._max_captured

    def one_too_many(self, signature: Signature) -> str:
        """Explain why one more signature gets no graph; return nothing if there is room for it."""
        if not self.is_full:
            return ""
        latest, wording = next(reversed(self._captured)), self._wording
        more = f"another {wording.signature}"
        if self._max_captured > 1:
            more = f"more than {self._max_captured} {wording.signatures}, the last"
        return f"{more}: {wording.of(latest.difference(signature))}"

    def begin(self, signature: Signature) -> NotCaptured:
        """Note that a signature begins its warm-up; return why nothing is captured, or nothing."""
        if self._captured or signature in self._before:
            return NotCaptured()
        if len(self._before) < _MANY:
            self._before[signature] = None
            return NotCaptured()
        first = next(iter(self._before))
        difference = self._wording.of(first.difference(signature))
        return NotCaptured.of(
            f"{_MANY} different {self._wording.signatures} came before one of them had come more than"
            f" {self._warmup_steps} times: {difference}",
            first.remedy(signature),
            first.line_of_difference(signature),
        )
