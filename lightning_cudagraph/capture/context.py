"""The state that all engines of a run share, and that of the parts of one engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic

from lightning_cudagraph.capture.decisions.stream_choice import StreamChoice, Streams
from lightning_cudagraph.capture.gradients.gradient_copies import GradientCopies
from lightning_cudagraph.capture.signatures.by_signature import GraphsBySignature, GraphsOfRun
from lightning_cudagraph.capture.signatures.warm_ups import WarmUps
from lightning_cudagraph.capture.steps import Step, StepCounts, T
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.checks.verify.settings import Verification
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.errors import UnsupportedError, Wording
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.processes.collective_state import CollectiveState


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """The user's settings that all front ends have in common; each front end documents its own."""

    warmup_steps: int
    raise_unsupported: bool
    verify: Verification
    harmless: frozenset[str] = frozenset()
    max_graphs: int
    streams: Streams = 1


@dataclass
class EngineContext(Generic[T]):
    """The state that the parts of one engine share."""

    run: RunContext
    guards: Guards
    graphs: GraphsBySignature[T]
    warm_ups: WarmUps
    streams: StreamChoice
    compiled: CompiledCode = field(default_factory=CompiledCode)
    copies: GradientCopies = field(default_factory=GradientCopies)


@dataclass
class RunContext:
    """The state that all engines of a run share; made once by a front end.

    Attributes:
        learning_rates: returns the current ones; a replay with new ones is verified.
        narrow: given the error of a capture, returns True if a smaller scope is captured from now on.
        on_give_up: called when the run falls back to eager steps for good.
        on_capture: called after each capture with the step and its host time in milliseconds.
        earns_graphs: signatures after the first earn their graphs; otherwise only those that come when
            there is no room. Both replace the least recently used ones.
        tries_streams_together: the processes of a group try numbers of streams together; otherwise they
            take one.
        is_examined: True if one more step is taken and examined before the error of a capture is raised.
    """

    backend: Backend
    settings: CaptureSettings
    carried: ReboundAttributes
    announce: Callable[[str], None]
    wording: Wording = field(default_factory=Wording)
    agreement: Agreement | None = None
    learning_rates: Callable[[], tuple[Any, ...]] = tuple
    narrow: Callable[[UnsupportedError], bool] = lambda error: False
    on_give_up: Callable[[], None] = lambda: None
    around_replays: Callable[[], AbstractContextManager[object]] = nullcontext
    on_capture: Callable[[Step[Any], float], None] = lambda step, capture_ms: None
    replicas: CollectiveState = field(default_factory=CollectiveState)
    counts: StepCounts = field(default_factory=StepCounts)
    is_examined: bool = False
    earns_graphs: bool = False
    tries_streams_together: bool = False
    graphs: GraphsOfRun = field(init=False)
    verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.verifier = Verifier(self.backend, settings.verify, self.learning_rates, self.agreement)
        self.graphs = GraphsOfRun(settings.max_graphs, settings.warmup_steps, self.wording)
