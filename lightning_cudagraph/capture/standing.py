"""Whether the graphs of a run still hold; if they do not, new ones come, or none any more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from lightning_cudagraph.capture.by_signature import GraphsBySignature
from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.capture.warm_ups import WarmUps
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.holds import GradientCopies

__all__ = ["StandingGraphs"]

T = TypeVar("T")

# A run that goes on changing under its graphs is left to run eagerly: after so many captures in a row
# that each served fewer than so many replays. A graph for each epoch is fine for ever.
_MAX_SHORT_CAPTURES = 8
_FEW_REPLAYS = 32


class StandingGraphs(Generic[T]):
    """The graphs of a run, as long as they hold.

    Args:
        graphs: the graphs.
        backend: where they are replayed.
        guards: what they bake in.
        warm_ups: what was learned before they were captured; that begins anew with them.
        copies: of their gradients, from when somebody keeps one.
        counts: what became of the steps.
        announce: told, in a sentence, what the user should know once.
        narrow: told why a step could not be captured; whether less of it will be captured from now on.
        raise_unsupported: raise when a step cannot be captured, instead of going on eagerly.
        on_give_up: called when the run goes on without graphs.
        what: what its steps are, as the beginning of a sentence.

    Attributes:
        given_up: why the run goes on without graphs; None as long as it does not.
        dropped: why graphs were let go of, the last time; nothing if other processes know it.
    """

    def __init__(
        self,
        graphs: GraphsBySignature[T],
        backend: Backend,
        guards: Guards,
        warm_ups: WarmUps,
        copies: GradientCopies,
        counts: StepCounts,
        announce: Callable[[str], None],
        narrow: Callable[[UnsupportedError], bool],
        raise_unsupported: bool,
        on_give_up: Callable[[], None],
        what: str,
    ) -> None:
        self._graphs = graphs
        self._backend = backend
        self._guards = guards
        self._warm_ups = warm_ups
        self._copies = copies
        self._counts = counts
        self._announce = announce
        self._narrow = narrow
        self._raise_unsupported = raise_unsupported
        self._on_give_up = on_give_up
        self._what = what
        self._short_captures = 0  # in a row
        self.given_up: str | None = None
        self.dropped = ""

    def look_for_changes(self) -> None:
        """Before a step: let go of graphs that are not the step any more."""
        if change := self._guards.changed():
            self.drop(change)
        elif self._backend.host_value_moved():
            self.drop("a tensor in host memory, which the step uses as a number, changed")
        elif not self._copies.are_given and any(each.is_kept() for each in self._graphs.all()):
            self._hand_out_from_now_on()

    @property
    def doubt(self) -> str:
        """A change of which only a check can say whether the step depends on it; empty if none."""
        return self._guards.doubt

    def effects_undone(self) -> AbstractContextManager[None]:
        """Around a step that is done once more, for a check: undo what it changes on the host."""
        return self._guards.effects.undone()

    def clear_doubt(self) -> None:
        """A check has found no other numbers: the graph holds."""
        self._guards.clear_doubt()

    def _hand_out_from_now_on(self) -> None:
        """Somebody keeps a gradient: leave him what the graphs have made, and give out copies."""
        self._copies.are_given = True
        self.drop("code outside of the step keeps a gradient, or a part of one")

    def drop(self, reason: str, of_others: bool = False) -> None:
        """Let go of the graphs; what comes is warmed up and captured anew.

        Args:
            reason: why.
            of_others: that is how other processes have it, and not known from here.
        """
        self.dropped = "" if of_others else reason
        had_graphs = bool(self._graphs)
        replays = sum(captured.replays for captured in self._graphs.all())
        self.forget()
        if not had_graphs:
            return
        self._short_captures = self._short_captures + 1 if replays < _FEW_REPLAYS else 0
        self._counts.recaptures.append(reason)
        if self._short_captures >= _MAX_SHORT_CAPTURES:
            self.give_up(
                f"given up after {self._short_captures} captures in a row that served fewer than"
                f" {_FEW_REPLAYS} replays each; last, {reason}"
            )
            return
        self._announce(f"The captured step is stale and is captured anew: {reason}.")

    def forget(self) -> None:
        """Let go of the graphs and of what was learned in warm-up; it begins anew."""
        self._graphs.release()
        self._guards.drop()
        self._warm_ups.forget()

    def unsupported(self, error: UnsupportedError) -> None:
        """Something showed that no step of this run can be captured: narrow, raise, or give up."""
        if self._narrow(error):
            self.forget()
            return
        if self._raise_unsupported:
            raise error
        self.give_up(error.reason)

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on, because `reason`."""
        self.given_up = reason
        self.forget()
        self._on_give_up()
        self._announce(f"{self._what} goes on without a graph: {reason}")

    def leave(self) -> None:
        """Another engine's graphs in the same pool come now: bring gradients where none writes."""
        if self._backend.in_turn:
            return  # none comes before the end of the step
        self._graphs.plain.clear()
        if not self._copies.are_given and any(each.is_kept() for each in self._graphs.all()):
            self._hand_out_from_now_on()
        for captured in self._graphs.all():
            captured.bring_out_gradients()
