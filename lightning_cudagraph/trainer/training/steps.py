"""One batch of training as the engine needs to know it, and what is done around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.graph import Cut
from lightning_cudagraph.capture.steps import Phase, Step
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.tensors.recomputed import detach_recomputed
from lightning_cudagraph.trainer.metrics.states import StepMetrics
from lightning_cudagraph.trainer.replicas import Replicas
from lightning_cudagraph.trainer.training.captured_step.optimizer_part import OptimizerPart
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepBody, StepOutputs
from lightning_cudagraph.trainer.training.captured_step.recording import Recorder
from lightning_cudagraph.trainer.training.closures import GraphClosure, GraphedOptimization
from lightning_cudagraph.trainer.training.eager_steps import EagerSteps
from lightning_cudagraph.trainer.training.hand_over import HandOver
from lightning_cudagraph.trainer.training.hooks.inner_hooks import InnerHooks
from lightning_cudagraph.trainer.training.hooks.user_hooks import gradients_unseen
from lightning_cudagraph.trainer.training.times.run_times import RunTimes, batch_of_step, step_number

__all__ = ["TrainingSteps"]


class TrainingSteps:
    """Takes the batches of a `fit` through their phases.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        backend: where steps run.
        optimization: Lightning's loop, in our form.
        engine: warms up, captures and replays.
        verifier: says how many replays it has checked.
        recorder: runs steps so that they can be captured.
        guards: what their graph bakes in.
        part: the optimizer's part of the steps.
        hooks: those inside the steps.
        metrics: the metrics of the module.
        replicas: of the module, in the processes of the run.
        times: what is measured of the run.
        eager: runs steps without a graph.
        hand_over: does what the host does after a replay.
        is_timed: the parts of steps are timed.

    Attributes:
        phase: of the step before.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        optimization: GraphedOptimization,
        engine: StepEngine[StepOutputs],
        verifier: Verifier,
        recorder: Recorder,
        guards: Guards,
        part: OptimizerPart,
        hooks: InnerHooks,
        metrics: StepMetrics,
        replicas: Replicas,
        times: RunTimes,
        eager: EagerSteps,
        hand_over: HandOver,
        is_timed: bool,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._backend = backend
        self._optimization = optimization
        self._engine = engine
        self._verifier = verifier
        self._recorder = recorder
        self._guards = guards
        self._part = part
        self._hooks = hooks
        self._metrics = metrics
        self._replicas = replicas
        self._times = times
        self._clock = times.clock
        self._eager = eager
        self._hand_over = hand_over
        self._is_timed = is_timed
        self.phase = Phase.EAGER
        self.is_in_step = False

    def take(self, closure: GraphClosure, body: StepBody, run: Callable[[], object]) -> Tensor | None:
        """Take a batch through its phase.

        Args:
            closure: Lightning's, for the batch.
            body: what is captured of the step.
            run: does the step eagerly.

        Returns:
            The loss if it was replayed, or None.
        """
        self._hooks.watch(closure, self._part.optimizer.optimizer)
        logs = self._recorder.logs
        logs.settle()
        steps_before = self._optimization.optim_progress.optimizer_steps

        def refresh() -> None:
            body.optimizer.refresh()
            self._metrics.adopt()
            logs.before_replay(body.place)

        step = self._step(closure, body, run, self._clock.is_due(steps_before))
        checked = self._verifier.checked
        self.is_in_step = True
        try:
            self.phase, outputs = self._engine.step(step, refresh)
        finally:
            self.is_in_step = False
        if self.phase is not Phase.CAPTURED or self._verifier.checked != checked:
            self._clock.interrupted()
        if self._verifier.checked != checked:
            self._times.pace.pause()  # that took several replays, and an eager step
        if outputs is not None:
            self._replicas.replayed(body.place)
            loss = self._hand_over.take_outputs(outputs, closure)
            is_next_due = self._clock.is_due(steps_before + body.has_optimizer)
            marks = outputs.marks if step.timed else None
            batch = batch_of_step(self._trainer)
            self._clock.ended(marks, step_number(self._trainer), is_next_due, *batch)
            return loss
        if self.phase is Phase.WARMING:
            logs.warmed_up(body.place, closure.batch)
            # The last of them is timed: like the others, it begins on a device with nothing left to do.
            self._backend.synchronize()
            if closure._result is not None and closure._result.closure_loss is None:
                self._engine.unsupported(self._recorder.returned_none())
        return None

    def _step(
        self, closure: GraphClosure, body: StepBody, run: Callable[[], object], timed: bool
    ) -> Step[StepOutputs]:
        place = body.place

        def record(batch: Any, cut: Cut, timed: bool) -> StepOutputs:
            with self._replicas.undone():  # each capture of the step begins where the first one does
                layers = self._times.layers() if timed else None
                return self._recorder.record(batch, closure, body, layers, cut)

        return Step(
            batch=closure.batch,
            run=lambda: self._eager.run(run, place),
            record=record,
            rehearse=lambda batch: self._recorder.record(batch, closure, body, None, None),
            between=lambda outputs, index: self._hand_over.host_turn(outputs, index, closure, body),
            values=StepOutputs.values,
            state=lambda: {**self._part.state(place), **self._metrics.tensors()},
            transaction=self._undone,
            parameters=lambda: self._part.parameters(place),
            place=place,
            is_broken=self._replicas.is_broken,
            mend=self._replicas.reset,
            unlike_others=self._replicas.unlike_others(place),
            in_window=self._trainer.accumulate_grad_batches > 1,
            kept=lambda: (
                self._part.behind is not None or not gradients_unseen(self._trainer, self._module)
            ),
            learning=self._learning,
            takes=self._times.takes(place, self._trainer.accumulate_grad_batches),
            timed=timed,
            upcoming=lambda outputs: self._clock.upcoming(outputs.marks),
            copying=self._clock.copying,
            run_last=(lambda: self._eager.run_marked(run, place)) if self._is_timed else None,
        )

    @contextmanager
    def _learning(self) -> Iterator[None]:
        detach_recomputed(self._module)  # before effects are watched, which holds what it compares
        with self._metrics.learning(), self._hooks.learning(), self._guards.effects.watched():
            yield

    @contextmanager
    def _undone(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._recorder.undone())
            stack.enter_context(self._part.undone())
            stack.enter_context(self._replicas.undone())
            self._metrics.prepare()
            yield
