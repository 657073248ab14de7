"""The captured steps of an engine, by batch signature and accumulation phase."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

import torch
from torch import Tensor

from lightning_cudagraph.capture.decisions.short_lives import ShortLives
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.steps import MAKES_GRADIENTS, AccumulationPhase, Step, T
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.errors import Wording
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.host_values import HostReads
from lightning_cudagraph.tensors.signatures import NotCaptured
from lightning_cudagraph.tensors.static import StaticBatch

_NOTHING: Mapping[str, Hashable] = {}
# After so many released graphs in a row with few replays each, none is released for another signature
# any more.
_MAX_SHORT_LIVES = 4
# Signatures without a capture after which the user is told.
_MANY = 5

NotYet = Literal["not yet"]
NOT_YET: NotYet = "not yet"


@dataclass(eq=False)
class GraphsOfSignature(Generic[T]):
    """The captured steps of one batch signature.

    Attributes:
        specialization: their specialization: values outside the batch that are part of the signature.
        plain: by phase, those that take the fast path: a replay needs no work around it.
        last_use: the number of batches before their latest one.
    """

    signature: Signature
    static: StaticBatch
    specialization: Mapping[str, Hashable]
    is_timed: bool
    by_accumulation: dict[AccumulationPhase, CapturedStep[T]] = field(default_factory=dict)
    plain: dict[AccumulationPhase, CapturedStep[T]] = field(default_factory=dict)
    last_use: int = 0

    @property
    def n_replays(self) -> int:
        return sum(captured.n_replays for captured in self.by_accumulation.values())


class GraphsOfRun:
    """The graphs of all engines of a run, and the signatures that came before it had any.

    Attributes:
        batches: number of batches so far, as a clock for uses.
        short_lives: those of graphs that made room for others.
    """

    def __init__(self, max_graphs: int, warmup_steps: int, wording: Wording) -> None:
        self._max_graphs = max_graphs
        self._warmup_steps = warmup_steps
        self._wording = wording
        self._holders: dict[GraphsOfSignature[Any], GraphsBySignature[Any]] = {}
        self._before: dict[Signature, None] = {}
        self.batches = 0
        self.short_lives = ShortLives(_MAX_SHORT_LIVES)

    def add(self, graphs: GraphsOfSignature[Any], holder: GraphsBySignature[Any]) -> None:
        self._holders[graphs] = holder
        self._before.clear()

    def remove(self, graphs: GraphsOfSignature[Any]) -> None:
        self._holders.pop(graphs, None)

    def least_recent(self) -> GraphsOfSignature[Any] | None:
        return min(self._holders, key=lambda graphs: graphs.last_use, default=None)

    def discard(self, graphs: GraphsOfSignature[Any]) -> None:
        self._holders[graphs].discard(graphs.signature)

    def has_others(self, signature: Signature) -> bool:
        return any(graphs.signature != signature for graphs in self._holders)

    @property
    def is_any(self) -> bool:
        return bool(self._holders)

    @property
    def is_full(self) -> bool:
        return len(self._holders) >= self._max_graphs

    def one_too_many(self, signature: Signature) -> str:
        """Explain why one more signature gets no graph, where there is no room for it."""
        latest, wording = next(reversed(self._holders)).signature, self._wording
        more = f"another {wording.signature}"
        if self._max_graphs > 1:
            more = f"more than {self._max_graphs} {wording.signatures}, the last"
        return f"{more}: {wording.of(latest.difference(signature))}"

    def begin(self, signature: Signature) -> NotCaptured:
        """Note that a signature begins its warm-up; return why nothing is captured, or nothing."""
        if self._holders or signature in self._before:
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


class GraphsBySignature(Generic[T]):
    """The captured steps of one engine.

    Attributes:
        all: those of all signatures.
        have_one_signature: the front end finds it, and has an engine for each.
        latest: the graphs of the latest replay; None if there is none, or if they are released.
    """

    def __init__(
        self,
        device: torch.device,
        of_run: GraphsOfRun,
        reads: HostReads | None = None,
        have_one_signature: bool = False,
    ) -> None:
        self._device = device
        self._of_run = of_run
        self._graphs: dict[Signature, GraphsOfSignature[T]] = {}
        self.all: list[CapturedStep[T]] = []
        self._shares_reads = reads is not None
        self.have_one_signature = have_one_signature
        self.reads = HostReads(user_location) if reads is None else reads
        self.latest: GraphsOfSignature[T] | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._graphs

    def signature_of(self, step: Step[T]) -> Signature:
        """Describe the batch of a step, and all else that its graph is specialised on."""
        return Signature(step.batch, self._device, step.specialization, self.reads, step.numbers)

    def get(self, signature: Signature, accumulation: AccumulationPhase) -> CapturedStep[T] | None:
        graphs = self._graphs.get(signature)
        return None if graphs is None else graphs.by_accumulation.get(accumulation)

    def add(self, signature: Signature, step: Step[T], captured: CapturedStep[T]) -> None:
        if (graphs := self._graphs.get(signature)) is None:
            is_timed = self.is_timed(signature)
            graphs = GraphsOfSignature(signature, captured.static, step.specialization, is_timed)
            self._graphs[signature] = graphs
            self._of_run.add(graphs, self)
        graphs.by_accumulation[step.accumulation] = captured
        self.all.append(captured)

    def is_timed(self, signature: Signature) -> bool:
        """True if graphs of this signature have timing events: one signature's have, lest times mix."""
        if (graphs := self._graphs.get(signature)) is not None:
            return graphs.is_timed
        return not any(graphs.is_timed for graphs in self._graphs.values())

    def instances(self, signature: Signature, step: Step[T]) -> tuple[bool, ...]:
        """One flag for each capture instance of a step: True if it has timing events."""
        return step.timed_instances if self.is_timed(signature) else (False,)

    def use(self, graphs: GraphsOfSignature[T]) -> None:
        """Note that the next replay is of these."""
        self._of_run.batches += 1
        graphs.last_use = self._of_run.batches
        self.latest = graphs

    def of(self, signature: Signature) -> GraphsOfSignature[T] | None:
        return self._graphs.get(signature)

    def clear_plain(self) -> None:
        """Let each captured step replay once off the fast path before it takes it again."""
        for graphs in self._graphs.values():
            graphs.plain.clear()

    def release(self) -> None:
        for signature in [*self._graphs]:
            self.discard(signature)
        if not self._shares_reads:
            self.reads.forget()

    def discard(self, signature: Signature) -> None:
        if (graphs := self._graphs.pop(signature, None)) is None:
            return
        self._of_run.remove(graphs)
        graphs.plain.clear()
        self.all = [each for each in self.all if each not in graphs.by_accumulation.values()]
        if self.latest is graphs:
            self.latest = None
        for captured in graphs.by_accumulation.values():
            captured.release()
        graphs.by_accumulation.clear()  # a batch in its static batch may still refer to them

    def static_of(self, signature: Signature) -> StaticBatch | None:
        graphs = self._graphs.get(signature)
        return None if graphs is None else graphs.static

    def find(
        self,
        batch: Any,
        numbers: Mapping[str, int],
        specialization: Mapping[str, Hashable] = _NOTHING,
        from_loader: bool = False,
    ) -> tuple[GraphsOfSignature[T], list[Tensor], list[Any]] | None:
        """Find the graphs of a batch by a quick comparison.

        Args:
            from_loader: the batch may be in host memory. If not, it is on the device, and may be the
                static batch itself.

        Returns:
            The graphs, and the tensors and host values of the batch in the order of the static batch;
            none of either if it is the static batch. Or None.
        """
        latest, every = self.latest, self._graphs.values()
        for graphs in every if latest is None or len(every) == 1 else (latest, *every):
            if specialization != graphs.specialization or not graphs.signature.agrees(numbers):
                continue
            static = graphs.static
            if batch is static.batch and not from_loader:
                return graphs, [], []
            leaves = static.leaves_of(batch, "cpu") if from_loader else None
            leaves = leaves or static.leaves_of(batch, self._device.type)
            if leaves is not None:
                return graphs, *leaves
        return None

    def known(self, step: Step[T]) -> GraphsOfSignature[T] | None:
        """Return the graphs that a quick comparison shows to be of the step's signature, or None."""
        found = self.find(step.batch, step.numbers, step.specialization)
        if found is None:
            return None
        graphs, tensors, values = found
        if step.batch is not graphs.static.batch:
            step.leaves = tensors, values
        return graphs

    def maker(self, step: Step[T]) -> CapturedStep[T] | NotYet | None:
        """Return the captured step that makes the gradients to which this step adds.

        Micro-batches of one window can differ in signature. So the first captured one serves all: the
        gradients of a window are then at one address, as far as possible.

        None: the step makes its gradients itself.
        """
        if step.accumulation.drops:
            return None
        makers = (graphs.by_accumulation.get(MAKES_GRADIENTS) for graphs in self._graphs.values())
        return next((maker for maker in makers if maker is not None), NOT_YET)
