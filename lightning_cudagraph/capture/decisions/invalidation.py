"""Invalidation: the decision that a graph is stale, by what the guards find, and its release.

Graphs that no longer match the step are captured again, or given up.
"""

from __future__ import annotations

from typing import Generic

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.decisions.short_lives import ShortLives
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.signatures.admission import Admission
from lightning_cudagraph.capture.steps import T
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.batch_signature import Signature

# A run that keeps invalidating its graphs goes on eagerly after this number of captures in a row with
# few replays each. A new graph in each epoch has no limit.
_MAX_SHORT_CAPTURES = 8


class Invalidation(Generic[T]):
    """Invalidation of the graphs of an engine.

    Attributes:
        given_up: the reason why all later steps are eager; None if graphs are still possible.
        dropped: the reason of the last invalidation; empty if it came from other processes.
        warm_ups: the number of times that warm-up has begun again.
    """

    def __init__(self, engine: EngineContext[T]) -> None:
        self._run, self._guards, self._graphs = engine.run, engine.guards, engine.graphs
        self._warm_ups, self._copies = engine.warm_ups, engine.copies
        self._backend = engine.run.backend
        self.admission = Admission(engine)
        self._short_captures = ShortLives(_MAX_SHORT_CAPTURES)
        self._after_pause = False
        self._is_after_pause = False  # the step at hand
        self.given_up: str | None = None
        self.dropped = ""
        self.warm_ups = 0

    def look_for_changes(self) -> None:
        """Compare the guards before a step, and invalidate graphs that no longer match it."""
        self._is_after_pause, self._after_pause = self._after_pause, False
        if change := self._change():
            self.drop(change)
        elif self._backend.host_value_moved():
            self.drop("a tensor in host memory, which the step uses as a number, changed")
        elif self._is_gradient_kept(self._is_after_pause):
            self._copy_out_from_now_on()

    def _change(self) -> str | None:
        """The first change that makes graphs stale; attributes with values that recur make none."""
        guards, reads = self._guards, self._graphs.reads
        while change := guards.changed():
            if (attribute := guards.add_to_signature()) is None:
                return change
            reads.add(attribute, getattr(change, "location", None))
            self._graphs.clear_plain()
        if guards.recurring.attributes:
            guards.recurring.begin_step()
        return None

    def drops_before_capture(self) -> bool:
        """Drop graphs that anything has made invalid, before the record is that of a new graph.

        Returns:
            True if there were any.
        """
        self._guards.suspect()
        change = self._guards.changed()
        if change:
            self.drop(change)
        return bool(change)

    def pause(self) -> None:
        """Note that user code may run before the next step."""
        self._after_pause = True

    def _is_gradient_kept(self, after_pause: bool) -> bool:
        if self._copies.are_given:
            return False
        return any(each.is_kept(after_pause) for each in self._graphs.all)

    def has_replaced_gradients(self, captured: CapturedStep[T]) -> bool:
        """True if user code has given parameters gradients of its own, which the graph does not have."""
        moved, is_in_place = captured.gradients.replaced()
        if not moved or is_in_place:
            return is_in_place
        if captured.gradients.has_other_layouts():
            return True
        if self._copies.are_copies(moved):
            return False
        if self._copies.has_overlaps(captured.gradients.adds):
            return True
        if self._copies.are_replaced:
            return False
        others = self._copies.of_user_code(moved)
        return bool(others) and not (self._copies.are_given and self._copies.are_made(others))

    def follow_gradients(self, captured: CapturedStep[T]) -> bool:
        """Capture again in place, where the gradients are; copy them if they were replaced before.

        Returns:
            False if no graph can follow: gradients that are copied overlap, or have other layouts.
        """
        moved, is_in_place = captured.gradients.replaced()
        if self._copies.are_replaced or (not is_in_place and captured.gradients.has_other_layouts()):
            return False
        others = self._copies.of_user_code(moved)
        if others and not is_in_place and self._copies.are_made(others):
            self._copy_out_from_now_on()
            return True
        self._copies.are_replaced = is_in_place
        self._copies.note(others)
        self._copies.are_given = self._copies.are_given or is_in_place
        change = Change("user code gives a parameter a gradient of its own")
        change.remedy = "Write into the gradient that is there: `p.grad.copy_(...)`."
        self.drop(change)
        return True

    def _copy_out_from_now_on(self) -> None:
        """Leave externally referenced gradients to user code, and copy gradients out from now on."""
        self._copies.are_given = True
        self.drop(
            "user code holds a reference to a gradient, or to a part of one, or gave one other memory"
        )

    def drop(self, reason: str, of_others: bool = False) -> None:
        """Invalidate the graphs; later steps are warmed up and captured again."""
        self.dropped = "" if of_others else reason
        had_graphs = bool(self._graphs)
        replays = sum(captured.n_replays for captured in self._graphs.all)
        self.forget()
        if not had_graphs:
            return
        short = self._short_captures
        short.ended(replays)
        self._run.counts.note_recapture(reason, self._run.wording, self._is_after_pause)
        if short.are_too_many:
            self.give_up(
                f"given up after {short.in_a_row} captures in a row that served fewer than"
                f" {short.few_replays} replays each; last, {reason}"
            )
            return
        self._run.announce(f"The captured step is invalid and is captured again: {reason}.")

    def forget(self) -> None:
        """Release the graphs; warm-up begins again."""
        self._graphs.release()
        self._guards.drop()
        self._warm_ups.forget()
        self.warm_ups += 1

    def unsupported(self, error: UnsupportedError, signature: Signature | None = None) -> str:
        """React to a step that cannot be captured.

        Once the run has replays, or others have graphs, its signature alone goes without.
        Otherwise this is the first capture of the run: narrow the scope, raise, or give up.

        Returns:
            Why this step is eager; what narrows the scope has been announced with its reason.
        """
        run = self._run
        run.wording.rephrase(error)
        is_later = signature is not None and run.graphs.has_others(signature)
        if not is_later and run.narrow(error):
            self.forget()
            return "a smaller part of the step is captured from then on"
        had_graphs = run.counts.replayed > 0
        if signature is not None and (is_later or had_graphs):
            self.admission.refuse(signature, error, "" if is_later else self.dropped)
            return error.reason
        if run.settings.raise_unsupported:
            raise error
        self.give_up(error.reason)
        return error.reason

    def give_up(self, reason: str) -> None:
        """Run all later steps eagerly, because of `reason`."""
        self.given_up = reason
        self.forget()
        self._run.on_give_up()
        if reason not in self._run.counts.eager:  # as that of another engine of the run
            self._run.announce(f"{self._run.wording.steps} goes on without a graph: {reason}")

    def leave(self) -> None:
        """Prepare for a replay by another engine: move gradients out of the memory pool."""
        if self._backend.in_graph_break:
            return  # at a graph break: no other engine replays before the end of the step
        self._graphs.clear_plain()
        if self._is_gradient_kept(after_pause=True):
            self._copy_out_from_now_on()
        for captured in self._graphs.all:
            captured.bring_out_gradients()
