"""The specialization of a captured function for one kind of call, and the step of a call."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.capture.signatures.by_signature import GraphsOfSignature
from lightning_cudagraph.capture.steps import Step
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.refusals.first_refusal import is_gathering
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.graphed_step.gradients import GradientEffects, MixedWarmUpError
from lightning_cudagraph.graphed_step.processes import are_several
from lightning_cudagraph.graphed_step.record import Arguments, StepRecorder, StepResult
from lightning_cudagraph.optim.steps import OptimizerSteps
from lightning_cudagraph.tensors.batch_signature import Signature

_MAX_MIXED = 8  # warm-ups on several paths in a row, after which they are not repeated
_MIXED = (
    "The step uses a gradient that each of the warm-up steps before has dropped: it is on another path"
    " than these, again and again."
)
_ONE_PATH = "Drop gradients at the same place in each step, or capture one function for each path."
# The mode of a call, by the names that the user knows.
Mode = Mapping[str, Hashable]
# The graphs of a call, with the tensors and host values of its arguments.
FoundGraphs = tuple[GraphsOfSignature[StepResult], tuple[list[Tensor], list[Any]]]


@dataclass
class Specialization:
    """The engine for calls with one signature of arguments in one mode, with effects of a warm-up."""

    backend: Backend
    signature: Signature
    mode: Mode
    engine: StepEngine[StepResult]
    guards: Guards
    gradient_effects: GradientEffects
    digest: int
    calls: int = 0
    warm_ups: int = 0
    mixed_warm_ups: int = 0

    def graphs_of(self, arguments: Arguments, mode: Mode, device_type: str) -> FoundGraphs | None:
        """Return the graphs of a call that a quick comparison shows to have this specialization."""
        latest = self.engine.graphs.latest
        if latest is None or self.mode != mode or not self.signature.agrees(arguments.numbers):
            return None
        leaves = latest.static.leaves_of(arguments.batch, device_type)
        return None if leaves is None else (latest, leaves)

    @property
    def is_decided(self) -> bool:
        """True if a capture has succeeded, or has failed for good."""
        engine = self.engine
        return bool(engine.graphs) or engine.given_up or engine.admission.is_refused(self.signature)

    def begin_again(self) -> None:
        """Warm up again, and compare from now on what the step reads: it leads to different paths."""
        self.mixed_warm_ups += 1
        mentioned = [*self.guards.mentioned]
        self.engine.invalidation.forget()
        self.guards.mentioned += mentioned
        self.guards.take(self.engine)

    def is_of_one_kind(self, attributes: Collection[tuple[int, Any]]) -> bool:
        """True if its graphs are of the values that new attributes of the signature had before."""
        is_of_values = bool(self.engine.graphs) and self.guards.are_taken_before(attributes)
        return is_of_values if attributes else self.is_decided

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Watch a warm-up step."""
        with ExitStack() as stack:
            stack.enter_context(self.guards.effects.watched(self.backend.join_other_threads))
            if not self.engine.graphs:
                stack.enter_context(self.gradient_effects.learning())
            yield


@dataclass(kw_only=True, eq=False)
class SpecializedStep(Step[StepResult]):
    """The step of one call."""

    optimizers: OptimizerSteps
    recorder: StepRecorder
    kind: Specialization
    arguments: Arguments
    owns_gradients: bool
    returned: list[Any] = field(default_factory=list)

    def refresh(self, outputs: StepResult | None) -> None:
        self.optimizers.note_moves()
        if outputs is None:
            self.optimizers.bring_state()

    def run(self) -> None:
        self.returned.append(self.recorder.run(self.arguments))

    def record(self, batch: Any, cut: BreakGraph | None, timed: bool) -> StepResult:
        kind, capturing = self.kind, cut is not None
        # Other processes would wait for the outcome of this capture.
        is_compared = capturing and not (are_several() or is_gathering())
        is_bounded = kind.mixed_warm_ups < _MAX_MIXED
        try:
            with kind.gradient_effects.dropping() if is_compared else nullcontext():
                result = self.recorder.record(
                    batch, self.arguments, kind.gradient_effects, kind.guards, capturing
                )
        except MixedWarmUpError:
            if is_bounded:
                raise
            raise UnsupportedError(_MIXED, _ONE_PATH) from None
        if is_compared and is_bounded and kind.gradient_effects.are_mixed():
            raise MixedWarmUpError
        return result

    def state(self) -> dict[str, Tensor]:
        return self.recorder.state(self.kind.gradient_effects)

    def transaction(self) -> AbstractContextManager[None]:
        return self.recorder.undone()

    def learning(self) -> AbstractContextManager[None]:
        kind, warm_ups = self.kind, self.kind.engine.invalidation.warm_ups
        if kind.warm_ups != warm_ups:  # what made graphs stale may change the effects too
            kind.gradient_effects, kind.warm_ups = self.recorder.gradient_effects(), warm_ups
        return kind.learning()

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return self.kind.gradient_effects.parameters()

    def is_followed_by_user_code(self) -> bool:
        return not self.owns_gradients
