"""The state that all captured modules of a `fit` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl

from lightning_cudagraph.capture.steps import Phase, StepCounts
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.compat.attributes import OfThread
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.trainer.common.host_rules import host_rules
from lightning_cudagraph.trainer.config.settings import Settings

# Of a LightningModule inside: a replay logs nothing.
_LOGGING = {
    function.__code__: (f"self.{function.__name__}", "Return the value, and log it in `training_step`.")
    for function in (pl.LightningModule.log, pl.LightningModule.log_dict)
}


@dataclass
class ModulesRun:
    """The state that all captured modules of a `fit` share.

    Attributes:
        on: a training step is under way, and no call of one of the modules that is watched.
        step: the number of the step.
        rules: those of the host code in a captured module.
        calls: the phase of each call in that step, and the reason of an eager one.
    """

    trainer: pl.Trainer
    backend: Backend
    settings: Settings
    announce: Callable[[str], None]
    counts: StepCounts = field(default_factory=StepCounts)
    on: OfThread[bool] = field(default_factory=lambda: OfThread(False))
    step: int = 0
    calls: list[tuple[Phase, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.backend, self.settings.verify)
        # Not even a metric stays on the host: in a captured module it would be called in no replay.
        rules = host_rules(self.trainer, self.settings.harmless, lambda module: False)
        self.rules = replace(rules, refused={**rules.refused, **_LOGGING})

    def begin_step(self) -> None:
        """Count a step."""
        self.step += 1
        self.calls.clear()

    def end_step(self) -> None:
        """Count a step by the calls in it: one that is not a replay counts for all."""
        none = Phase.EAGER, "no captured module was called"
        order = Phase.EAGER, Phase.WARMING, Phase.CAPTURED
        self.counts.note(*min(self.calls, key=lambda call: order.index(call[0]), default=none))

    def changed(self, guards: Guards, before_capture: bool = False) -> str | None:
        """The first change since the captures with these guards, in words; None if there is none.

        Args:
            before_capture: compare everything, as the record is that of a new graph from then on.
        """
        if before_capture:
            guards.suspect()
        if change := guards.changed():
            return change
        moved = self.backend.host_value_moved()
        return "a tensor in host memory, which a graph has as a number, changed" if moved else None
