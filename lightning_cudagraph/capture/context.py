"""The context of a run of captured steps, which its engines and their parts share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_cudagraph.capture.steps import Step, StepCounts
from lightning_cudagraph.capture.stream_choice import Streams
from lightning_cudagraph.checks.carried import CarriedTensors
from lightning_cudagraph.checks.verify.verification import Verification
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import UnsupportedError, Wording
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.tensors.signatures import Signatures

__all__ = ["CaptureSettings", "RunContext"]


class CaptureSettings(Protocol):
    """The arguments of the user's that every front end has; each documents its own."""

    @property
    def warmup_steps(self) -> int:
        """Ordinary steps on the side stream before a capture."""

    @property
    def raise_unsupported(self) -> bool:
        """Raise when a step cannot be captured, instead of going on eagerly."""

    @property
    def verify(self) -> Verification:
        """The replays that are verified."""

    @property
    def streams(self) -> Streams:
        """Streams of a capture."""


@dataclass
class RunContext:
    """The context of a run, made once by a front end.

    Attributes:
        backend: where steps run.
        settings: the user's.
        carried: attributes that get another tensor in every step.
        announce: tells the user something once, in a sentence.
        wording: the words of the front end.
        agreement: with the other processes of the run, or None if there are none.
        max_signatures: number of batch signatures that have graphs. Batches of others run eagerly.
        learning_rates: the current ones; a replay with others than at the capture is verified too.
        narrow: given the error of a capture, returns True if less of the step will be captured.
        on_give_up: called when the run goes on without graphs.
        around_replays: the context manager around each replay.
        on_capture: called after each capture with the step and the host time that it took, in
            milliseconds.
        counts: the counts of the steps so far.
        is_examined: before an error of a capture is raised, one more step is taken and looked at.
        verifier: compares replays with eager steps.
        signatures: those that have graphs.
    """

    backend: Backend
    settings: CaptureSettings
    carried: CarriedTensors
    announce: Callable[[str], None]
    wording: Wording = field(default_factory=Wording)
    agreement: Agreement | None = None
    max_signatures: int = 1
    learning_rates: Callable[[], tuple[Any, ...]] = tuple
    narrow: Callable[[UnsupportedError], bool] = lambda error: False
    on_give_up: Callable[[], None] = lambda: None
    around_replays: Callable[[], AbstractContextManager[object]] = nullcontext
    on_capture: Callable[[Step[Any], float], None] = lambda step, capture_ms: None
    counts: StepCounts = field(default_factory=StepCounts)
    is_examined: bool = False
    verifier: Verifier = field(init=False)
    signatures: Signatures = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.verifier = Verifier(
            self.backend,
            settings.verify.replays,
            settings.verify.every_n_steps,
            self.learning_rates,
            self.agreement,
            settings.verify.budget,
        )
        self.signatures = Signatures(self.max_signatures, settings.warmup_steps, self.wording)
