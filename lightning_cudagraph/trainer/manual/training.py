"""Capture of whole steps of manual optimization, by the callback.

The strategy's `training_step` is replaced for the `fit`. It captures the module's whole `training_step`:
every forward and backward pass, `toggle_optimizer`, clipping by hand, and the steps of all optimizers,
with the engine of `GraphedStep` (`graphed_step/run.py`). Logged values and calls of metrics follow after
each replay, as in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.amp import GradScaler

from lightning_cudagraph.capture.gradients.lost_gradients import LostGradients
from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.features import HELD_GRADIENTS
from lightning_cudagraph.compat.method_patches import Original, in_place, patch_method
from lightning_cudagraph.compat.tables import notes
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.errors import (
    FORWARD_BACKWARD,
    OR_FORWARD_BACKWARD,
    UnsupportedError,
    Wording,
    see,
)
from lightning_cudagraph.graphed_step.framework import scaler_calls, scheduler_steps
from lightning_cudagraph.graphed_step.gradients import GradientEffects
from lightning_cudagraph.graphed_step.record import Arguments, StepFunction, StepRecorder, StepResult
from lightning_cudagraph.graphed_step.replicas import StepReplicas
from lightning_cudagraph.graphed_step.run import StepRun
from lightning_cudagraph.graphed_step.step import GraphedStep
from lightning_cudagraph.optim.steps import OptimizerSteps
from lightning_cudagraph.tensors.batch import map_leaves
from lightning_cudagraph.tensors.host_values import HostReads, as_output
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.trainer.common.captured_run import announce
from lightning_cudagraph.trainer.common.host_rules import host_rules
from lightning_cudagraph.trainer.common.profilers import unprofiled
from lightning_cudagraph.trainer.common.step_numbers import STEP_GETTERS, StepNumbers
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.logs.recorder import Logs
from lightning_cudagraph.trainer.manual.frameworks import OWN_OF_TOGGLING, ManualOptimization
from lightning_cudagraph.trainer.manual.schedulers import (
    MovedRate,
    ScheduledOptimizers,
    noting_step,
    refuse_read,
)
from lightning_cudagraph.trainer.metrics.calls import Later
from lightning_cudagraph.trainer.metrics.model_metrics import is_metric
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.training.times.run_times import ended_by

_WORDING = Wording(
    words=dict.fromkeys(
        (FORWARD_BACKWARD, OR_FORWARD_BACKWARD), "capture the parts before it with `GraphedStep`"
    )
)


class ManualTraining:
    """One `fit` in manual optimization, with graphs of whole steps."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        settings: Settings,
        narrow: Callable[[UnsupportedError], bool],
    ) -> None:
        _check(module, settings)
        self._trainer = trainer
        self._patches = ExitStack()
        self._is_timed = settings.timings is not None
        self._step = Original(trainer.strategy, "training_step")
        self.is_in_step = False
        framework = _WholeStep(trainer)
        rules = framework.rules(settings.harmless, framework.scaler())
        framework.metrics = StepMetrics(module, trainer, backend, rules)
        framework.logs = Logs(trainer, module, framework.metrics, adds=False)
        framework.numbers = StepNumbers(framework.steps, settings)
        optimizers = {f"optimizers[{i}]": each for i, each in enumerate(trainer.strategy.optimizers)}
        self._run = StepRun(
            StepFunction(
                _of_strategy(self._step, framework),
                module,
                optimizers,
                framework.scaler(),
                framework,
                StepReplicas(module),
                recorder=_ManualRecorder,
            ),
            backend,
            settings,
            processes=None,
            announce=announce,
            wording=_WORDING,
            narrow=narrow,
        )

    @property
    def notes(self) -> list[str]:
        return notes(HELD_GRADIENTS)

    @property
    def counts(self) -> StepCounts:
        return self._run.counts

    @property
    def stage(self) -> StageSummary:
        return self._run.summary.calls

    def install(self) -> None:
        patch_method(self._trainer.strategy, "training_step", self._training_step, self._patches)

    def close(self) -> None:
        """Undo the patch, and release the graphs and their memory."""
        with ExitStack() as stack:  # both, even if one fails
            stack.callback(self._run.close)
            stack.callback(self._patches.close)

    def suspect(self) -> None:
        """Compare everything before the next replay: code other than training steps has run."""
        self._run.suspect()

    def leave(self) -> None:
        """Prepare for graphs of evaluation, which may write where those of training keep gradients."""
        self._run.leave()

    def finish(
        self, summary: RunSummary, notes: Sequence[str] = (), exception: BaseException | None = None
    ) -> RunSummary:
        said = [*self._run.notes, *notes]
        if self._is_timed:
            said.append("layers are not timed in manual optimization")
        ended = ended_by(self._trainer, exception)
        return replace(summary, fit=self.stage, notes=tuple(said), ended=ended)

    def _training_step(self, batch: Any, *indices: int) -> Any:
        self.is_in_step = True
        try:
            return self._run.call((batch, *indices), {})
        except UnsupportedError as error:
            _WORDING.rephrase(error)
            raise
        finally:
            self.is_in_step = False


def _check(module: pl.LightningModule, settings: Settings) -> None:
    if settings.compile:
        raise UnsupportedError(
            "`compile=True` compiles the step of automatic optimization.",
            "Leave it out, and compile the module or parts of it with `torch.compile`.",
        )
    if settings.scope == "forward_backward":
        raise UnsupportedError(
            '`scope="forward_backward"` leaves the optimizer to Lightning, and here the step calls it.',
            "Leave it out, or capture parts with `GraphedStep`." + see("manual_optimization"),
        )
    for name, value in [*vars(module).items()]:
        if isinstance(value, GraphedStep) and not value.is_off:
            raise UnsupportedError(
                f"`{type(module).__qualname__}.{name}` is a `GraphedStep`, which captures a part of the"
                " step, and the callback captures the whole.",
                "Leave out the callback or the `GraphedStep`.",
            )


def _of_strategy(step: Callable[..., Any], framework: _WholeStep) -> Callable[..., Any]:
    # A function of this module: with a bound method, the audit would take the strategy for the user's.
    def training_step(*args: Any) -> Any:
        try:
            return step(*args)
        finally:
            framework.scheduled.restore()

    return training_step


class _WholeStep(ManualOptimization):
    """Lightning around a whole step."""

    metrics: StepMetrics
    logs: Logs
    numbers: StepNumbers

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.scheduled = ScheduledOptimizers()
        self.host_reads = HostReads(user_location)

    def rules(self, harmless: frozenset[str], scaler: GradScaler | None) -> HostRules:
        # Not those of the trainer: `noted` replaces their `step`.
        return replace(
            host_rules(self.trainer, harmless | OWN_OF_TOGGLING),
            refused={**scheduler_steps(), **scaler_calls(scaler)},
            noted=STEP_GETTERS,
        )

    @contextmanager
    def noted(self, notes: list[Callable[[], object]]) -> Iterator[None]:
        with super().noted(notes), ExitStack() as stack:
            for config in self.trainer.lr_scheduler_configs:
                step = noting_step(notes, config.scheduler, self.scheduled)
                stack.enter_context(in_place(config.scheduler, "step", step))
            for wrapper in self._wrappers():
                count = self._counting(wrapper)
                stack.enter_context(in_place(wrapper, "_on_after_step", count))
            yield

    def steps(self) -> Any:
        """Return the tracker of the steps of all optimizers, `global_step`."""
        return self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total

    def _counting(self, wrapper: Any) -> Callable[[], None]:
        """Return a function that counts a step for what comes after it in the same capture."""
        note = wrapper._on_after_step

        def count() -> None:
            note()
            self.steps().completed += 1

        return count

    @contextmanager
    def reads(self, mentioned: MentionedNames) -> Iterator[None]:
        yield
        self.metrics.tell_reads(mentioned)


@dataclass(frozen=True)
class _BatchArguments(Arguments):
    """The arguments of `training_step`: the batch, and the indices behind it."""

    indices: tuple[int, ...] = ()

    def call(self, function: Callable[..., Any], batch: Any = None) -> Any:
        if batch is None:
            return function(self.batch, *self.indices)
        return map_leaves(function(batch, *self.indices), _checked)


def _checked(leaf: Any) -> Any:
    if isinstance(leaf, MovedRate):
        refuse_read()
    if isinstance(leaf, Later):
        leaf.refuse()
    return as_output(leaf)


class _ManualRecorder(StepRecorder):
    """Recorder of a `training_step`, with what it logs."""

    def __init__(
        self,
        of: StepFunction,
        optimizers: OptimizerSteps,
        rules: HostRules,
        device: torch.device,
        are_agreed: bool,
    ) -> None:
        super().__init__(of, optimizers, rules, device, are_agreed)
        assert isinstance(of.framework, _WholeStep)
        self.whole = of.framework
        unwatched = self.whole.unwatched | rules.harmless
        self.carried = ReboundAttributes(of.model, device, unwatched, is_metric)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        batch, *indices = args
        numbers = self.whole.numbers.of(indices[0]) if indices else {}
        return _BatchArguments(batch, 1, numbers, tuple(indices))

    def lost_gradients(self, batch: Any) -> LostGradients:
        return LostGradients(self._model, self._optimizers.parameters().values(), batch=batch)

    def record(
        self,
        batch: Any,
        arguments: Arguments,
        gradient_effects: GradientEffects,
        guards: Guards,
        capturing: bool,
    ) -> StepResult:
        trainer, logs, numbers = self.whole.trainer, self.whole.logs, self.whole.numbers
        reads = self.whole.host_reads if capturing else None
        if capturing and arguments.numbers:
            assert isinstance(arguments, _BatchArguments)
            index, *others = arguments.indices
            arguments = replace(arguments, indices=(numbers.noted(reads, index), *others))
        with (
            unprofiled(trainer),
            numbers.noted_step(reads),
            logs.recorded(gradient_effects, capturing) as events,
        ):
            result = super().record(batch, arguments, gradient_effects, guards, capturing)
        logged = logs.finished(events, gradient_effects, capturing)
        result.host_notes.append(partial(logged.hand_over, trainer))
        result.logged = logged.values
        return result

    @contextmanager
    def undone(self) -> Iterator[None]:
        self.whole.logs.begin_transaction()
        module: Any = self.whole.trainer.lightning_module
        with super().undone(), setting(module, _current_fx_name=module._current_fx_name):
            yield
