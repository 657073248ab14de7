"""The plan for a batch: first that of this process, then one for all processes, by vote."""

from __future__ import annotations

from typing import Generic

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.decisions.invalidation import Invalidation
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.signatures.by_signature import NOT_YET, GraphsOfSignature
from lightning_cudagraph.capture.steps import Step, T
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement, Intent, of_ranks
from lightning_cudagraph.tensors.batch_signature import Signature

# Batches in a row for which a graph expects other gradients before the step, until it is invalidated.
_MAX_MISMATCHES = 8

_NO_COPY_FITS = (
    "user code gives parameters gradients that share memory, or have other strides or alignments than in"
    " the capture; give each its own: `p.grad = torch.empty_like(p).copy_(g)`"
)

# The intent, the reason if the step is eager, the signature, and the captured step if there is one.
Plan = tuple[Intent, str, Signature | None, CapturedStep[T] | None]


class Plans(Generic[T]):
    """The plans of an engine: what to do with each batch.

    Attributes:
        met: the lowest and highest vote on the present batch, if the processes have voted already.
    """

    def __init__(self, engine: EngineContext[T], invalidation: Invalidation[T]) -> None:
        self._run, self._guards, self._graphs = engine.run, engine.guards, engine.graphs
        self._warm_ups, self._copies = engine.warm_ups, engine.copies
        self._backend = engine.run.backend
        self._verifier = engine.run.verifier
        self._agreement = engine.run.agreement
        self._invalidation = invalidation
        self._admission = invalidation.admission
        self._is_settled = engine.is_settled
        self.met: tuple[Intent, Intent] | None = None

    def is_due(self, step: Step[T], captured: CapturedStep[T]) -> bool:
        """True if the next replay must be verified."""
        is_due = self._verifier.due(captured, captured.n_replays, captured.is_unproved(step.timed))
        return is_due or bool(self._guards.suspicions.of(captured))

    def of_plain_replay(self, step: Step[T], graphs: GraphsOfSignature[T]) -> CapturedStep[T] | None:
        """Return the captured step to replay; None if more than a replay is due."""
        self._invalidation.look_for_changes()
        step.is_compared = True
        captured = graphs.plain.get(step.accumulation)
        if captured is None or self.is_due(step, captured):
            return None
        if self._admission.is_varied and captured.gradients.stale(is_varied=True):
            return None
        if self._invalidation.has_replaced_gradients(captured):
            return None
        if self._agreement is not None:
            met = self.met = self._agreement.vote(Intent.REPLAY)
            if met[1] is not Intent.REPLAY:
                return None
            self.met = None
        return captured

    def of_this_process(self, step: Step[T]) -> Plan[T]:
        """Make the plan of this process alone."""
        if self._invalidation.given_up is not None:
            return Intent.GIVE_UP, self._invalidation.given_up, None, None
        if self._backend.in_graph_break:
            return Intent.EAGER, "in the middle of another step that is replayed", None, None
        if step.eager_reason:
            return Intent.EAGER, step.eager_reason, None, None
        if not step.is_compared and self.met is None:  # else by `of_plain_replay`
            self._invalidation.look_for_changes()
        try:
            if (signature := step.signature) is None:
                known = self._graphs.known(step)
                signature = self._graphs.signature_of(step) if known is None else known.signature
        except UnsupportedError as error:
            if self._run.settings.raise_unsupported:
                raise
            return Intent.EAGER, self._run.wording.of(error.reason), None, None
        step.signature = signature
        if reason := self._admission.refusal(signature, step.accumulation):
            return Intent.EAGER, reason, None, None
        captured = self._graphs.get(signature, step.accumulation)
        if captured is not None and not captured.has(self._graphs.instances(signature, step)):
            self._graphs.discard(signature)  # other steps are timed than before
            captured = None
        if captured is not None and (change := captured.gradients.stale(self._admission.is_varied)):
            if captured.n_mismatches < _MAX_MISMATCHES and self._admission.is_varied:
                # Micro-batches of other signatures may use other parameters than this one.
                captured.n_mismatches += 1
                return Intent.EAGER, change, None, None
            self._invalidation.drop(change)
            captured = None
        if captured is None and self._copies.has_overlaps(step.parameters()[1]):
            return Intent.EAGER, _NO_COPY_FITS, None, None
        if captured is not None and self._invalidation.has_replaced_gradients(captured):
            if not self._invalidation.follow_gradients(captured):
                return Intent.EAGER, _NO_COPY_FITS, None, None
            captured = None
        if self._copies.are_given:  # not before: it refers to the gradients, too
            self._copies.begin(step.parameters)
        if captured is not None:
            captured.n_mismatches = 0
        else:
            left = self._warm_ups.left(signature, step.accumulation)
            are_settled = left == 0 and self._run.replicas.is_settled() and self._is_settled()
            if not are_settled or self._graphs.maker(step) is NOT_YET:
                return Intent.WARM_UP, "", signature, None
            if self._invalidation.drops_before_capture():
                return Intent.WARM_UP, "", signature, None
            return Intent.CAPTURE, "", signature, None
        if self.is_due(step, captured):
            return Intent.VERIFY, "", signature, captured
        return Intent.REPLAY, "", signature, captured

    def of_all(self, plan: Plan[T], agreement: Agreement) -> Plan[T]:
        """Vote on the plan of this process, and return the one that all processes follow."""
        intent, reason, signature, captured = plan
        lowest, highest = self.met or agreement.vote(intent)
        self.met = None
        if lowest is highest:
            return plan
        invalidation = self._invalidation
        if highest is Intent.GIVE_UP:
            given_up = agreement.gather(invalidation.given_up)
            if invalidation.given_up is None:
                invalidation.give_up(of_ranks(given_up))
            return Intent.GIVE_UP, invalidation.given_up or "", None, None
        if highest <= Intent.VERIFY:
            return Intent.VERIFY, reason, signature, captured
        if highest >= Intent.CAPTURE and lowest <= Intent.VERIFY:
            # A graph is of use only if all processes have one.
            dropped = agreement.gather(None if self._graphs else invalidation.dropped)
            if any(why is not None for why in dropped):
                if self._graphs:
                    invalidation.drop(
                        of_ranks(dropped) or "another process captures again", of_others=True
                    )
                if captured is not None:
                    return Intent.WARM_UP, "", signature, None
            # Otherwise a process begins or captures one more signature: this step is eager in all.
        if intent is Intent.EAGER or intent is Intent.WARM_UP:
            return plan
        return Intent.EAGER, "not all processes could take this step as a graph", None, None
