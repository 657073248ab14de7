"""A step as the engine needs to know it, what can become of it, and the counts of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from lightning_cudagraph.capture.graph import Cut
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.writes import storage_id, whole

__all__ = ["MAKES_GRADIENTS", "Phase", "Place", "Step", "StepCounts"]

T = TypeVar("T")

_MAX_REASONS = 12
_TENSORS_SHOWN = 4


class Phase(Enum):
    """What happened to a batch."""

    EAGER = "eager"
    WARMING = "warming"
    CAPTURED = "captured"


@dataclass
class StepCounts:
    """What became of the batches of a run.

    Attributes:
        warmed_up: steps that ran eagerly to make ready for a capture.
        captures: captures that succeeded.
        replayed: steps that were replays.
        eager: steps that ran eagerly, by reason.
        capture_ms: host time of the captures together, in milliseconds.
        memory_bytes: device memory that the graphs have taken, in bytes.
        recaptures: why graphs were dropped, in order.
        variety: why nothing was captured, if batches look too different for it.
    """

    warmed_up: int = 0
    captures: int = 0
    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    capture_ms: float = 0.0
    memory_bytes: int = 0
    recaptures: list[str] = field(default_factory=list)
    variety: str = ""

    def note_eager(self, reason: str) -> None:
        """Count an eager step. Reasons that never repeat are counted together after a while."""
        if reason not in self.eager and len(self.eager) >= _MAX_REASONS:
            reason = "other reasons"
        self.eager[reason] += 1


class Place(NamedTuple):
    """Where a step stands in its window of batches whose gradients are accumulated.

    Attributes:
        drops: it drops gradients; the first one does.
        steps: the optimizer takes its step in it; in the last one it does, if it is captured too.
        syncs: gradients are averaged over several processes in it; in the last one they are.
    """

    drops: bool
    steps: bool
    syncs: bool = False


MAKES_GRADIENTS = Place(drops=True, steps=False)


def _nothing(outputs: object) -> None:
    pass


@dataclass
class Step(Generic[T]):
    """One training step, as the engine needs to know it.

    Attributes:
        batch: what it is done on.
        run: does it eagerly.
        record: does it in a capture, on the static batch it is given; returns the static outputs. Also
            given what it has to call where the host has a turn in every replay, and whether to put in
            timing events.
        rehearse: does the same without a capture, on the static batch, and without timing events and the
            turns of the host.
        between: a turn of the host in the middle of a replay, given the static outputs and its number.
        values: the tensors among the outputs that can be compared, by name.
        state: all tensors that it changes, by name, in the order of the step.
        transaction: entered around the captures; when left, all that the host did inside is undone.
        parameters: those whose gradients it drops and computes anew, and those to whose it only adds.
        place: in its window; what is captured of it depends on that.
        in_window: there are steps that add to the gradients that this one makes.
        kept: whether code of the user's runs between two steps, and can keep gradients.
        beside: what else a graph of it takes for granted, by the names that the user knows: steps that
            differ in it have graphs of their own, as those of other batch signatures have.
        learning: entered around steps of the warm-up.
        takes: the captures of it, by whether they have timing events.
        timed: a capture with timing events is replayed.
        upcoming: before such a replay, told its static outputs: their events are about to be set anew.
        copying: entered, before such a replay, around the copy of the batch.
        is_broken: whether a capture that failed has left behind what keeps steps from running.
        mend: puts that right, in all processes together.
        unlike_others: why it does not do what others in its place do, so that it has to run eagerly; or
            nothing.
        run_last: does it eagerly at the end of the warm-up; None for `run`.
    """

    batch: Any
    run: Callable[[], object]
    record: Callable[[Any, Cut, bool], T]
    rehearse: Callable[[Any], T]
    between: Callable[[T, int], None]
    values: Callable[[T], dict[str, Tensor]]
    state: Callable[[], dict[str, Tensor]]
    transaction: Callable[[], AbstractContextManager[None]]
    parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]]
    place: Place
    in_window: bool
    kept: Callable[[], bool]
    beside: Mapping[str, Hashable] = field(default_factory=dict)
    learning: Callable[[], AbstractContextManager[None]] = nullcontext
    takes: tuple[bool, ...] = (False,)
    timed: bool = False
    upcoming: Callable[[T], None] = _nothing
    copying: Callable[[], AbstractContextManager[None]] = nullcontext
    is_broken: Callable[[], bool] = lambda: False
    mend: Callable[[], None] = lambda: None
    unlike_others: str = ""
    run_last: Callable[[], object] | None = None

    def all_state(self, written: Iterable[Tensor]) -> dict[str, Tensor]:
        """All that it changes: by name what is known, and whatever else a capture saw it write."""
        state = {name: local(tensor) for name, tensor in self.state().items()}
        known = {storage_id(tensor) for tensor in state.values()}
        for tensor in written:
            if storage_id(tensor) not in known:
                known.add(storage_id(tensor))
                shape = "x".join(map(str, tensor.shape)) or "one number"
                state[f"a tensor that no module knows as its own ({len(state)}, {shape})"] = whole(
                    tensor
                )
        return state

    @property
    def description(self) -> str:
        """In words, what a graph of it is for."""
        tensors = [
            f"`{path}` {tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
            for path, leaf in flatten_batch(self.batch)
            if isinstance(leaf, Tensor)
        ]
        shown = tensors[:_TENSORS_SHOWN] + ["..."] * (len(tensors) > _TENSORS_SHOWN)
        first = "" if self.place.drops else ", adding to gradients"
        last = "" if self.place.steps else ", without the optimizer's step"
        return f"a step on {', '.join(shown) or 'a batch without tensors'}{first}{last}"
