"""The life of a batch: warm up, capture, replay, or run eagerly and say why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from lightning_cudagraph.capture.by_signature import GraphsBySignature
from lightning_cudagraph.capture.captures import Captures
from lightning_cudagraph.capture.plans import Plans
from lightning_cudagraph.capture.replays import Replays
from lightning_cudagraph.capture.standing import StandingGraphs
from lightning_cudagraph.capture.steps import Phase, Place, Step, StepCounts
from lightning_cudagraph.capture.stream_choice import StreamChoice, Streams
from lightning_cudagraph.capture.warm_ups import WarmUps
from lightning_cudagraph.checks.carried import CarriedTensors
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.device.sentry.inductor import without_its_graphs
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement, Intent
from lightning_cudagraph.tensors.batch import Signature
from lightning_cudagraph.tensors.holds import GradientCopies
from lightning_cudagraph.tensors.static import StaticBatch

__all__ = ["StepEngine"]

T = TypeVar("T")


def _only_in_the_capture(raised: str) -> UnsupportedError:
    return UnsupportedError(
        f"The training step raised {raised}. Eagerly, from the same state, it did not.",
        "Find out what in the step does not work in a capture; the message may say.",
    )


class StepEngine(Generic[T]):
    """Takes the batches of a run through their phases.

    Args:
        backend: where steps run.
        guards: what a graph bakes in.
        carried: attributes whose tensors are others in every step.
        verifier: checks replays against eager steps.
        is_settled: whether all state that steps make has been made; warm-up goes on until then.
        warmup_steps: ordinary training steps on the side stream before a capture.
        raise_unsupported: raise when a step cannot be captured, instead of going on eagerly.
        announce: told, in a sentence, what the user should know once.
        narrow: told why a step could not be captured; whether less of it will be captured from now on.
        on_give_up: called when the run goes on without graphs.
        around_replays: what is entered around each replay.
        on_capture: told of each capture that succeeded: of what, and how many milliseconds it took.
        what: what its steps are, as the beginning of a sentence.
        max_signatures: batches of how many signatures have graphs. Those of others run eagerly.
        agreement: with the other processes of the run, or None if there are none.
        streams: on how many streams the steps are captured, or ``"auto"`` for the fastest of a few.
        counts: what became of steps before, to go on from; None for nothing.

    Attributes:
        counts: what became of the steps so far.
    """

    def __init__(
        self,
        backend: Backend,
        guards: Guards,
        carried: CarriedTensors,
        verifier: Verifier,
        is_settled: Callable[[], bool],
        warmup_steps: int,
        raise_unsupported: bool,
        announce: Callable[[str], None],
        narrow: Callable[[UnsupportedError], bool],
        on_give_up: Callable[[], None],
        around_replays: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_capture: Callable[[Step[T], float], None] | None = None,
        what: str = "Training",
        max_signatures: int = 1,
        agreement: Agreement | None = None,
        streams: Streams = 1,
        counts: StepCounts | None = None,
    ) -> None:
        self.counts = counts = StepCounts() if counts is None else counts
        self._backend = backend
        self._guards = guards
        self._carried = carried
        self._verifier = verifier
        self._announce = announce
        self._agreement = agreement
        self._streams = StreamChoice(backend, streams)
        self._compiled = CompiledCode()
        self._patches = ExitStack()
        self._has_begun = False
        self._without_graphs: list[str] = []
        self._warm_ups = warm_ups = WarmUps(warmup_steps)
        self._copies = copies = GradientCopies()
        graphs: GraphsBySignature[T] = GraphsBySignature(backend.device.type, max_signatures)
        self._graphs = graphs
        self._standing = standing = StandingGraphs(
            graphs,
            backend,
            guards,
            warm_ups,
            copies,
            counts,
            announce,
            narrow,
            raise_unsupported,
            on_give_up,
            what,
        )
        self._plans = Plans(
            backend,
            graphs,
            standing,
            warm_ups,
            is_settled,
            verifier,
            copies,
            raise_unsupported,
        )
        self._captures = Captures(
            backend,
            guards,
            carried,
            graphs,
            standing,
            copies,
            self._streams,
            self._compiled,
            counts,
            on_capture,
            agreement,
        )
        self._replays = Replays(
            backend,
            graphs,
            standing,
            carried,
            verifier,
            copies,
            counts,
            around_replays,
            agreement,
        )

    def again(
        self,
        batch: Any,
        place: Place,
        refresh: Callable[[], None],
        timed: bool,
        upcoming: Callable[[T], None],
    ) -> T | None:
        """Do one more step of a kind that was a replay before, if a replay is all there is to do.

        Args:
            batch: what it is done on.
            place: which kind of step it is.
            refresh: called before the replay, as in `step`.
            timed: as in `Step`.
            upcoming: as in `Step`.

        Returns:
            The static outputs; or None, and nothing of the step has happened: `step` will do it.
        """
        captured = self._graphs.plain.get(place)
        if captured is None or self._backend.in_turn:
            return None
        if change := self._guards.changed():
            self._standing.drop(change)
            return None
        if self._guards.doubt:
            return None
        static = captured.static
        tensors: list[Tensor] | None = []
        if batch is not static.batch:
            # The clock of a timed step wants to know when this copy begins and ends.
            device_type = self._backend.device.type
            tensors = None if timed else static.tensors_of(batch, device_type)
        if (
            tensors is None
            or (captured.can_be_kept and any(each.is_kept() for each in self._graphs.all()))
            or self._backend.host_value_moved()
            or self._verifier.due(captured, captured.replays, captured.is_unproved(timed))
        ):
            return None
        if self._agreement is not None:
            met = self._plans.met = self._agreement.vote(Intent.REPLAY)
            if met[1] is not Intent.REPLAY:
                return None
            self._plans.met = None
        refresh()
        if timed:
            upcoming(captured.upcoming(True))
        elif tensors:
            static.fill(tensors)
        outputs = captured.replay(static.batch, timed=timed)
        captured.replays += 1
        self.counts.replayed += 1
        return outputs

    def step(
        self, step: Step[T], refresh: Callable[[], None], signature: Signature | None = None
    ) -> tuple[Phase, T | None]:
        """Do one training step, in whichever way its phase says.

        Args:
            step: the step.
            refresh: called before a capture and before a replay, to bring device mirrors of host
                values up to date.
            signature: that of the batch, if it is known already.

        Returns:
            The phase, and the static outputs if the step was a replay.

        Raises:
            UnsupportedError: if it cannot be captured and the engine was made to raise. Nothing of
                the step has happened then.
        """
        if not self._has_begun:
            self._has_begun = True
            self._patches.enter_context(without_its_graphs(self._note))
        if unfit := self._carried.put_in(self.has_graphs):
            step = replace(step, unlike_others=step.unlike_others or unfit)
        try:
            phase, outputs = self._step(step, refresh, signature)
            if phase is Phase.CAPTURED:
                self._carried.hand_out()
            return phase, outputs
        finally:
            self._carried.take_out()
            self._copies.handed = None

    def _step(
        self, step: Step[T], refresh: Callable[[], None], signature: Signature | None
    ) -> tuple[Phase, T | None]:
        plan = self._plans.of_this_process(step, signature)
        if self._agreement is not None:
            plan = self._plans.of_all(plan, self._agreement)
        intent, reason, signature, captured = plan
        if intent is Intent.EAGER or intent is Intent.GIVE_UP:
            return self._eager(step, reason)
        assert signature is not None
        if intent is Intent.WARM_UP:
            return self._warm_up(step, signature)
        refresh()
        if intent is Intent.CAPTURE:
            captured, reason, raised = self._captures.attempt(step, signature)
            if captured is None:
                # Out of the handler, so that the error is gone, with all that its frames hold. What the
                # user's code has raised by itself it raises again, and leaves what it always leaves.
                done = self._eager(step, reason)
                if raised:
                    self._standing.unsupported(_only_in_the_capture(reason))
                return done
            self._graphs.add(signature, step, captured)
            refresh()
            if self._plans.is_due(step, captured):
                intent = Intent.VERIFY
        assert captured is not None
        self._graphs.use(signature)
        if intent is Intent.VERIFY:
            outputs, reason = self._replays.checked(step, captured)
            return self._eager(step, reason) if reason else (Phase.CAPTURED, outputs)
        return Phase.CAPTURED, self._replays.replayed(step, captured)

    @property
    def static(self) -> StaticBatch | None:
        """The static buffers that the latest graph reads; who fills them may hand on their `batch`."""
        return self._graphs.static

    @property
    def has_graphs(self) -> bool:
        """Whether anything is captured."""
        return bool(self._graphs)

    @property
    def given_up(self) -> bool:
        """Whether the run goes on without graphs."""
        return self._standing.given_up is not None

    @property
    def notes(self) -> list[str]:
        """What the user should know of the captures."""
        return [*self._streams.notes, *self._compiled.notes, *self._without_graphs]

    def pause(self) -> None:
        """Code of the user's may have run between two steps: look at everything."""
        self._guards.suspect()
        self._verifier.pause()

    def drop(self, reason: str) -> None:
        """Let go of the graphs, because `reason`; what comes is warmed up and captured anew."""
        self._standing.drop(reason)

    def unsupported(self, error: UnsupportedError) -> None:
        """Something showed that no step of this run can be captured: narrow, raise, or give up."""
        self._standing.unsupported(error)

    def leave(self) -> None:
        """Another engine's graphs in the same pool come now: bring gradients where none writes."""
        self._standing.leave()

    def _note(self, text: str) -> None:
        self._without_graphs.append(text)
        self._announce(text)

    def close(self) -> None:
        """Let go of the graphs."""
        try:
            self._standing.forget()
        finally:
            self._patches.close()

    def _eager(self, step: Step[T], reason: str) -> tuple[Phase, None]:
        self.counts.note_eager(reason)
        self._graphs.plain.clear()
        self._carried.take_out()
        self._copies.put_back()
        # On the side stream too: autograd's nodes remember the stream they were made on, and a node
        # of the default stream would break a later capture.
        with self._backend.on_side_stream():
            step.run()
        return Phase.EAGER, None

    def _warm_up(self, step: Step[T], signature: Signature) -> tuple[Phase, None]:
        if first := self._warm_ups.is_new(signature):
            if not self._graphs and not self.counts.variety:
                self.counts.variety = self._warm_ups.variety(signature)
                if self.counts.variety:
                    self._announce(f"There is no graph yet: {self.counts.variety}.")
            self._warm_ups.begin(signature)
        self._guards.watch()
        self._carried.take_out()
        self._carried.watch()
        with ExitStack() as stack:
            stack.enter_context(self._backend.on_side_stream())
            if first:
                stack.enter_context(self._backend.generators.learning())
            stack.enter_context(step.learning())
            stack.enter_context(self._compiled.noticed())
            is_at_its_end = self._warm_ups.is_at_its_end(signature, step.place)
            (step.run_last if is_at_its_end and step.run_last is not None else step.run)()
        # Only a step that went through counts.
        self._warm_ups.done(signature, step.place)
        self.counts.warmed_up += 1
        return Phase.WARMING, None
