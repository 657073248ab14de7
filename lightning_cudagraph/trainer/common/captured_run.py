"""State of a run with captured steps, of training or of one kind of evaluation, and their recording."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_cudagraph.checks.audit.step_audit import StepAudit, is_audited, step_audit
from lightning_cudagraph.checks.guards.guards import GuardedValues, Guards, OutsideModel, Unguarded
from lightning_cudagraph.checks.guards.structure import Identity
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.graphed_step.processes import CollectiveRules, are_several
from lightning_cudagraph.tensors.recomputed import RecomputedStep, without_recomputed
from lightning_cudagraph.trainer.common.host_rules import (
    OWN_ATTRIBUTES,
    RUN_STATE,
    host_rules,
    outside_of_model,
)
from lightning_cudagraph.trainer.common.replicas import Replicas
from lightning_cudagraph.trainer.common.step_numbers import StepNumbers
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.config.support import ALONE, TELL_LIGHTNING
from lightning_cudagraph.trainer.logs.logged_step import Event
from lightning_cudagraph.trainer.logs.recorder import Logs
from lightning_cudagraph.trainer.metrics.model_metrics import is_metric
from lightning_cudagraph.trainer.metrics.states import StepMetrics

# Set by Lightning around each hook, and restored after it.
_OF_LIGHTNING = frozenset({"_current_fx_name"})


# A gradient and its version counter, or None.
Gradient = tuple[Identity, int] | None


def gradient_of(parameter: nn.Parameter) -> Gradient:
    """The gradient of a parameter, in a form that shows if it is rebound or written later."""
    gradient = parameter.grad
    return None if gradient is None else (Identity(gradient), gradient._version)


@contextmanager
def gradients_kept(
    parameters: Mapping[str, nn.Parameter], refusal: Callable[[str], CaptureError]
) -> Iterator[None]:
    """Refuse a step that rebinds or writes gradients of parameters, and restore them.

    Args:
        refusal: makes the error for the parameter of a name.
    """
    before = [(name, p, p.grad, gradient_of(p)) for name, p in parameters.items()]
    try:
        yield
        for name, parameter, _, was in before:
            if gradient_of(parameter) != was:
                raise refusal(name)
    finally:
        for _, parameter, gradient, _ in before:
            parameter.grad = gradient


def announce(text: str) -> None:
    """Tell the user a sentence about the graphs, in the first process."""
    rank_zero_info(f"lightning_cudagraph: {text}")


class RecordedParts(NamedTuple):
    """The parts of a step under way that are recorded beside its outputs.

    Attributes:
        recomputed: module attributes that torch's own hooks rebind in each step.
    """

    events: list[Event]
    recomputed: RecomputedStep
    audit: StepAudit | None


@dataclass
class CapturedRun:
    """State of a run with captured steps.

    Attributes:
        not_collective: captured code that must have no collectives, in words, and the remedy; None if
            the processes of the run replay it together.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    backend: Backend
    settings: Settings
    is_training: bool = field(default=True, kw_only=True)
    not_collective: tuple[str, str] | None = field(default=None, kw_only=True)
    replicas: Replicas = field(init=False)
    metrics: StepMetrics = field(init=False)
    guards: Guards = field(init=False)
    carried: ReboundAttributes = field(init=False)
    logs: Logs = field(init=False)
    numbers: StepNumbers = field(init=False)

    def __post_init__(self) -> None:
        trainer, module, harmless = self.trainer, self.module, self.settings.harmless
        unwatched = OWN_ATTRIBUTES | harmless
        self.replicas = Replicas(trainer.strategy)
        self.metrics = metrics = StepMetrics(
            module, trainer, self.backend, host_rules(trainer, harmless)
        )
        unguarded = Unguarded(unwatched, metrics.stays_on_host, metrics.host_names, RUN_STATE)
        self.guards = Guards(module, self.guarded_values(), unguarded, self.outside())
        self.carried = ReboundAttributes(module, self.backend.device, unwatched, is_metric)
        self.logs = Logs(trainer, module, metrics, adds=self.is_training)
        self.numbers = StepNumbers(self.progress, self.settings)
        if trainer.world_size == 1:
            self.not_collective = ALONE, TELL_LIGHTNING

    def progress(self) -> Any:
        """Return the tracker of Lightning's loop that counts optimizer steps; None in an evaluation."""

    def guarded_values(self) -> GuardedValues:
        state, shards = self.metrics.state, self.replicas.shards
        return GuardedValues(
            lambda: {**state.described(), **shards.described()},
            self.precision,
            lambda: (state.fits(), *shards.settings()),
        )

    def outside(self) -> OutsideModel:
        trainer = self.trainer
        return OutsideModel(
            around={"trainer": trainer},
            callees=lambda: [trainer.strategy, trainer.precision_plugin],
            roots=lambda: outside_of_model(trainer),
        )

    def precision(self) -> dict[str, Any]:
        """Return the identity of the precision plugin, by name."""
        plugin = self.trainer.precision_plugin
        described = f"{type(plugin).__qualname__} ({plugin.precision}, {id(plugin)})"
        return {"the precision plugin of the trainer": described}

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Context of a warm-up step, of which metric calls and effects are watched."""
        with self.metrics.learning(), self.guards.effects.watched(self.backend.join_other_threads):
            yield

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the host effects of Lightning's own code in the captures or the rehearsal of a step."""
        self.logs.begin_transaction()
        module = self.module
        with setting(module, _current_fx_name=module._current_fx_name), self.replicas.undone():
            self.metrics.prepare()
            yield

    @contextmanager
    def recorded(
        self,
        step_kind: Hashable,
        capturing: bool,
        hooks: Callable[[], str] = lambda: "",
        **rules: Any,
    ) -> Iterator[RecordedParts]:
        """Context of a step on the static batch: record what follows after a replay, and audit the rest.

        Args:
            hooks: returns the hooks at the graph breaks of the step, in words.
        """
        with ExitStack() as stack:
            events = stack.enter_context(self.logs.recorded(step_kind, capturing))
            if capturing and self.not_collective is not None and are_several():
                stack.enter_context(CollectiveRules(*self.not_collective))
            audit: StepAudit | None = None
            if is_audited(capturing):
                harmless, stays = self.settings.harmless | _OF_LIGHTNING, self.metrics.stays_on_host
                known = replace(host_rules(self.trainer, harmless, stays), **rules)
                device = self.backend.device
                audit = stack.enter_context(step_audit(self.module, self.trainer, device, known))
                if capturing:
                    self.guards.mentioned.append(audit.mentioned)
            recomputed = stack.enter_context(without_recomputed(self.module))
            stack.enter_context(self.carried.inside(hooks))
            stack.callback(self.metrics.undo)  # before the audit compares, behind an error too
            yield RecordedParts(events, recomputed, audit)
            self.metrics.state.write_back()
            if capturing and audit is not None:
                self.metrics.tell_reads(audit.mentioned)
