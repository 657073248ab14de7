"""The captured steps of an engine, by batch signature and accumulation phase."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.steps import MAKES_GRADIENTS, AccumulationPhase, Replay, Step
from lightning_cudagraph.tensors.batch import Signature
from lightning_cudagraph.tensors.signatures import Signatures
from lightning_cudagraph.tensors.static import StaticBatch

__all__ = ["NOT_YET", "GraphsBySignature", "NotYet"]

T = TypeVar("T")

NotYet = Literal["not yet"]
NOT_YET: NotYet = "not yet"


@dataclass
class _Graphs(Generic[T]):
    """The captured steps of one batch signature.

    Attributes:
        specialization: their specialization: values outside the batch that are part of the signature.
    """

    static: StaticBatch
    specialization: Mapping[str, Hashable]
    by_place: dict[AccumulationPhase, CapturedStep[T]] = field(default_factory=dict)


class GraphsBySignature(Generic[T]):
    """The captured steps of one engine.

    Args:
        signatures: the signatures that have graphs, in all engines of the run.

    Attributes:
        plain: by phase, the captured steps that take the fast path: a replay needs no work around it.
    """

    def __init__(self, device_type: str, signatures: Signatures) -> None:
        self._device_type = device_type
        self._signatures = signatures
        self._graphs: dict[Signature, _Graphs[T]] = {}
        self._all: list[CapturedStep[T]] = []
        self._latest: Signature | None = None
        self.plain: dict[AccumulationPhase, CapturedStep[T]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, signature: Signature, accumulation: AccumulationPhase) -> CapturedStep[T] | None:
        """Return the captured step of this signature and phase, or None."""
        graphs = self._graphs.get(signature)
        return None if graphs is None else graphs.by_place.get(accumulation)

    def add(self, signature: Signature, step: Step[T], captured: CapturedStep[T]) -> None:
        """Add a captured step."""
        graphs = self._graphs.setdefault(signature, _Graphs(captured.static, step.specialization))
        graphs.by_place[step.accumulation] = captured
        self._signatures.captured(signature)
        self._all.append(captured)

    def use(self, signature: Signature) -> None:
        """Note that the next replay is of this signature."""
        self._latest = signature

    def all(self) -> list[CapturedStep[T]]:
        """Return all captured steps."""
        return self._all

    def release(self) -> None:
        """Release all graphs and their memory."""
        self.plain.clear()
        for captured in self.all():
            captured.release()
        self._signatures.dropped(self._graphs)
        self._graphs.clear()
        self._all.clear()
        self._latest = None

    @property
    def static(self) -> StaticBatch | None:
        """The static batch of the latest graph."""
        return None if self._latest is None else self.static_of(self._latest)

    def static_of(self, signature: Signature) -> StaticBatch | None:
        """Return the static batch of a signature that has a graph, or None."""
        graphs = self._graphs.get(signature)
        return None if graphs is None else graphs.static

    def known_signature(self, step: Replay[T]) -> Signature | None:
        """Return the signature of the latest graph, if a quick comparison shows that the step has it."""
        if self._latest is None:
            return None
        graphs = self._graphs[self._latest]
        if step.specialization != graphs.specialization:
            return None
        static, batch = graphs.static, step.batch
        if batch is static.batch or static.tensors_of(batch, self._device_type) is not None:
            return self._latest
        return None

    def one_too_many(self, signature: Signature) -> str:
        """Return the reason why a signature gets no graph; empty if it has one or can get one."""
        return "" if signature in self._graphs else self._signatures.one_too_many(signature)

    def maker(self, step: Step[T], signature: Signature) -> CapturedStep[T] | NotYet | None:
        """Return the captured step that makes the gradients to which this step adds.

        None: the step makes its gradients itself.
        """
        return None if step.accumulation.drops else self.get(signature, MAKES_GRADIENTS) or NOT_YET
