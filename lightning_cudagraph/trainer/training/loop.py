"""The seat in Lightning's training loop.

Lightning's loop stays in charge. One object of it is replaced by a thin subclass, whose closures say
which batch they belong to, and one method of the strategy, in which the whole optimizer step happens:
that is where a batch is warmed up, captured or replayed. Where the optimizer cannot be captured, the
call of the closure is that place, and the optimizer steps eagerly behind it. Everything replaced goes
through one `ExitStack`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.steps import Phase, Place, Step, StepCounts
from lightning_cudagraph.checks.carried import CarriedTensors
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.compat.features import SHORT_WAY
from lightning_cudagraph.compat.method_patches import replace_method
from lightning_cudagraph.compat.tables import notes, notes_of_captures
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.optimizers import EagerOptimizer
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.timing.layers.layers import untimed_notes
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.timing.readings.pace import Plain
from lightning_cudagraph.timing.readings.rank_times import SharedRun
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.host_rules import OWN_ATTRIBUTES, host_rules
from lightning_cudagraph.trainer.metrics.of_model import is_metric
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.profilers import around_replays, profiler_notes, progress_bar_notes
from lightning_cudagraph.trainer.replicas import Replicas
from lightning_cudagraph.trainer.training.advance import QuickAdvance
from lightning_cudagraph.trainer.training.captured_step.compiled_step import (
    compile_step,
    is_step_compiled,
    logging_uncompiled,
)
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepBody, StepOutputs
from lightning_cudagraph.trainer.training.captured_step.recording import Recorder
from lightning_cudagraph.trainer.training.closures import GraphClosure, GraphedOptimization
from lightning_cudagraph.trainer.training.eager_steps import EagerSteps
from lightning_cudagraph.trainer.training.guards import training_guards
from lightning_cudagraph.trainer.training.hand_over import HandOver
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.plain_replay import PlainReplay
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from lightning_cudagraph.trainer.training.times.baseline import PlainSteps
from lightning_cudagraph.trainer.training.times.run_times import RunTimes, ended_by, step_number
from lightning_cudagraph.trainer.training.transfer import BatchTransfer

__all__ = ["GraphedTraining"]


class GraphedTraining:
    """One `fit` whose steps are captured.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        backend: where steps are captured.
        settings: what the user asked for.
        agreement: with the other processes of the run, or None if there are none.
        run: as all of them know it.

    Raises:
        UnsupportedError: if the optimizer can be captured in no form that was asked for.
        ConfigurationError: if the timings name a layer that is not there.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        settings: Settings,
        agreement: Agreement | None = None,
        run: SharedRun | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._backend = backend
        self._settings = settings
        self._times = RunTimes(trainer, module, backend, settings.timings, run)
        self._clock = self._times.clock
        if settings.compile or is_step_compiled(module):
            self._times.names = []  # a hook in compiled code would change what is compiled
        self._patches = ExitStack()
        self._replicas = Replicas(trainer.strategy)
        if self._replicas.shards and isinstance(settings.streams, int) and settings.streams > 1:
            raise UnsupportedError(
                "Sharded weights are gathered into memory that a step takes and lets go of, and for that"
                " there are no ops: on several streams, nothing would say who comes first.",
                'Pass `CUDAGraphCallback(streams="auto")`, or leave it out.',
            )
        self._in_step = False
        self._part = OptimizerPart(
            trainer,
            module,
            backend,
            settings.scope,
            lambda reason: self._engine.drop(reason),
            self._announce,
        )
        self._metrics = StepMetrics(module, trainer, backend, host_rules(trainer, settings.harmless))
        self._optimization = GraphedOptimization.__new__(GraphedOptimization)
        self._hooks = InnerHooks(trainer, module, lambda: self._part.behind is not None)
        self._guards = training_guards(
            trainer,
            module,
            self._part,
            self._hooks,
            self._metrics,
            self._replicas,
            settings.harmless,
        )
        carried = CarriedTensors(module, backend.device, OWN_ATTRIBUTES | settings.harmless, is_metric)
        self._recorder = Recorder(
            trainer,
            module,
            backend,
            self._optimization,
            self._guards,
            self._hooks,
            carried,
            settings.harmless,
            self._metrics,
            settings.timings.placement if settings.timings is not None else "forked",
        )
        self._verifier = Verifier(
            backend,
            settings.verify.replays,
            settings.verify.every_n_steps,
            lambda: self._part.optimizer.learning_rates(),
            agreement,
            settings.verify.budget,
        )
        self._engine: StepEngine[StepOutputs] = StepEngine(
            backend=backend,
            guards=self._guards,
            carried=carried,
            verifier=self._verifier,
            is_settled=lambda: self._part.is_settled() and self._replicas.is_settled(),
            warmup_steps=settings.warmup_steps,
            raise_unsupported=settings.raise_unsupported,
            streams=settings.streams,
            announce=self._announce,
            narrow=self._part.put_behind,
            on_give_up=self._part.let_go,
            around_replays=around_replays(trainer),
            on_capture=self._captured,
            agreement=agreement,
        )
        self._plain = PlainSteps(trainer, backend, settings)
        self._eager = EagerSteps(trainer, module, self._recorder.logs, self._replicas, self._times)
        self._hand_over = HandOver(
            trainer, self._optimization, self._guards, self._hooks, self._metrics, self._times
        )
        self._steps = TrainingSteps(
            trainer,
            module,
            backend,
            self._optimization,
            self._engine,
            self._verifier,
            self._recorder,
            self._guards,
            self._part,
            self._hooks,
            self._metrics,
            self._replicas,
            self._times,
            self._eager,
            self._hand_over,
            is_timed=settings.timings is not None,
        )
        # Last, because it changes the optimizer: nothing after it may fail.
        self._part.prepare(trainer.optimizers[0])

    @property
    def counts(self) -> StepCounts:
        """What became of the steps so far."""
        return self._engine.counts

    @property
    def notes(self) -> list[str]:
        """What was changed for the capture, in words."""
        off = [*notes_of_captures(self._backend.device), *notes(SHORT_WAY), *self._times.off]
        return [*self._part.notes, *profiler_notes(self._trainer), *off]

    def agree(self, agreement: Agreement) -> None:
        """Before the first step: let what all processes capture have the same parts.

        Args:
            agreement: with the others, which ask, too.
        """
        self._part.agree(agreement)

    def install(self) -> None:
        """Take the seat."""
        loop = self._trainer.fit_loop.epoch_loop
        strategy = self._trainer.strategy
        self._patches.enter_context(self._replicas.unobserved())
        if self._settings.compile or is_step_compiled(self._module):
            self._patches.enter_context(logging_uncompiled())
        if self._settings.compile:
            compile_step(self._module, self._backend.device, self._patches)
        graphed = self._optimization
        graphed.install(loop, self._call_closure, self._engine.counts.note_eager, self._patches)
        self._eager_step: Callable[..., Any] = strategy.optimizer_step
        replace_method(strategy, "optimizer_step", self._optimizer_step, self._patches)
        self._transfer = BatchTransfer(
            self._trainer,
            self._module,
            strategy.batch_to_device,
            # Batches that only update batch norm are not for graphs.
            lambda: None if graphed._skip_backward else self._engine.static,
            lambda: self._clock.copying() if self._clock.is_due(self._steps_before()) else None,
        )
        replace_method(strategy, "batch_to_device", self._transfer, self._patches)
        logs = self._recorder.logs
        self._advance = QuickAdvance(
            self._trainer,
            self._module,
            lambda: self._steps.phase is Phase.CAPTURED,
            self._transfer,
            PlainReplay(
                self._trainer,
                self._engine,
                self._part,
                self._hooks,
                self._metrics,
                logs,
                self._clock,
                self._replicas,
                self._hand_over.account_plain,
            ),
            logs,
            self._suspect_between,
        )
        replace_method(loop, "advance", self._advance, self._patches)
        metrics = loop._results.metrics

        def settled_metrics(on_step: bool) -> Any:
            logs.settle()
            return metrics(on_step)

        # What Lightning, and whoever asks the trainer for its metrics, takes them from.
        replace_method(loop._results, "metrics", settled_metrics, self._patches)

    def close(self) -> None:
        """Leave the seat: put everything back, and let go of graphs and their memory."""
        with ExitStack() as stack:  # every part, also where one of them fails
            stack.callback(self._recorder.logs.close)
            stack.callback(self._engine.close)
            stack.callback(self._times.close)
            stack.callback(self._part.optimizer.restore)
            stack.callback(self._patches.close)

    @property
    def is_in_step(self) -> bool:
        """Whether a step is under way, with a hook of its own in it."""
        return self._steps.is_in_step

    @property
    def is_under_way(self) -> bool:
        """Whether the fit has not come to its end; to be asked by who is called in it, if so."""
        loop: Any = self._trainer.fit_loop
        code = inspect.unwrap(type(loop).run).__code__
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is code and frame.f_locals.get("self") is loop:
                return True
            frame = frame.f_back
        return False

    @property
    def global_step(self) -> int:
        """That of the trainer."""
        return self._trainer.global_step

    def suspect(self) -> None:
        """Something other than training steps has happened, and can have changed what is baked in."""
        self._engine.pause()
        self._transfer.suspect()
        self._advance.suspect()
        self._times.pause()

    def _suspect_between(self) -> None:
        """The same between two steps, where time goes on being measured."""
        self._guards.suspect()
        self._transfer.suspect()

    def leave(self) -> None:
        """Graphs of evaluation come now, which may write where those of training keep gradients."""
        self._engine.leave()

    @property
    def stage(self) -> StageSummary:
        """Counts and times of the steps so far."""
        return StageSummary.of(self.counts, self._verifier.checked, self._times.pace)

    def finish(
        self, summary: RunSummary, notes: Sequence[str] = (), exception: BaseException | None = None
    ) -> RunSummary:
        """Read what is left to read.

        Args:
            summary: of the run so far.
            notes: what the user should know besides.
            exception: what has ended the run, if it has not come to its end. Then nothing is read.

        Returns:
            The summary of the whole run.
        """
        said = [*self._notes(), *notes]
        # A device that has failed, or hangs, would not answer.
        if self._part.scaler is not None and exception is None:
            skipped = int(self._part.scaler.skipped_steps)
            said.append(f"{skipped} step(s) skipped, because a gradient overflowed")
        ended = ended_by(self._trainer, exception)
        finished = self._times.finish(replace(summary, notes=tuple(said), ended=ended))
        self._times.show(str(finished), step_number(self._trainer))
        return finished

    def _notes(self) -> list[str]:
        notes = [*self._verifier.notes, *self._engine.notes, *self.notes, *self._metrics.notes]
        untimed = self._recorder.untimed
        if self._settings.timings is not None and is_step_compiled(self._module):
            untimed = untimed | {"layers": "the step is compiled as a whole"}
        if self._settings.timings is not None and self._part.behind is not None:
            untimed = untimed | {
                "what comes after the backward pass": (
                    "it runs eagerly, behind the graph; shares are of what comes before"
                )
            }
        notes += untimed_notes(untimed)
        if self._settings.timings is not None and self._backend.streams > 1 and self.counts.captures:
            notes.append(
                "on several streams layers overlap; the time of one is from when all before it has"
                " finished to when it has, too"
            )
        notes += progress_bar_notes(self._trainer)
        return notes

    def _announce(self, text: str) -> None:
        rank_zero_info(f"lightning_cudagraph: {text}")
        self._times.happened(text, step_number(self._trainer))

    def _captured(self, step: Step[StepOutputs], capture_ms: float) -> None:
        taken_mib = self.counts.memory_bytes / 2**20
        text = f"Captured in {capture_ms:.0f} ms: {step.description}. {taken_mib:.1f} MiB taken so far."
        self._times.happened(text, step_number(self._trainer))

    def _steps_before(self) -> int:
        """How many steps of the optimizer came before the one that the batch at hand belongs to."""
        return self._optimization.optim_progress.optimizer_steps

    def _optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """In the place of `Strategy.optimizer_step`: the whole training step happens in here."""
        try:
            self._part.adopt(optimizer, not self._engine.given_up)
        except UnsupportedError as error:
            self._engine.unsupported(error)
        if not isinstance(closure, GraphClosure):
            if not self._optimization._skip_backward:
                reason = "a step of the optimizer without one of Lightning's closures"
                self._engine.counts.note_eager(reason)
            with self._backend.on_side_stream():
                return self._run(optimizer, closure, model, kwargs)
        plain = self._plain.next(self._engine.counts, closure.batch)
        if plain is not Plain.NOT and not self._engine.given_up:
            return self._plainly(plain, optimizer, closure, model, kwargs)
        if self._part.behind is not None:
            # The closure is what is captured, wherever the optimizer calls it.
            with self._part.arithmetic(optimizer, capturing=False):
                result = self._eager_step(optimizer, closure, model, **kwargs)
            self._times.pace.tick(self._steps.phase)
            if self._steps.phase is Phase.CAPTURED:  # only now it has ended
                is_next_due = self._clock.is_due(self._steps_before() + 1)
                self._clock.ended(None, step_number(self._trainer), is_next_due)
            return result
        returned: list[Any] = []
        body = StepBody(
            lambda inner: self._eager_step(optimizer, inner, model, **kwargs),
            self._part.optimizer,
            lambda capturing: self._part.arithmetic(optimizer, capturing),
            self._place(closure, steps=True),
        )
        outputs = self._steps.take(
            closure, body, lambda: returned.append(self._run(optimizer, closure, model, kwargs))
        )
        self._times.pace.tick(self._steps.phase)
        return returned[0] if outputs is None else outputs

    def _plainly(
        self,
        plain: Plain,
        optimizer: Optimizer,
        closure: GraphClosure,
        model: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """A step that nothing watches, to be measured."""
        self._steps.is_in_step = True
        try:
            with self._backend.on_side_stream():
                result = self._run(optimizer, closure, model, kwargs)
        finally:
            self._steps.is_in_step = False
        if plain is Plain.LAST:
            self._backend.synchronize()
        self._engine.counts.warmed_up += 1
        self._times.pace.tick(Phase.WARMING, plain)
        return result

    def _call_closure(self, closure: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
        """In the place of `Closure.__call__`."""

        def eagerly() -> Tensor | None:
            self._transfer.use_own(closure)
            return self._eager.call(closure, plain)

        if self._in_step:
            with self._part.optimizer.floats_inside():
                return eagerly()
        # The optimizer steps behind the graph, or not at all on this batch.
        optimizer = EagerOptimizer(self._part.optimizer.optimizer)
        place = self._place(closure, steps=False)
        body = StepBody(lambda inner: inner(), optimizer, lambda capturing: nullcontext(), place)
        loss: list[Tensor | None] = []
        outputs = self._steps.take(closure, body, lambda: loss.append(eagerly()))
        return loss[0] if outputs is None else outputs

    def _place(self, closure: GraphClosure, steps: bool) -> Place:
        return Place(closure.drops_gradients, steps, self._replicas.syncs)

    def _run(self, optimizer: Optimizer, closure: Any, model: Any, kwargs: dict[str, Any]) -> Any:
        """The training step, eagerly, in the arithmetic of the captured one."""
        self._part.optimizer.refresh()
        with self._part.arithmetic(optimizer, capturing=False):
            self._in_step = True
            try:
                return self._eager_step(optimizer, closure, model, **kwargs)
            finally:
                self._in_step = False
