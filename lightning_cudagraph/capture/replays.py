"""Replay of a captured step: plain, timed, with graph breaks, or verified against an eager step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from torch import Tensor

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.invalidation import Invalidation
from lightning_cudagraph.capture.steps import Replay, Step
from lightning_cudagraph.checks.guards.remedies import kind_of
from lightning_cudagraph.checks.verify.tape import TapeDifference
from lightning_cudagraph.errors import StaleGraphError, UnsupportedError, VerificationError

T = TypeVar("T")

_NOTHING = nullcontext()


class Replays(Generic[T]):
    """Replays captured steps for an engine."""

    def __init__(self, engine: EngineContext[T], invalidation: Invalidation[T]) -> None:
        run = engine.run
        self._backend = run.backend
        self._verifier = run.verifier
        self._counts = run.counts
        self._around_replays = run.around_replays
        self._agreement = run.agreement
        self._graphs, self._copies = engine.graphs, engine.copies
        self._invalidation = invalidation

    def replayed(self, step: Replay[T], captured: CapturedStep[T]) -> T:
        outputs = self._replay(captured, step, step.between if captured.has_breaks else None, step.timed)
        graphs = self._graphs.latest
        if graphs is not None and step.accumulation not in graphs.plain and self._is_plain(captured):
            graphs.plain[step.accumulation] = captured
        return self._done(captured, outputs)

    def checked(self, step: Step[T], captured: CapturedStep[T]) -> tuple[T | None, str]:
        """Run a step by a replay that is verified against an eager step.

        Returns:
            The static outputs and an empty text. Or None and the reason why the step must run eagerly:
            nothing of it has happened then.
        """
        replays = 0

        def undone() -> AbstractContextManager[None]:
            # The first verifications have learned the host effects of every step. They are undone only
            # in a recheck, after a change that the step may depend on.
            is_alone = self._agreement is None
            return self._invalidation.effects_undone() if suspicion and is_alone else nullcontext()

        def eagerly() -> dict[str, Tensor]:
            with step.transaction(), self._backend.on_side_stream(), undone():
                return step.values(self._run_eagerly(captured, step, step.rehearse))

        def replay() -> tuple[T, dict[str, Tensor]]:
            nonlocal replays
            replays += 1
            if replays > 1:
                # Instances with different host numbers would look like nondeterministic kernels.
                captured.turn_back(timed)
            put_back_gradients()
            outputs = self._replay(captured, step, None, timed)
            return outputs, step.values(outputs)

        def put_back_gradients() -> None:
            for parameter, gradient in before:
                parameter.grad = gradient

        def trace() -> tuple[TapeDifference | None, dict[str, Tensor]]:
            def rehearse(batch: Any) -> T:
                with captured.tape.compared(state):
                    return step.rehearse(batch)

            with step.transaction(), self._backend.on_side_stream(), undone():
                outputs = step.values(self._run_eagerly(captured, step, rehearse))
            put_back_gradients()
            return captured.tape.difference, outputs

        timed = captured.kind_to_prove(step.timed)
        captured.adopt_gradients()
        before = [(p, p.grad) for parameters in step.parameters() for p in parameters]
        suspicion = self._invalidation.suspicion(captured)
        try:
            state = step.all_state(captured.written)
            if captured.is_checked_apart:
                # The verification skips graph breaks; the step itself is replayed after it.
                with captured.gradients_kept():
                    self._verifier.check(captured, state, eagerly, replay, False, trace, suspicion)
            else:
                outputs = self._verifier.check(captured, state, eagerly, replay, True, trace, suspicion)
        except UnsupportedError as error:
            if self._agreement is not None and not isinstance(error, VerificationError):
                raise  # the other processes are in the middle of the verification
            if not captured.is_checked_apart:
                put_back_gradients()
            signature = step.signature
            if signature is not None and not captured.n_replays and len(self._graphs) > 1:
                self._invalidation.admission.refuse(signature, error)
            elif isinstance(error, StaleGraphError):
                self._invalidation.drop(error.reason)
                return None, kind_of(error.reason)
            else:
                self._invalidation.unsupported(error)
            return None, error.reason
        self._invalidation.clear_suspicion(captured)
        if captured.is_checked_apart:
            return self.replayed(step, captured), ""
        return self._done(captured, outputs), ""

    def _replay(
        self,
        captured: CapturedStep[T],
        step: Replay[T],
        between: Callable[[T, int], None] | None,
        timed: bool,
    ) -> T:
        """Copy the batch into the static batch, if it is not there yet, and replay."""
        static, batch = captured.static, step.batch
        if timed:
            step.before_timed(captured.next_outputs(True))
            if batch is not static.batch:
                with step.copying():
                    static.copy_from(batch)
        with _NOTHING if self._around_replays is nullcontext else self._around_replays():
            if not timed:
                static.copy_from(batch)
            at_break = None if between is None else self._marked(between)
            return captured.replay(at_break, self._copies.handed, timed)

    def _run_eagerly(self, captured: CapturedStep[T], step: Step[T], rehearse: Callable[[Any], T]) -> T:
        captured.static.copy_from(step.batch)
        return captured.run_eagerly(rehearse)

    def _marked(self, between: Callable[[T, int], None]) -> Callable[[T, int], None]:
        """Wrap `between`, so that the backend knows that a graph break is under way."""

        def at_break(outputs: T, index: int) -> None:
            self._backend.in_graph_break = True
            try:
                between(outputs, index)
            finally:
                self._backend.in_graph_break = False

        return at_break

    def _is_plain(self, captured: CapturedStep[T]) -> bool:
        """True if a replay needs only the guards and the copy of the batch (fast path)."""
        return captured.is_plain and not self._copies.are_given and self._around_replays is nullcontext

    def _done(self, captured: CapturedStep[T], outputs: T) -> T:
        if self._copies.handed is not None:
            captured.copy_out(self._copies.handed)
        captured.n_replays += 1
        self._counts.replayed += 1
        return outputs
