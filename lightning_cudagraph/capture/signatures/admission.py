"""Admission of batch signatures to graphs: a capture has to be worth its price.

The first signature is captured after its warm-up. Where signatures earn their graphs (in training), each
later one runs eagerly until it has come eight times; then follow two watched warm-up steps, and its
capture. Elsewhere, each is captured after its warm-up while there is room. If there is none, a signature
must have come eight times since the least recently used graph was last replayed, which is then released.
So rare signatures stay eager, and signatures that all come as often do not take each other's place.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.signatures.sizes import MAX_COUNTED, Sizes
from lightning_cudagraph.capture.steps import AccumulationPhase, T
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.batch_signature import Signature

# Batches of a signature before its warm-up begins.
_BATCHES_TO_EARN = 8


@dataclass
class _Candidate:
    """A signature without a graph.

    Attributes:
        batches: the number of its batches but for replays of graphs that it has now.
        came: the numbers of its latest batches.
    """

    batches: int = 0
    came: deque[int] = field(default_factory=lambda: deque(maxlen=_BATCHES_TO_EARN))
    refused: str = ""


class Admission(Generic[T]):
    """Admission of the batch signatures of an engine."""

    def __init__(self, engine: EngineContext[T]) -> None:
        self._run, self._graphs, self._warm_ups = engine.run, engine.graphs, engine.warm_ups
        self._candidates: dict[Signature, _Candidate] = {}
        self._first: Signature | None = None  # that had a graph
        self._have_several = False
        self._sizes = Sizes()  # of forgotten candidates

    def refusal(self, signature: Signature, accumulation: AccumulationPhase) -> str:
        """Return the reason why a batch must run eagerly; empty if its signature has or gets a graph."""
        graphs = self._run.graphs
        if signature in self._graphs:
            return ""
        if self._graphs.have_one_signature and self._graphs:  # another one since this step began
            return self._another(signature)
        candidate = self._came(signature)
        before = [*candidate.came]
        graphs.batches += 1
        candidate.came.append(graphs.batches)
        if candidate.refused:
            return candidate.refused
        if self._has_earned(signature, accumulation, before):
            return ""
        self._run.counts.eager_by_signature += 1
        return self._another(signature) if self._run.earns_graphs else graphs.one_too_many(signature)

    def _has_earned(
        self, signature: Signature, accumulation: AccumulationPhase, came: list[int]
    ) -> bool:
        warm_ups, graphs = self._warm_ups, self._run.graphs
        has_come = len(came) == _BATCHES_TO_EARN
        if graphs.is_full:
            oldest = graphs.least_recent()
            is_wanted = oldest is not None and has_come and came[0] > oldest.last_use
            return is_wanted and not graphs.short_lives.are_too_many
        if not self._run.earns_graphs:
            return True
        if not self._graphs:
            return has_come or not self._are_many
        return has_come or (
            not warm_ups.is_new(signature) and warm_ups.left(signature, accumulation) == 0
        )

    def _came(self, signature: Signature) -> _Candidate:
        if (candidate := self._candidates.pop(signature, None)) is None:
            candidate = _Candidate()
        candidate.batches += 1
        self._candidates[signature] = candidate  # the latest last
        if len(self._candidates) > MAX_COUNTED:
            self._forget(next(iter(self._candidates)))
        return candidate

    def _forget(self, signature: Signature, replays: int = 0) -> None:
        """Forget a candidate, but not the sizes of its batches."""
        if (candidate := self._candidates.pop(signature, None)) is not None:
            self._sizes.add(signature, candidate.batches + replays)

    def _another(self, signature: Signature) -> str:
        wording, first = self._run.wording, self._first
        if first is None or first == signature:
            return f"a {wording.signature} that has not come often enough to get a graph"
        return wording.of(first.another(signature, wording.signature))

    @property
    def _are_many(self) -> bool:
        """True if many signatures have begun their warm-up, and none has come to its end."""
        return self._first is None and bool(self._run.counts.not_captured)

    def begin_warm_up(self, signature: Signature) -> None:
        is_later = self._run.earns_graphs and (len(self._graphs) > 0 or self._are_many)
        self._warm_ups.begin(signature, is_later)

    def make_room(self, signature: Signature) -> None:
        """Release the least recently used graphs, if a signature gets one and there is no room."""
        run, graphs = self._run, self._run.graphs
        if signature in self._graphs or not graphs.is_full:
            return
        if (oldest := graphs.least_recent()) is None:
            return
        replays = oldest.n_replays
        graphs.discard(oldest)
        self._forget(oldest.signature, replays)
        run.counts.evictions += 1
        short = graphs.short_lives
        short.ended(replays)
        if short.in_a_row == short.limit:
            run.announce(
                f"The graphs of {short.limit} {run.wording.signatures} in a row served fewer than"
                f" {short.few_replays} replays each: no graph is released for another one any more."
            )

    def captured(self, signature: Signature) -> None:
        self._first = self._first or signature
        self._have_several = self._have_several or len(self._graphs) > 1

    @property
    def is_varied(self) -> bool:
        """True if batches differ in signature."""
        return len(self._candidates) > 1

    @property
    def notes(self) -> list[str]:
        notes = []
        if self._run.earns_graphs and self._have_several:
            word = self._run.wording.signature
            notes.append(f"times are of batches of one {word}, the first that had a graph")
        if self._run.is_examined and self._first is not None:
            untried = Counter(self._another(each) for each in self._warm_ups.of_others(self._graphs))
            notes += [
                f"{steps} warm-up step(s) of {another}; no capture has examined it"
                for another, steps in untried.items()
                if another not in self._run.counts.eager
            ]
        return notes

    def refuse(self, signature: Signature, error: UnsupportedError, change: str = "") -> None:
        """Run all later batches of this signature eagerly; others keep their graphs."""
        self._graphs.discard(signature)
        wording, reason, first = self._run.wording, self._run.wording.of(error.reason), self._first
        word = wording.signature
        if first is not None and first != signature:
            word = first.word_for(signature, word)
        candidate = self._candidates.setdefault(signature, _Candidate())
        candidate.refused = f"a {word} without a graph: {reason}"
        since = f" since a change ({change})" if change else ""
        said = f"{reason} Remedy: {wording.of(error.remedy)}"
        self._run.announce(f"Batches of one {word} run eagerly{since}: {said}")

    def is_refused(self, signature: Signature) -> bool:
        """True if batches of this signature run eagerly, because a capture has failed."""
        return signature in self._candidates and bool(self._candidates[signature].refused)

    @property
    def remedy(self) -> str:
        """The part of batches that varies most, and what to do about it; empty if none does."""
        batches = {
            signature: candidate.batches + (0 if graphs is None else graphs.n_replays)
            for signature, candidate in self._candidates.items()
            for graphs in [self._graphs.of(signature)]
        }
        return self._sizes.remedy(batches, self._run.settings.max_graphs, self._graphs.reads)
