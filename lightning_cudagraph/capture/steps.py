"""A step as the engine sees it: its functions, its accumulation phase, and the counts of all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from lightning_cudagraph.capture.graph import Record
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.writes import storage_id, whole

T = TypeVar("T")

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
        eager: eager steps by reason, without warm-up.
        eager_by_signature: batches that were to run eagerly: their signature had not earned a graph.
        recaptures: the reasons of invalidations, in order.
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

    def note_eager(self, reason: str) -> None:
        """Count an eager step. Beyond a dozen reasons, new ones are counted together."""
        if reason not in self.eager and len(self.eager) >= _MAX_REASONS:
            reason = "other reasons"
        self.eager[reason] += 1


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


@dataclass
class Replay(Generic[T]):
    """The part of a step that a replay needs.

    Attributes:
        upcoming: called before a timed replay with its static outputs, because the replay overwrites
            their events.
        copying: entered around the copy of the batch before a timed replay.
        between: called at each graph break with the static outputs and the index of the break; None
            without breaks.
        specialization: values outside the batch that are part of the signature, by the names
            that the user knows.
        beside: integers beside the batch, by such names; what captured steps read of them is part of the
            signature.
    """

    batch: Any
    accumulation: AccumulationPhase
    timed: bool = False
    upcoming: Callable[[T], None] = lambda outputs: None
    copying: Callable[[], AbstractContextManager[None]] = nullcontext
    between: Callable[[T, int], None] | None = None
    specialization: Mapping[str, Hashable] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Step(Replay[T]):
    """A step, for every phase of its batch.

    Attributes:
        run: runs the step eagerly.
        record: runs the step in a capture and returns the static outputs. Given the static batch, the
            function to call at graph breaks, and True to record timing events.
        rehearse: runs the same code eagerly on the static batch, without timing events and graph breaks.
        values: the outputs to compare in a verification, by name.
        state: all tensors that the step changes, by name, in the order of the step.
        transaction: entered around a capture or rehearsal; undoes its effects on the host.
        parameters: the parameters with gradients that the step drops and makes, and those with gradients
            that it only adds to.
        in_window: later steps add to the gradients that this one makes.
        kept: returns True if user code runs between steps, and can hold references to gradients.
        learning: entered around warm-up steps.
        timed_instances: for each capture instance, True if it has timing events.
        is_broken: returns True if a failed capture has left state with which no later step can run.
        repair: repairs that state, in all processes together.
        eager_reason: why this step must run eagerly, though others of its phase are replayed;
            empty if it does not.
        run_last: runs the last warm-up step of the first signature eagerly; None for `run`.
        signature: the signature of the batch; set by the engine before it records or rehearses.
    """

    run: Callable[[], object]
    record: Record[T]
    rehearse: Callable[[Any], T]
    values: Callable[[T], dict[str, Tensor]]
    state: Callable[[], dict[str, Tensor]]
    transaction: Callable[[], AbstractContextManager[None]]
    parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]] = lambda: ([], [])
    in_window: bool = False
    kept: Callable[[], bool] = lambda: False
    learning: Callable[[], AbstractContextManager[None]] = nullcontext
    timed_instances: tuple[bool, ...] = (False,)
    is_broken: Callable[[], bool] = lambda: False
    repair: Callable[[], None] = lambda: None
    eager_reason: str = ""
    run_last: Callable[[], object] | None = None
    signature: Signature | None = None

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
