"""The life of a batch: warm up, capture, replay, or run eagerly and say why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any, Generic, TypeVar

from torch import Tensor

from lightning_cudagraph.capture.agreement import Agreement, Intent
from lightning_cudagraph.capture.backend import Backend
from lightning_cudagraph.capture.batch import Signature, flatten_batch
from lightning_cudagraph.capture.branches import SentBackError
from lightning_cudagraph.capture.by_signature import NOT_YET, GraphsBySignature
from lightning_cudagraph.capture.carried import CarriedTensors
from lightning_cudagraph.capture.compiled import CompiledCode
from lightning_cudagraph.capture.graph import CapturedStep, outside_inference_mode
from lightning_cudagraph.capture.guards import Guards
from lightning_cudagraph.capture.holds import CAN_COUNT, HandedOut, Holds
from lightning_cudagraph.capture.inductor import without_its_graphs
from lightning_cudagraph.capture.static import StaticBatch
from lightning_cudagraph.capture.steps import MAKES_GRADIENTS, Phase, Place, Step, StepCounts
from lightning_cudagraph.capture.stream_choice import StreamChoice, Streams
from lightning_cudagraph.capture.verify import Verifier
from lightning_cudagraph.capture.warm_ups import WarmUps
from lightning_cudagraph.capture.writes import storage_id, whole
from lightning_cudagraph.errors import (
    CaptureError,
    CUDAGraphError,
    UnsupportedError,
    VerificationError,
)

__all__ = ["StepEngine"]

T = TypeVar("T")

_REPORT_IT = "This is a fault of the package's, and should not be: please report it."

# A run that goes on changing under its graphs is left to run eagerly: after so many captures in a row
# that each served fewer than so many replays. A graph for each epoch is fine for ever.
_MAX_SHORT_CAPTURES = 8
_FEW_REPLAYS = 32


def _all_state(step: Step[T], captured: CapturedStep[T]) -> dict[str, Tensor]:
    """All that a step changes: by name what is known, and whatever else the capture saw it write."""
    state = step.state()
    known = {storage_id(tensor) for tensor in state.values()}
    for tensor in captured.written:
        if storage_id(tensor) not in known:
            known.add(storage_id(tensor))
            shape = "x".join(map(str, tensor.shape)) or "one number"
            state[f"a tensor that no module knows as its own ({len(state)}, {shape})"] = whole(tensor)
    return state


def _refuse_shared_memory(batch: object, captured: CapturedStep[T]) -> None:
    """Refuse a step that writes the memory of its batch by another name: it would read a copy."""
    written = {storage_id(tensor) for tensor in captured.written}
    for path, leaf in flatten_batch(batch):
        if isinstance(leaf, Tensor) and storage_id(leaf) in written:
            raise CaptureError(
                f"The training step writes into memory that `{path}` lies in; a graph reads a copy of"
                f" `{path}` that was made before.",
                "Pass a copy, `tensor.clone()`, or use in the step what the tensor is taken from.",
            )


def _only_in_the_capture(raised: str) -> UnsupportedError:
    return UnsupportedError(
        f"The training step raised {raised}. Eagerly, from the same state, it did not.",
        "Find out what in the step does not work in a capture; the message may say.",
    )


def _of_ranks(told: Iterable[str | None]) -> str:
    """What processes have said, with their ranks."""
    return "; ".join(f"{said} (rank {rank})" for rank, said in enumerate(told) if said)


def _portable(error: UnsupportedError) -> tuple[str, str, bool]:
    return error.reason, error.remedy, error.in_optimizer


def _failure_of_ranks(told: Iterable[tuple[str, str, bool] | None]) -> UnsupportedError | None:
    """The first error that a process has met, for those that have not met it."""
    for rank, error in enumerate(told):
        if error is not None:
            reason, remedy, in_optimizer = error
            return UnsupportedError(f"On rank {rank}: {reason}", remedy, in_optimizer=in_optimizer)
    return None


# What to do with a batch; why, if it runs eagerly; its signature; and its graph, if it has one.
_Plan = tuple[Intent, str, Signature | None, CapturedStep[T] | None]


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
    ) -> None:
        self._agreement = agreement
        self._streams = StreamChoice(
            backend, streams, "" if agreement is None else "several processes do not choose together"
        )
        # What processes have said of the batch at hand, if they have.
        self._met: tuple[Intent, Intent] | None = None
        self._backend = backend
        self._guards = guards
        self._carried = carried
        self._verifier = verifier
        self._is_settled = is_settled
        self._warm_ups = WarmUps(warmup_steps)
        self._raise_unsupported = raise_unsupported
        self._announce = announce
        self._narrow = narrow
        self._on_give_up = on_give_up
        self._around_replays = around_replays
        self._on_capture = on_capture
        self._what = what
        self._compiled = CompiledCode()
        self._patches = ExitStack()
        self._has_begun = False
        self._without_graphs: list[str] = []
        self._graphs: GraphsBySignature[T] = GraphsBySignature(backend.device.type, max_signatures)
        self._short_captures = 0  # in a row
        self._given_up: str | None = None
        self._dropped = ""  # why, the last time
        # Copies of the gradients, because somebody keeps them; or because nobody could tell.
        self._hands_out = not CAN_COUNT
        self._handed: HandedOut | None = None  # in the step at hand
        # Graphs that were replayed last as `again` does it, by their places.
        self._plain: dict[Place, CapturedStep[T]] = {}
        self.counts = StepCounts()

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
        captured = self._plain.get(place)
        if captured is None or self._backend.in_turn:
            return None
        if change := self._guards.changed():
            self.drop(change)  # here, because parameters are looked at in turns
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
            self._met = self._agreement.meet(Intent.REPLAY)
            if self._met[1] is not Intent.REPLAY:
                return None
            self._met = None
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
        self._carried.put_in()
        try:
            phase, outputs = self._step(step, refresh, signature)
            if phase is Phase.CAPTURED:
                self._carried.hand_out()
            return phase, outputs
        finally:
            self._carried.take_out()
            self._handed = None

    def _step(
        self, step: Step[T], refresh: Callable[[], None], signature: Signature | None
    ) -> tuple[Phase, T | None]:
        plan = self._plan(step, signature)
        if self._agreement is not None:
            plan = self._agreed(plan, self._agreement)
        intent, reason, signature, captured = plan
        if intent is Intent.EAGER or intent is Intent.GIVE_UP:
            return self._eager(step, reason)
        assert signature is not None
        if intent is Intent.WARM_UP:
            return self._warm_up(step, signature)
        refresh()
        if intent is Intent.CAPTURE:
            captured, reason, raised = self._try_capture(step, signature)
            if captured is None:
                # Out of the handler, so that the error is gone, with all that its frames hold. What the
                # user's code has raised by itself it raises again, and leaves what it always leaves.
                done = self._eager(step, reason)
                if raised:
                    self.unsupported(_only_in_the_capture(reason))
                return done
            self._graphs.add(signature, step, captured)
            refresh()
            if self._is_due(step, captured):
                intent = Intent.VERIFY
        assert captured is not None
        self._graphs.use(signature)
        if intent is Intent.VERIFY:
            return self._verify(step, captured)
        return self._replayed(step, captured)

    def _plan(self, step: Step[T], signature: Signature | None) -> _Plan[T]:
        """What this process would do with the batch, by itself."""
        if self._given_up is not None:
            return Intent.GIVE_UP, self._given_up, None, None
        if self._backend.in_turn:
            return Intent.EAGER, "in the middle of another step that is replayed", None, None
        if step.unlike_others:
            return Intent.EAGER, step.unlike_others, None, None
        if self._met is None:  # else `again` has looked, and has told the other processes
            self._look_for_changes()
        try:
            signature = signature or self._graphs.known_signature(step)
            signature = signature or Signature(step.batch, self._backend.device, step.beside)
        except UnsupportedError as error:
            if self._raise_unsupported:
                raise
            return Intent.EAGER, error.reason, None, None
        if reason := self._graphs.one_too_many(signature):
            return Intent.EAGER, reason, None, None
        self._handed = HandedOut(chain(*step.parameters())) if self._hands_out else None
        captured = self._graphs.get(signature, step.place)
        if captured is not None and (change := captured.stale()):
            self.drop(change)
            captured = None
        if captured is None:
            left = self._warm_ups.left(signature, step.place)
            if left > 0 or not self._is_settled() or self._graphs.maker(step, signature) is NOT_YET:
                return Intent.WARM_UP, "", signature, None
            return Intent.CAPTURE, "", signature, None
        if self._is_due(step, captured):
            return Intent.VERIFY, "", signature, captured
        return Intent.REPLAY, "", signature, captured

    def _look_for_changes(self) -> None:
        if change := self._guards.changed():
            self.drop(change)
        elif self._backend.host_value_moved():
            self.drop("a tensor in host memory, which the step uses as a number, changed")
        elif not self._hands_out and any(captured.is_kept() for captured in self._graphs.all()):
            self._hand_out_from_now_on()

    def _is_due(self, step: Step[T], captured: CapturedStep[T]) -> bool:
        return self._verifier.due(captured, captured.replays, captured.is_unproved(step.timed))

    def _agreed(self, plan: _Plan[T], agreement: Agreement) -> _Plan[T]:
        """What this process does with the batch, since the others have plans of theirs."""
        intent, reason, signature, captured = plan
        lowest, highest = self._met or agreement.meet(intent)
        self._met = None
        if lowest is highest:
            return plan
        if highest is Intent.GIVE_UP:
            given_up = agreement.tell(self._given_up)
            if self._given_up is None:
                self.give_up(_of_ranks(given_up))
            return Intent.GIVE_UP, self._given_up or "", None, None
        if highest <= Intent.VERIFY:
            return Intent.REPLAY, reason, signature, captured
        if highest >= Intent.CAPTURE and lowest <= Intent.VERIFY:
            # A graph that not all processes have is none.
            dropped = agreement.tell(None if self._graphs else self._dropped)
            if self._graphs:
                self.drop(_of_ranks(dropped) or "another process captures anew")
            if captured is not None:
                return Intent.WARM_UP, "", signature, None
        if intent is Intent.EAGER or intent is Intent.WARM_UP:
            return plan
        return Intent.EAGER, "not all processes could take this step as a graph", None, None

    def _try_capture(
        self, step: Step[T], signature: Signature
    ) -> tuple[CapturedStep[T] | None, str, bool]:
        """The captured step; or why there is none, and whether that was an error of the user's code."""
        captured: CapturedStep[T] | None = None
        failure: UnsupportedError | None = None
        raised = ""
        try:
            with Holds.of_captures_apart():
                captured = self._capture(step, signature)
        except UnsupportedError as error:
            failure = error
        except CUDAGraphError:
            raise
        except Exception as error:
            raised = f"{type(error).__name__} in the capture: {error}"
        mine = bool(raised)
        is_broken = step.is_broken()
        if self._agreement is not None:
            told = self._agreement.tell((failure and _portable(failure), raised, is_broken))
            reasons, texts, broken = zip(*told, strict=True)
            is_broken = any(broken)
            if captured is not None and (any(reasons) or any(texts)):
                captured.release()
                captured = None
                self.counts.captures -= 1
                failure = _failure_of_ranks(reasons)
                raised = "" if failure else _of_ranks(texts)
                mine = False
        if is_broken:
            step.mend()
        if failure is not None:
            self.unsupported(failure)  # and put into the words of what these steps are
            return None, failure.reason, False
        return captured, raised, mine

    def _replayed(self, step: Step[T], captured: CapturedStep[T]) -> tuple[Phase, T]:
        outputs = self._replay(captured, step, step.between if captured.has_turns else None, step.timed)
        if self._is_plain(captured):
            self._plain[step.place] = captured
        return self._done(captured, outputs)

    def _is_plain(self, captured: CapturedStep[T]) -> bool:
        """Whether there is nothing to do around a replay but to compare, and to copy the batch."""
        return (
            captured.is_plain
            and not self._hands_out
            and not self._carried.has_any
            and self._around_replays is nullcontext
            and len(self._graphs) == 1
        )

    def _done(self, captured: CapturedStep[T], outputs: T) -> tuple[Phase, T]:
        if self._handed is not None:
            captured.hand_out(self._handed)
        captured.replays += 1
        self.counts.replayed += 1
        return Phase.CAPTURED, outputs

    def _hand_out_from_now_on(self) -> None:
        """Somebody keeps a gradient: leave him what the graphs have made, and give out copies."""
        self._hands_out = True
        self.drop("code outside of the step keeps a gradient, or a part of one")

    @property
    def static(self) -> StaticBatch | None:
        """The static buffers that the latest graph reads; who fills them may hand on their `batch`."""
        return self._graphs.static

    def _replay(
        self,
        captured: CapturedStep[T],
        step: Step[T],
        between: Callable[[T, int], None] | None,
        timed: bool,
    ) -> T:
        def turn(outputs: T, index: int) -> None:
            assert between is not None
            self._backend.in_turn = True
            try:
                between(outputs, index)
            finally:
                self._backend.in_turn = False

        batch = step.batch
        if timed:
            step.upcoming(captured.upcoming(True))
            if batch is not captured.static.batch:
                with step.copying():
                    captured.static.copy_from(batch)
                batch = captured.static.batch
        with self._around_replays():
            return captured.replay(batch, turn if between is not None else None, self._handed, timed)

    def _verify(self, step: Step[T], captured: CapturedStep[T]) -> tuple[Phase, T | None]:
        replays = 0

        def eagerly() -> dict[str, Tensor]:
            with step.transaction(), self._backend.on_side_stream():
                return step.values(captured.run_eagerly(step.rehearse, step.batch))

        def replay() -> tuple[T, dict[str, Tensor]]:
            nonlocal replays
            replays += 1
            if replays > 1:
                # Captures in which the host had other numbers would be taken for unsteady kernels.
                captured.turn_back(timed)
            put_back_gradients()
            outputs = self._replay(captured, step, None, timed)
            return outputs, step.values(outputs)

        def put_back_gradients() -> None:
            for parameter, gradient in before:
                parameter.grad = gradient

        timed = captured.kind_to_prove(step.timed)
        captured.adopt_gradients()
        before = [(p, p.grad) for parameters in step.parameters() for p in parameters]
        reason = ""
        try:
            state = _all_state(step, captured)
            if captured.has_turns:
                # What the host does in the middle can be done once: the check is made without it, and
                # the step is taken afterwards.
                with captured.gradients_kept():
                    self._verifier.check(captured, state, eagerly, replay, keep=False)
            else:
                outputs = self._verifier.check(captured, state, eagerly, replay)
        except UnsupportedError as error:
            if self._agreement is not None and not isinstance(error, VerificationError):
                raise  # the others are in the middle of the check
            if not captured.has_turns:
                put_back_gradients()
            self.unsupported(error)
            reason = error.reason
        if reason:
            return self._eager(step, reason)
        if captured.has_turns:
            return self._replayed(step, captured)
        return self._done(captured, outputs)

    def drop(self, reason: str) -> None:
        """Let go of the graphs, because `reason`; what comes is warmed up and captured anew."""
        self._dropped = reason
        had_graphs = bool(self._graphs)
        replays = sum(captured.replays for captured in self._graphs.all())
        self._forget()
        if not had_graphs:
            return
        self._short_captures = self._short_captures + 1 if replays < _FEW_REPLAYS else 0
        self.counts.recaptures.append(reason)
        if self._short_captures >= _MAX_SHORT_CAPTURES:
            self.give_up(
                f"given up after {self._short_captures} captures in a row that served fewer than"
                f" {_FEW_REPLAYS} replays each; last, {reason}"
            )
            return
        self._announce(f"The captured step is stale and is captured anew: {reason}.")

    def _forget(self) -> None:
        """Let go of the graphs and of what was learned in warm-up; it begins anew."""
        self._plain.clear()
        self._graphs.release()
        self._guards.drop()
        self._warm_ups.forget()

    def unsupported(self, error: UnsupportedError) -> None:
        """Something showed that no step of this run can be captured: narrow, raise, or give up."""
        if self._narrow(error):
            self._forget()
            return
        if self._raise_unsupported:
            raise error
        self.give_up(error.reason)

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on, because `reason`."""
        self._given_up = reason
        self._forget()
        self._on_give_up()
        self._announce(f"{self._what} goes on without a graph: {reason}")

    def leave(self) -> None:
        """Another engine's graphs in the same pool come now: bring gradients where none writes."""
        if self._backend.in_turn:
            return  # none comes before the end of the step
        self._plain.clear()
        if not self._hands_out and any(captured.is_kept() for captured in self._graphs.all()):
            self._hand_out_from_now_on()
        for captured in self._graphs.all():
            captured.bring_out_gradients()

    def _note(self, text: str) -> None:
        self._without_graphs.append(text)
        self._announce(text)

    def close(self) -> None:
        """Let go of the graphs."""
        try:
            self._forget()
        finally:
            self._patches.close()

    @property
    def has_graphs(self) -> bool:
        """Whether anything is captured."""
        return bool(self._graphs)

    @property
    def given_up(self) -> bool:
        """Whether the run goes on without graphs."""
        return self._given_up is not None

    def _eager(self, step: Step[T], reason: str) -> tuple[Phase, None]:
        self.counts.note_eager(reason)
        self._plain.clear()
        self._carried.take_out()
        if self._handed is not None:
            self._handed.put_back()
            self._handed = None
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

    def _apart_from_found(self, step: Step[T]) -> None:
        """The graph would add to gradients where they are: elsewhere, if somebody keeps those."""
        dropped, added = step.parameters()
        if not self._hands_out and step.kept() and Holds.is_one_kept(added):
            self._hands_out = True
        if self._hands_out:
            self._handed = self._handed or HandedOut([*dropped, *added])
            for parameter in added:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    @property
    def notes(self) -> list[str]:
        """What the user should know of the captures."""
        return [*self._streams.notes, *self._compiled.notes, *self._without_graphs]

    def _capture(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        try:
            return self._capture_once(step, signature)
        except SentBackError as error:
            reason = str(error)
        if not self._streams.send_back(reason):
            raise CaptureError(f"The training step cannot be captured: {reason}.", _REPORT_IT)
        return self._capture_once(step, signature)

    def _capture_once(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        self._plain.clear()  # each is to be replayed by `step` once more, after what comes now
        self._guards.watch()
        self._carried.watch()
        if moving := self._guards.moving():
            raise UnsupportedError(
                f"Between any two steps, {moving}: a graph would be stale at once.",
                'Keep it constant, or pass `scope="forward_backward"`.',
                in_optimizer=True,
            )
        maker = self._graphs.maker(step, signature)
        if isinstance(maker, CapturedStep):
            maker.put_back_gradients()
        else:
            self._apart_from_found(step)
        started_s = time.perf_counter()
        with step.transaction(), outside_inference_mode(), self._compiled.one_look():
            self._carried.place()
            static = self._graphs.static_of(signature) or StaticBatch(step.batch)
            static.copy_from(step.batch)

            def capture(takes: tuple[bool, ...], kept: bool) -> CapturedStep[T]:
                in_one_place = step.in_window and step.place == MAKES_GRADIENTS
                return CapturedStep(
                    self._backend,
                    static,
                    step.record,
                    *step.parameters(),
                    takes,
                    in_one_place,
                    kept,
                    self._compiled,
                )

            self._streams.settle(
                lambda: capture((False,), kept=False), lambda captured: _all_state(step, captured)
            )
            captured = capture(step.takes, step.kept())
        self._streams.captured()
        try:
            _refuse_shared_memory(step.batch, captured)
        except UnsupportedError:
            captured.release()
            raise
        self._guards.take()
        capture_ms = (time.perf_counter() - started_s) * 1e3
        self.counts.captures += 1
        self.counts.capture_ms += capture_ms
        self.counts.memory_bytes = self._backend.graph_bytes()
        if self._on_capture is not None:
            self._on_capture(step, capture_ms)
        return captured
