"""A step as the engine sees it: its functions, its accumulation phase, and the counts of all steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.checks.guards.remedies import kind_of, remedy_of
from lightning_cudagraph.errors import Wording
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.writes import storage_id, whole


class Outputs(Protocol):
    """The static outputs of a captured step."""

    def values(self) -> dict[str, Tensor]:
        """Return the outputs to compare in a verification, by name, in the order of the step."""


T = TypeVar("T", bound=Outputs)

_MAX_REASONS = 12
_TENSORS_SHOWN = 4


class Phase(Enum):
    """The way in which a batch was run."""

    EAGER = "eager"
    WARMING = "warming"
    CAPTURED = "captured"


@dataclass
class StepCounts:
    """Counts of the steps of a run.

    Attributes:
        evictions: signatures with released graphs, in favour of others.
        eager_by_signature: batches that were to run eagerly: their signature has earned no graph, or is
            one too many.
        not_captured: the reason why nothing was captured, if batches have too many signatures.
    """

    warmed_up: int = 0
    captures: int = 0
    evictions: int = 0
    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    eager_by_signature: int = 0
    capture_ms: float = 0.0
    memory_bytes: int = 0
    recaptures: list[str] = field(default_factory=list)
    not_captured: str = ""

    def note(self, phase: Phase, reason: str = "") -> None:
        """Count a step, or a call; `reason` is that of an eager one."""
        if phase is Phase.EAGER:
            self.note_eager(reason)
        elif phase is Phase.WARMING:
            self.warmed_up += 1
        else:
            self.replayed += 1

    def note_eager(self, reason: str) -> None:
        """Count an eager step. Beyond a dozen reasons, new ones are counted together."""
        if reason not in self.eager and len(self.eager) >= _MAX_REASONS:
            reason = "other reasons"
        self.eager[reason] += 1

    def note_recapture(self, reason: str, wording: Wording, is_after_pause: bool = False) -> None:
        """Note a change that has made graphs invalid, with a remedy in the words of the front end."""
        change = reason if isinstance(reason, Change) else Change(reason)
        change.is_after_pause = is_after_pause
        change.remedy = wording.of(change.remedy or remedy_of(kind_of(change)))
        self.recaptures.append(change)


class AccumulationPhase(NamedTuple):
    """The accumulation phase of a step: the part of the work that its micro-batch does.

    Attributes:
        drops: the step drops the gradients before it, as the first micro-batch does.
        steps: the captured step includes the optimizer step, as the last micro-batch does in scope
            "step".
        syncs: the step averages gradients over processes, as the last micro-batch does.
    """

    drops: bool
    steps: bool
    syncs: bool = False


MAKES_GRADIENTS = AccumulationPhase(drops=True, steps=False)


@dataclass(eq=False)
class Step(Generic[T], ABC):
    """A step on one batch; each front end has a subclass.

    Attributes:
        specialization: values outside the batch that are part of the signature, by the names
            that the user knows.
        numbers: integers beside the batch, by such names; what captured steps read of them is part of
            the signature.
        eager_reason: why it runs eagerly, though others of its accumulation phase are replayed.
        signature: set by the engine, if the front end does not know it.
        leaves: the tensors and host values of the batch, in the order of the static batch, once a
            comparison with that has found them.
        is_compared: the guards have been compared for this step.
    """

    batch: Any
    accumulation: AccumulationPhase
    timed: bool = False
    specialization: Mapping[str, Hashable] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    eager_reason: str = ""
    signature: Signature | None = None
    leaves: tuple[list[Tensor], list[Any]] | None = None
    is_compared: bool = field(default=False, init=False)

    def refresh(self, outputs: T | None) -> None:
        """Bring host values to where the graph reads them; `outputs` is None before a capture."""

    def before_timed(self, outputs: T) -> None:
        """Prepare for a timed replay, which overwrites the events of its static outputs."""

    def copying(self) -> AbstractContextManager[None]:
        """Context of the copy of the batch before a timed replay."""
        return nullcontext()

    def between(self, outputs: T, index: int) -> None:
        """Call the hooks of a graph break, given its index and the static outputs."""

    @abstractmethod
    def run(self) -> None:
        """Run the step eagerly."""

    @abstractmethod
    def record(self, batch: Any, cut: BreakGraph | None, timed: bool) -> T:
        """Run the step on the static batch, and return the static outputs.

        Args:
            cut: called at graph breaks, in a capture; None in a rehearsal, which is an eager run.
            timed: record timing events.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the step changes, by name, in the order of the step."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Context of a capture or rehearsal, which undoes its effects on the host."""

    def learning(self) -> AbstractContextManager[None]:
        """Context of a warm-up step."""
        return nullcontext()

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return those with gradients that the step drops and makes, and those that it only adds to."""
        return [], []

    def is_followed_by_user_code(self) -> bool:
        """True if user code runs between steps, and can hold references to gradients."""
        return False

    @property
    def in_window(self) -> bool:
        """True if later steps add to the gradients that this one makes."""
        return False

    @property
    def are_added_to(self) -> bool:
        """False if no later step adds to the gradients that this one makes."""
        return True

    @property
    def timed_instances(self) -> tuple[bool, ...]:
        """One flag for each capture instance: True if it has timing events."""
        return (False,)

    def all_state(self, written: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return all tensors that the step changes: `state`, and others that a capture saw it write."""
        state = {name: local(tensor) for name, tensor in self.state().items()}
        known = {storage_id(tensor) for tensor in state.values()}
        for tensor in written:
            if storage_id(tensor) not in known:
                known.add(storage_id(tensor))
                shape = "x".join(map(str, tensor.shape)) or "one number"
                state[f"a tensor that belongs to no module ({len(state)}, {shape})"] = whole(tensor)
        return state

    @property
    def description(self) -> str:
        """The batch and the accumulation phase, in words."""
        tensors = [
            f"`{path}` {tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
            for path, leaf in flatten_batch(self.batch)
            if isinstance(leaf, Tensor)
        ]
        shown = tensors[:_TENSORS_SHOWN] + ["..."] * (len(tensors) > _TENSORS_SHOWN)
        first = "" if self.accumulation.drops else ", adding to gradients"
        last = "" if self.accumulation.steps else ", without the optimizer's step"
        return f"a step on {', '.join(shown) or 'a batch without tensors'}{first}{last}"
