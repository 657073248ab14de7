"""One replay of a captured step: with turns of the host, timed, or held against an eager step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from torch import Tensor

from lightning_cudagraph.capture.by_signature import GraphsBySignature
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.standing import StandingGraphs
from lightning_cudagraph.capture.steps import Step, StepCounts
from lightning_cudagraph.checks.carried import CarriedTensors
from lightning_cudagraph.checks.verify.tape import TapeDifference
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import StaleGraphError, UnsupportedError, VerificationError
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.tensors.holds import GradientCopies

__all__ = ["Replays"]

T = TypeVar("T")


class Replays(Generic[T]):
    """Replays the captured steps of a run.

    Args:
        backend: where they run.
        graphs: those that there are.
        standing: told what a check has found.
        carried: attributes whose tensors are others in every step.
        verifier: checks replays against eager steps.
        copies: of the gradients of graphs.
        counts: what became of the steps.
        around_replays: what is entered around each replay.
        agreement: with the other processes of the run, or None if there are none.
    """

    def __init__(
        self,
        backend: Backend,
        graphs: GraphsBySignature[T],
        standing: StandingGraphs[T],
        carried: CarriedTensors,
        verifier: Verifier,
        copies: GradientCopies,
        counts: StepCounts,
        around_replays: Callable[[], AbstractContextManager[object]],
        agreement: Agreement | None,
    ) -> None:
        self._backend = backend
        self._graphs = graphs
        self._standing = standing
        self._carried = carried
        self._verifier = verifier
        self._copies = copies
        self._counts = counts
        self._around_replays = around_replays
        self._agreement = agreement

    def replayed(self, step: Step[T], captured: CapturedStep[T]) -> T:
        """Do a step by a replay.

        Returns:
            The static outputs.
        """
        outputs = self._replay(captured, step, step.between if captured.has_turns else None, step.timed)
        if self._is_plain(captured):
            self._graphs.plain[step.place] = captured
        return self._done(captured, outputs)

    def checked(self, step: Step[T], captured: CapturedStep[T]) -> tuple[T | None, str]:
        """Do a step by a replay that is held against an eager step.

        Returns:
            The static outputs, and nothing; or None, and why the step has to run eagerly: nothing of it
            has happened then.

        Raises:
            UnsupportedError: if the replay came to something else, and that was to raise.
        """
        replays = 0

        def undone() -> AbstractContextManager[None]:
            # Without a change, the step has the effects that it had in warm-up: none.
            return (
                self._standing.effects_undone() if doubt and self._agreement is None else nullcontext()
            )

        def eagerly() -> dict[str, Tensor]:
            # What changes in every step by itself was learned in the first checks.
            undone = (
                self._standing.effects_undone() if doubt and self._agreement is None else nullcontext()
            )
            with step.transaction(), self._backend.on_side_stream(), undone:
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

        def trace() -> TapeDifference | None:
            def rehearse(batch: Any) -> T:
                with captured.tape.beside(state):
                    return step.rehearse(batch)

            with step.transaction(), self._backend.on_side_stream(), undone():
                captured.run_eagerly(rehearse, step.batch)
            put_back_gradients()
            return captured.tape.difference

        timed = captured.kind_to_prove(step.timed)
        captured.adopt_gradients()
        before = [(p, p.grad) for parameters in step.parameters() for p in parameters]
        doubt = self._standing.doubt
        try:
            state = step.all_state(captured.written)
            if captured.is_checked_apart:
                # The check is made without what the host does in the middle, and the step is taken
                # afterwards.
                with captured.gradients_kept():
                    self._verifier.check(captured, state, eagerly, replay, False, trace, doubt)
            else:
                outputs = self._verifier.check(captured, state, eagerly, replay, True, trace, doubt)
        except UnsupportedError as error:
            if self._agreement is not None and not isinstance(error, VerificationError):
                raise  # the others are in the middle of the check
            if not captured.is_checked_apart:
                put_back_gradients()
            if isinstance(error, StaleGraphError):
                self._standing.drop(error.reason)
            else:
                self._standing.unsupported(error)
            return None, error.reason
        self._standing.clear_doubt()
        if captured.is_checked_apart:
            return self.replayed(step, captured), ""
        return self._done(captured, outputs), ""

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
            host_turn = turn if between is not None else None
            return captured.replay(batch, host_turn, self._copies.handed, timed)

    def _is_plain(self, captured: CapturedStep[T]) -> bool:
        """Whether there is nothing to do around a replay but to compare, and to copy the batch."""
        return (
            captured.is_plain
            and not self._copies.are_given
            and not self._carried.has_any
            and self._around_replays is nullcontext
            and len(self._graphs) == 1
        )

    def _done(self, captured: CapturedStep[T], outputs: T) -> T:
        if self._copies.handed is not None:
            captured.hand_out(self._copies.handed)
        captured.replays += 1
        self._counts.replayed += 1
        return outputs
