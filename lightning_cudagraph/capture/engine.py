"""The engine: takes each batch through warm-up, capture, replay or an eager step.

For each batch it makes a plan: first that of this process, then one for all processes, by vote.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Generic

from lightning_cudagraph.capture.captures import Captures
from lightning_cudagraph.capture.context import EngineContext, RunContext
from lightning_cudagraph.capture.decisions.invalidation import Invalidation
from lightning_cudagraph.capture.decisions.stream_choice import StreamChoice
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.signatures.by_signature import (
    NOT_YET,
    GraphsBySignature,
    GraphsOfSignature,
)
from lightning_cudagraph.capture.signatures.warm_ups import WarmUps
from lightning_cudagraph.capture.steps import Phase, Step, T
from lightning_cudagraph.capture.verification.verified_replay import replay_verified
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.device.sentry.inductor import without_its_graphs
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement, Intent, of_ranks
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.host_values import HostReads

_NOTHING = nullcontext()
# Batches in a row for which a graph expects other gradients before the step, until it is invalidated.
_MAX_MISMATCHES = 8

_NO_COPY_FITS = (
    "user code gives parameters gradients that share memory, or have other strides or alignments than in"
    " the capture; give each its own: `p.grad = torch.empty_like(p).copy_(g)`"
)

# The intent, the reason if the step is eager, the signature, and the captured step if there is one.
Plan = tuple[Intent, str, Signature | None, CapturedStep[T] | None]


class StepEngine(Generic[T]):
    """The way of batches through their phases.

    Warm-up goes on until `is_settled`: steps create no more state. Several engines may share `reads`,
    the reads of host values by their steps. With `have_one_signature`, all steps have the same one.

    Attributes:
        graphs: the captured steps, by batch signature and accumulation phase.
        admission: says which signatures get graphs.
        invalidation: releases graphs, because of a change, an error or another engine's replay.
    """

    def __init__(
        self,
        run: RunContext,
        guards: Guards,
        is_settled: Callable[[], bool] = lambda: True,
        reads: HostReads | None = None,
        have_one_signature: bool = False,
    ) -> None:
        self.counts = run.counts
        self._run = run
        self._guards = guards
        # Read at every replay: saves an attribute access.
        self._backend, self._checks = run.backend, run.backend.checks
        self._carried = run.carried
        self.verifier = run.verifier
        self._agreement = run.agreement
        self._is_settled = is_settled
        # The lowest and highest vote on the present batch, if the processes have voted already.
        self._met: tuple[Intent, Intent] | None = None
        self._patches = ExitStack()
        self._has_begun = False
        self._without_graphs: list[str] = []
        graphs: GraphsBySignature[T] = GraphsBySignature(
            run.backend.device, run.graphs, reads, have_one_signature
        )
        warm_ups = WarmUps(run.settings.warmup_steps)
        together = run.agreement if run.tries_streams_together else None
        streams = StreamChoice(run.backend, run.settings.streams, together)
        engine = self._context = EngineContext(run, guards, graphs, warm_ups, streams)
        self.graphs, self._warm_ups, self._copies = graphs, warm_ups, engine.copies
        guards.recurring.attributes = graphs.reads.attributes
        self._streams, self._compiled = streams, engine.compiled
        self.invalidation = invalidation = Invalidation(engine)
        self.admission = invalidation.admission
        self._captures = Captures(engine, invalidation)

    def replay(self, step: Step[T], graphs: GraphsOfSignature[T] | None = None) -> T | None:
        """Replay a step, if nothing else is due for its batch.

        Args:
            graphs: those of the batch, if they are known.

        Returns:
            The static outputs. Or None: nothing has run, and the caller must call `step`.
        """
        if step.eager_reason or self._backend.in_graph_break:
            return None
        if graphs is None or not graphs.signature.agrees(step.numbers):
            graphs = self.graphs.known(step)
        if graphs is None or step.accumulation not in graphs.plain or not self._carried.enter():
            return None
        try:
            captured = self._plain_replay(step, graphs)
            if captured is None:
                return None
            self.graphs.use(graphs)
            step.refresh(captured.next_outputs(step.timed))
            return self._replay(step, captured)
        finally:
            self._carried.take_out()

    def _plain_replay(self, step: Step[T], graphs: GraphsOfSignature[T]) -> CapturedStep[T] | None:
        """Return the captured step to replay; None if more than a replay is due."""
        self.invalidation.look_for_changes()
        step.is_compared = True
        captured = graphs.plain.get(step.accumulation)
        if captured is None or self._is_due(step, captured):
            return None
        if self.admission.is_varied and captured.gradients.stale(is_varied=True):
            return None
        if self.invalidation.has_replaced_gradients(captured):
            return None
        if self._agreement is not None:
            met = self._met = self._agreement.vote(Intent.REPLAY)
            if met[1] is not Intent.REPLAY:
                return None
            self._met = None
        return captured

    def _is_due(self, step: Step[T], captured: CapturedStep[T]) -> bool:
        """True if the next replay must be verified."""
        is_due = self.verifier.due(captured, captured.n_replays, captured.is_unproved(step.timed))
        return is_due or bool(self._guards.suspicions.of(captured))

    def step(self, step: Step[T], graphs: GraphsOfSignature[T] | None = None) -> tuple[Phase, T | None]:
        """Run one step in the phase of its batch.

        Args:
            graphs: those of the batch, if they are known.

        Returns:
            The phase, and the static outputs if the step was a replay.

        Raises:
            UnsupportedError: if the step cannot be captured and `on_unsupported="raise"`. Nothing of
                the step has run.
        """
        if not self._has_begun:
            self._has_begun = True
            self._patches.enter_context(without_its_graphs(self._note))
        try:
            # If the processes have voted on this batch, another replay of it has come to nothing.
            if self._met is None and (outputs := self.replay(step, graphs)) is not None:
                return Phase.CAPTURED, outputs
            if mismatch := self._carried.put_in(self._run.graphs.is_any):
                step.eager_reason = step.eager_reason or mismatch
            return self._step(step)
        except UnsupportedError as error:
            self._run.wording.rephrase(error)
            raise
        finally:
            self._carried.take_out()
            self._copies.handed = None

    def _step(self, step: Step[T]) -> tuple[Phase, T | None]:
        plan = self._own_plan(step)
        if self._agreement is not None:
            plan = self._common_plan(plan, self._agreement)
        intent, reason, signature, captured = plan
        if intent is Intent.EAGER or intent is Intent.GIVE_UP:
            return self._eager(step, reason)
        assert signature is not None
        if intent is Intent.WARM_UP:
            return self._warm_up(step, signature)
        if intent is Intent.CAPTURE:
            self.admission.make_room(signature)
            step.refresh(None)
            try:
                captured, reason, only_in_capture = self._captures.attempt(step, signature)
            except BaseException:
                self._copies.put_back()
                raise
            if captured is None and not reason:
                self._copies.put_back()
                step.signature = self.graphs.signature_of(step)
                return self._warm_up(step, step.signature)
            if captured is None:
                # Outside the handler: the error and the tensors in its frames are free by now. If user
                # code raised it, the eager step raises it again, with the usual effects.
                done = self._eager(step, reason)
                if only_in_capture is not None:
                    self.invalidation.unsupported(only_in_capture, signature)
                return done
            self.graphs.add(signature, step, captured)
            self.admission.captured(signature)
            if self._is_due(step, captured):
                intent = Intent.VERIFY
        graphs = self.graphs.of(signature)
        assert captured is not None
        assert graphs is not None
        self.graphs.use(graphs)
        step.refresh(captured.next_outputs(step.timed))
        if intent is Intent.VERIFY:
            launch = partial(self._launch, step, captured, None)
            reason, outputs = replay_verified(self._context, self.invalidation, step, captured, launch)
            if reason:
                return self._eager(step, reason)
            if outputs is not None:
                return Phase.CAPTURED, self._done(captured, outputs)
        outputs = self._replay(step, captured)
        gradients = captured.gradients
        is_plain = not (gradients.absent or gradients.only_reads or self._copies.are_given)
        if is_plain and self._run.around_replays is nullcontext and self.graphs.latest is graphs:
            graphs.plain[step.accumulation] = captured
        return Phase.CAPTURED, outputs

    def _own_plan(self, step: Step[T]) -> Plan[T]:
        """Make the plan of this process alone."""
        if self.invalidation.given_up is not None:
            return Intent.GIVE_UP, self.invalidation.given_up, None, None
        if self._backend.in_graph_break:
            return Intent.EAGER, "in the middle of another step that is replayed", None, None
        if step.eager_reason:
            return Intent.EAGER, step.eager_reason, None, None
        if not step.is_compared and self._met is None:  # else by `_plain_replay`
            self.invalidation.look_for_changes()
        try:
            if (signature := step.signature) is None:
                known = self.graphs.known(step)
                signature = self.graphs.signature_of(step) if known is None else known.signature
        except UnsupportedError as error:
            if self._run.settings.raise_unsupported:
                raise
            return Intent.EAGER, self._run.wording.of(error.reason), None, None
        step.signature = signature
        if reason := self.admission.refusal(signature, step.accumulation):
            return Intent.EAGER, reason, None, None
        captured = self.graphs.get(signature, step.accumulation)
        if captured is not None and not captured.has(self.graphs.instances(signature, step)):
            self.graphs.discard(signature)  # other steps are timed than before
            captured = None
        if captured is not None and (change := captured.gradients.stale(self.admission.is_varied)):
            if captured.n_mismatches < _MAX_MISMATCHES and self.admission.is_varied:
                # Micro-batches of other signatures may use other parameters than this one.
                captured.n_mismatches += 1
                return Intent.EAGER, change, None, None
            self.invalidation.drop(change)
            captured = None
        if captured is None and self._copies.has_overlaps(step.parameters()[1]):
            return Intent.EAGER, _NO_COPY_FITS, None, None
        if captured is not None and self.invalidation.has_replaced_gradients(captured):
            if not self.invalidation.follow_gradients(captured):
                return Intent.EAGER, _NO_COPY_FITS, None, None
            captured = None
        if self._copies.are_given:  # not before: it refers to the gradients, too
            self._copies.begin(step.parameters)
        if captured is not None:
            captured.n_mismatches = 0
        else:
            left = self._warm_ups.left(signature, step.accumulation)
            are_settled = left == 0 and self._run.replicas.is_settled() and self._is_settled()
            if not are_settled or self.graphs.maker(step) is NOT_YET:
                return Intent.WARM_UP, "", signature, None
            if self.invalidation.drops_before_capture():
                return Intent.WARM_UP, "", signature, None
            return Intent.CAPTURE, "", signature, None
        if self._is_due(step, captured):
            return Intent.VERIFY, "", signature, captured
        return Intent.REPLAY, "", signature, captured

    def _common_plan(self, plan: Plan[T], agreement: Agreement) -> Plan[T]:
        """Vote on the plan of this process, and return the one that all processes follow."""
        intent, reason, signature, captured = plan
        lowest, highest = self._met or agreement.vote(intent)
        self._met = None
        if lowest is highest:
            return plan
        invalidation = self.invalidation
        if highest is Intent.GIVE_UP:
            given_up = agreement.gather(invalidation.given_up)
            if invalidation.given_up is None:
                invalidation.give_up(of_ranks(given_up))
            return Intent.GIVE_UP, invalidation.given_up or "", None, None
        if highest <= Intent.VERIFY:
            return Intent.VERIFY, reason, signature, captured
        if highest >= Intent.CAPTURE and lowest <= Intent.VERIFY:
            # A graph is of use only if all processes have one.
            dropped = agreement.gather(None if self.graphs else invalidation.dropped)
            if any(why is not None for why in dropped):
                if self.graphs:
                    invalidation.drop(
                        of_ranks(dropped) or "another process captures again", of_others=True
                    )
                if captured is not None:
                    return Intent.WARM_UP, "", signature, None
            # Otherwise a process begins or captures one more signature: this step is eager in all.
        if intent is Intent.EAGER or intent is Intent.WARM_UP:
            return plan
        return Intent.EAGER, "not all processes could take this step as a graph", None, None

    def _replay(self, step: Step[T], captured: CapturedStep[T]) -> T:
        """Replay a step, and call the hooks at its graph breaks."""
        between = self._marked(step.between) if captured.has_breaks else None
        return self._done(captured, self._launch(step, captured, between, step.timed))

    def _launch(
        self,
        step: Step[T],
        captured: CapturedStep[T],
        between: Callable[[T, int], None] | None,
        timed: bool,
    ) -> T:
        """Copy the batch into the static inputs, unless it is there already, and launch the graph."""
        static, batch = captured.static, step.batch
        self._checks.step = self.counts.replayed, step.numbers
        if timed:
            step.before_timed(captured.next_outputs(True))
        if batch is not static.batch:
            with step.copying() if timed else _NOTHING:
                if step.leaves is None:
                    static.copy_from(batch)
                else:
                    static.fill(*step.leaves)
        if self._run.around_replays is nullcontext:
            return captured.replay(between, self._copies.handed, timed)
        with self._run.around_replays():
            return captured.replay(between, self._copies.handed, timed)

    def _marked(self, between: Callable[[T, int], None]) -> Callable[[T, int], None]:
        """Wrap `between`, so that the backend knows that a graph break is under way."""

        def at_break(outputs: T, index: int) -> None:
            self._backend.in_graph_break = True
            try:
                between(outputs, index)
            finally:
                self._backend.in_graph_break = False

        return at_break

    def _done(self, captured: CapturedStep[T], outputs: T) -> T:
        if self._copies.handed is not None:
            captured.copy_out(self._copies.handed)
        captured.n_replays += 1
        self.counts.replayed += 1
        self._carried.copy_out()
        return outputs

    def vote_on_plain_step(self) -> None:
        """Take part in the vote of a warm-up step that this engine does not run: it is not watched."""
        if self._agreement is not None:
            self._common_plan((Intent.WARM_UP, "", None, None), self._agreement)

    @property
    def given_up(self) -> bool:
        """True if all later steps are eager."""
        return self.invalidation.given_up is not None

    @property
    def notes(self) -> list[str]:
        several = self.admission.notes
        values = [note] if (note := self.graphs.reads.note) else []
        others = [*self._guards.notes, *self._streams.notes, *self._compiled.notes]
        return [*several, *values, *others, *self._without_graphs]

    def pause(self) -> None:
        """Recheck all guards before the next replay: user code may have run since the last step."""
        self._guards.suspect()
        self.invalidation.pause()
        self.verifier.pause()

    def refuses_alone(self, signature: Signature, error: UnsupportedError) -> bool:
        """Run steps of a signature eagerly, unless the error may be that of all: then return False."""
        if not (self.graphs.reads.is_any or self._run.graphs.has_others(signature)):
            return False
        self.admission.refuse(signature, error)
        return True

    def _note(self, text: str) -> None:
        """Announce a sentence, and keep it for the report."""
        self._without_graphs.append(text)
        self._run.announce(text)

    def close(self) -> None:
        try:
            self.invalidation.forget()
        finally:
            self._patches.close()

    def _eager(self, step: Step[T], reason: str) -> tuple[Phase, None]:
        self.counts.note_eager(reason)
        self.graphs.clear_plain()
        self._carried.take_out()
        self._copies.put_back()
        with self.stream_of_eager_steps(), self._noting_gradients(step):
            step.run()
        self._run.replicas.ran()
        self._captures.eager_step_ended()
        return Phase.EAGER, None

    def stream_of_eager_steps(self) -> AbstractContextManager[None]:
        """Context of an eager step: the side stream, or the default one.

        Autograd nodes keep the stream on which they were made, and a node of the default stream would
        break a later capture. Where there will be none, other threads, which work on the default
        stream, may take what the step hands to them.
        """
        if self.given_up and self._guards.effects.hands_over:
            return nullcontext()
        return self._backend.on_side_stream()

    def _noting_gradients(self, step: Step[T]) -> AbstractContextManager[None]:
        """Note the gradients that an eager step makes, if later steps may add to them."""
        if step.are_added_to or any(captured.gradients.adds for captured in self.graphs.all):
            return self._copies.noting_made(step.parameters)
        return nullcontext()

    def _warm_up(self, step: Step[T], signature: Signature) -> tuple[Phase, None]:
        if first := self._warm_ups.is_new(signature):
            if not self.counts.not_captured and (why := self._run.graphs.begin(signature)):
                self.counts.not_captured = why
                self._run.announce(f"There is no graph yet: {why}.")
            self.admission.begin_warm_up(signature)
        self._guards.watch()
        self._guards.effects.kind = signature, step.accumulation
        self._carried.take_out()
        self._carried.watch()
        with ExitStack() as stack:
            stack.enter_context(self._backend.on_side_stream())
            if first:
                stack.enter_context(self._backend.generators.learning())
            stack.enter_context(step.learning())
            stack.enter_context(self._compiled.noticed())
            stack.enter_context(self._noting_gradients(step))
            step.run()
        # A step that raises does not count.
        self._run.replicas.ran()
        self._warm_ups.done(signature, step.accumulation)
        self.counts.warmed_up += 1
        return Phase.WARMING, None
