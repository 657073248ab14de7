"""What is done with a batch: what one process would do by itself, and what all of them do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_cudagraph.capture.by_signature import NOT_YET, GraphsBySignature
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.standing import StandingGraphs
from lightning_cudagraph.capture.steps import Step
from lightning_cudagraph.capture.warm_ups import WarmUps
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement, Intent, of_ranks
from lightning_cudagraph.tensors.batch import Signature
from lightning_cudagraph.tensors.holds import GradientCopies

__all__ = ["Plan", "Plans"]

T = TypeVar("T")

# What to do with a batch; why, if it runs eagerly; its signature; and its graph, if it has one.
Plan = tuple[Intent, str, Signature | None, CapturedStep[T] | None]


class Plans(Generic[T]):
    """Says of each batch what is done with it.

    Args:
        backend: where steps run.
        graphs: those that there are.
        standing: whether they still hold.
        warm_ups: how much of them is left.
        is_settled: whether all state that steps make has been made; warm-up goes on until then.
        verifier: says which replays are checked.
        copies: of the gradients of graphs.
        raise_unsupported: raise when a batch fits no graph, instead of going on eagerly.

    Attributes:
        met: what processes have said of the batch at hand, if they have.
    """

    def __init__(
        self,
        backend: Backend,
        graphs: GraphsBySignature[T],
        standing: StandingGraphs[T],
        warm_ups: WarmUps,
        is_settled: Callable[[], bool],
        verifier: Verifier,
        copies: GradientCopies,
        raise_unsupported: bool,
    ) -> None:
        self._backend = backend
        self._graphs = graphs
        self._standing = standing
        self._warm_ups = warm_ups
        self._is_settled = is_settled
        self._verifier = verifier
        self._copies = copies
        self._raise_unsupported = raise_unsupported
        self.met: tuple[Intent, Intent] | None = None

    def is_due(self, step: Step[T], captured: CapturedStep[T]) -> bool:
        """Whether the next replay is to be checked."""
        is_due = self._verifier.due(captured, captured.replays, captured.is_unproved(step.timed))
        return is_due or bool(self._standing.doubt)

    def of_this_process(self, step: Step[T], signature: Signature | None) -> Plan[T]:
        """What this process would do with the batch of a step, by itself.

        Args:
            step: the step.
            signature: that of the batch, if it is known already.

        Raises:
            UnsupportedError: if the batch fits no graph, and that was to raise.
        """
        if self._standing.given_up is not None:
            return Intent.GIVE_UP, self._standing.given_up, None, None
        if self._backend.in_turn:
            return Intent.EAGER, "in the middle of another step that is replayed", None, None
        if step.unlike_others:
            return Intent.EAGER, step.unlike_others, None, None
        if self.met is None:  # else they were looked for already, and the other processes were told
            self._standing.look_for_changes()
        try:
            signature = signature or self._graphs.known_signature(step)
            signature = signature or Signature(step.batch, self._backend.device, step.beside)
        except UnsupportedError as error:
            if self._raise_unsupported:
                raise
            return Intent.EAGER, error.reason, None, None
        if reason := self._graphs.one_too_many(signature):
            return Intent.EAGER, reason, None, None
        if self._copies.are_given:
            self._copies.begin(step.parameters)
        captured = self._graphs.get(signature, step.place)
        if captured is not None and (change := captured.stale()):
            self._standing.drop(change)
            captured = None
        if captured is None:
            left = self._warm_ups.left(signature, step.place)
            if left > 0 or not self._is_settled() or self._graphs.maker(step, signature) is NOT_YET:
                return Intent.WARM_UP, "", signature, None
            return Intent.CAPTURE, "", signature, None
        if self.is_due(step, captured):
            return Intent.VERIFY, "", signature, captured
        return Intent.REPLAY, "", signature, captured

    def of_all(self, plan: Plan[T], agreement: Agreement) -> Plan[T]:
        """What this process does with the batch, since the others have plans of theirs.

        Args:
            plan: what it would do by itself.
            agreement: with the other processes of the run.
        """
        intent, reason, signature, captured = plan
        lowest, highest = self.met or agreement.vote(intent)
        self.met = None
        if lowest is highest:
            return plan
        standing = self._standing
        if highest is Intent.GIVE_UP:
            given_up = agreement.gather(standing.given_up)
            if standing.given_up is None:
                standing.give_up(of_ranks(given_up))
            return Intent.GIVE_UP, standing.given_up or "", None, None
        if highest <= Intent.VERIFY:
            return Intent.VERIFY, reason, signature, captured
        if highest >= Intent.CAPTURE and lowest <= Intent.VERIFY:
            # A graph that not all processes have is none.
            dropped = agreement.gather(None if self._graphs else standing.dropped)
            if self._graphs:
                standing.drop(of_ranks(dropped) or "another process captures anew", of_others=True)
            if captured is not None:
                return Intent.WARM_UP, "", signature, None
        if intent is Intent.EAGER or intent is Intent.WARM_UP:
            return plan
        return Intent.EAGER, "not all processes could take this step as a graph", None, None
