"""The graphs of a run: by the signature of the batches, and by the place of the step in its window."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.steps import MAKES_GRADIENTS, Place, Step
from lightning_cudagraph.tensors.batch import Signature
from lightning_cudagraph.tensors.static import StaticBatch

__all__ = ["NOT_YET", "GraphsBySignature", "NotYet"]

T = TypeVar("T")

NotYet = Literal["not yet"]
NOT_YET: NotYet = "not yet"


@dataclass
class _Graphs(Generic[T]):
    """The graphs of one batch signature.

    Attributes:
        static: the static buffers that they read.
        beside: what else they take for granted.
        by_place: the graphs.
    """

    static: StaticBatch
    beside: Mapping[str, Hashable]
    by_place: dict[Place, CapturedStep[T]] = field(default_factory=dict)


class GraphsBySignature(Generic[T]):
    """The graphs that there are.

    Args:
        device_type: of the device that they run on.
        max_signatures: batches of how many signatures have graphs.

    Attributes:
        plain: those of which the next replay can be like the last one, with nothing around it, by place.
    """

    def __init__(self, device_type: str, max_signatures: int) -> None:
        self._device_type = device_type
        self._max_signatures = max_signatures
        self._graphs: dict[Signature, _Graphs[T]] = {}
        self._latest: Signature | None = None
        self.plain: dict[Place, CapturedStep[T]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, signature: Signature, place: Place) -> CapturedStep[T] | None:
        """The graph for steps of this place on such batches, if there is one."""
        graphs = self._graphs.get(signature)
        return None if graphs is None else graphs.by_place.get(place)

    def add(self, signature: Signature, step: Step[T], captured: CapturedStep[T]) -> None:
        """Keep the graph that was captured of a step."""
        graphs = self._graphs.setdefault(signature, _Graphs(captured.static, step.beside))
        graphs.by_place[step.place] = captured

    def use(self, signature: Signature) -> None:
        """A graph of this signature is about to be replayed."""
        self._latest = signature

    def all(self) -> list[CapturedStep[T]]:
        """Every graph."""
        return [captured for graphs in self._graphs.values() for captured in graphs.by_place.values()]

    def release(self) -> None:
        """Let go of all of them, and of their memory."""
        self.plain.clear()
        for captured in self.all():
            captured.release()
        self._graphs.clear()
        self._latest = None

    @property
    def static(self) -> StaticBatch | None:
        """The static buffers that the latest graph reads."""
        return None if self._latest is None else self.static_of(self._latest)

    def static_of(self, signature: Signature) -> StaticBatch | None:
        """The static buffers of one signature, if it has a graph."""
        graphs = self._graphs.get(signature)
        return None if graphs is None else graphs.static

    def known_signature(self, step: Step[T]) -> Signature | None:
        """The signature of the latest graph, if a quick look can tell that it is also that of a step."""
        if self._latest is None:
            return None
        graphs = self._graphs[self._latest]
        if step.beside != graphs.beside:
            return None
        static, batch = graphs.static, step.batch
        if batch is static.batch or static.tensors_of(batch, self._device_type) is not None:
            return self._latest
        return None

    def one_too_many(self, signature: Signature) -> str:
        """Why a signature gets no graph, or nothing if it has one, or there is room for it."""
        if signature in self._graphs or len(self._graphs) < self._max_signatures:
            return ""
        latest = next(reversed(self._graphs))
        more = "another batch signature"
        if self._max_signatures > 1:
            more = f"more than {self._max_signatures} batch signatures, the last"
        return f"{more}: {latest.difference(signature)}"

    def maker(self, step: Step[T], signature: Signature) -> CapturedStep[T] | NotYet | None:
        """The graph whose gradients a step adds to, if it adds to those of another step."""
        return None if step.place.drops else self.get(signature, MAKES_GRADIENTS) or NOT_YET
