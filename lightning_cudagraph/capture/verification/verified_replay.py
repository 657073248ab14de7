"""Replay of a captured step, verified against an eager step from the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.decisions.invalidation import Invalidation
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.capture.steps import Step, T
from lightning_cudagraph.capture.verification.late_effects import LateEffects
from lightning_cudagraph.checks.guards.remedies import kind_of
from lightning_cudagraph.checks.verify.tape import TapeDifference
from lightning_cudagraph.errors import StaleGraphError, UnsupportedError, VerificationError


def replay_verified(
    engine: EngineContext[T],
    invalidation: Invalidation[T],
    step: Step[T],
    captured: CapturedStep[T],
    launch: Callable[[bool], T],
) -> tuple[str, T | None]:
    """Run a step by a replay that is verified against an eager step.

    Args:
        launch: replays on the step's batch, without graph breaks; its argument is True to time it.

    Returns:
        The reason why the step must run eagerly, of which nothing has happened then; empty if it has
        been replayed, or is still to be. And the static outputs if it has been.
    """
    backend, verifier, is_alone = engine.run.backend, engine.run.verifier, engine.run.agreement is None
    replays = 0

    def rehearse(batch: Any) -> T:
        return step.record(batch, None, timed=False)

    def eagerly(rehearse: Callable[[Any], T] = rehearse) -> dict[str, Tensor]:
        with step.transaction(), backend.on_side_stream():
            captured.static.copy_from(step.batch)
            with effects.refused(known, verifier.unchecked(captured)):
                return captured.run_eagerly(rehearse).values()

    def replay() -> tuple[T, dict[str, Tensor]]:
        nonlocal replays
        replays += 1
        if replays > 1:
            # Instances with different host numbers would look like nondeterministic kernels.
            captured.turn_back(timed)
        put_back_gradients()
        outputs = launch(timed)
        return outputs, outputs.values()

    def put_back_gradients() -> None:
        for parameter, gradient in before:
            parameter.grad = gradient

    def trace() -> tuple[TapeDifference | None, dict[str, Tensor]]:
        def taped(batch: Any) -> T:
            with captured.tape.compared(state):
                return rehearse(batch)

        outputs = eagerly(taped)
        put_back_gradients()
        return captured.tape.difference, outputs

    timed = captured.kind_to_prove(step.timed)
    captured.gradients.adopt()
    before = [(p, p.grad) for parameters in step.parameters() for p in parameters]
    suspicion = engine.guards.suspicions.of(captured)
    effects = LateEffects(engine, captured, bool(suspicion))
    outputs: T | None = None
    try:
        state = step.all_state(captured.written)
        gradients = {str(i): gradient for i, (_, gradient) in enumerate(before) if gradient is not None}
        known = {**state, **gradients}
        ways = eagerly, replay, not captured.is_replayed_after_check, trace
        if captured.is_replayed_after_check:
            # The verification skips graph breaks; the step itself is replayed after it.
            with captured.gradients.kept():
                verifier.check(captured, state, *ways, suspicion, effects.words)
        else:
            outputs = verifier.check(captured, state, *ways, suspicion, effects.words)
    except UnsupportedError as error:
        if not is_alone and not isinstance(error, VerificationError):
            raise  # the other processes are in the middle of the verification
        if not captured.is_replayed_after_check:
            put_back_gradients()
        signature = step.signature
        if signature is not None and not captured.n_replays and len(engine.graphs) > 1:
            invalidation.admission.refuse(signature, error)
        elif isinstance(error, StaleGraphError):
            invalidation.drop(error.reason)
            return kind_of(error.reason), None
        else:
            invalidation.unsupported(error)
        return error.reason, None
    engine.guards.clear_suspicion(captured)
    return "", outputs
