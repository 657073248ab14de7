"""Batches of training on their way to the engine, and what is done around their steps.

Lightning makes a closure of each batch and hands it to the strategy, in which the whole optimizer step
happens: that is where a batch is warmed up, captured or replayed. Where the optimizer steps behind the
graph, or not at all on this batch, the call of the closure is that place. Where a replay is all there is
to do, Lightning's loop needs no closure, and asks for the replay at once (`again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product, starmap
from typing import Any, TypeVar

from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.graph import Cut
from lightning_cudagraph.capture.steps import Phase, Place, Replay, Step
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.compat.method_patches import replace_method
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.optimizers import EagerOptimizer
from lightning_cudagraph.tensors.recomputed import detach_recomputed
from lightning_cudagraph.timing.readings.pace import Plain
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepBody, StepOutputs
from lightning_cudagraph.trainer.training.captured_step.recording import Recorder
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.eager_steps import EagerSteps
from lightning_cudagraph.trainer.training.hand_over import HandOver
from lightning_cudagraph.trainer.training.hooks.user_hooks import gradients_unseen
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.baseline import PlainSteps
from lightning_cudagraph.trainer.training.times.run_times import step_number
from lightning_cudagraph.trainer.training.transfer import BatchTransfer

__all__ = ["NOT_PLAIN", "TrainingSteps"]

R = TypeVar("R")

NOT_PLAIN = object()

# Of the optimization; what somebody else has put in the place of one would be called.
_METHODS = ("run", "_make_closure", "_optimizer_step")


class TrainingSteps:
    """Takes the batches of a `fit` through their phases.

    Attributes:
        phase: of the step before.
        is_in_step: a step is under way.
        transfer: takes batches to the device, from when this is installed.
    """

    transfer: BatchTransfer

    def __init__(
        self,
        run: TrainingRun,
        engine: StepEngine[StepOutputs],
        verifier: Verifier,
        recorder: Recorder,
    ) -> None:
        self._run = run
        # Each replay asks for these.
        self._part = run.part
        self._strategy = run.trainer.strategy
        self._optimization = run.optimization
        self._replicas = run.replicas
        self._clock = run.times.clock
        self._engine = engine
        self._verifier = verifier
        self._recorder = recorder
        self._eager = EagerSteps(run)
        self._plain = PlainSteps(run.trainer, run.backend, run.settings)
        self._hand_over = HandOver(run)
        self._refreshes = {
            place: partial(self._refresh, place)
            for place in starmap(Place, product((False, True), repeat=3))
        }
        self.phase = Phase.EAGER
        self.is_in_step = False
        self._is_in_optimizer = False  # in an eager step, whose closure the optimizer calls

    def install(self, patches: ExitStack) -> None:
        """Take the places of Lightning's where batches come by, until `patches` is closed."""
        run, strategy = self._run, self._strategy
        loop = run.trainer.fit_loop.epoch_loop
        run.optimization.install(loop, self._call_closure, self._engine.counts.note_eager, patches)
        self._eager_step: Callable[..., Any] = strategy.optimizer_step
        replace_method(strategy, "optimizer_step", self._optimizer_step, patches)
        self.transfer = BatchTransfer(run, self._engine)
        replace_method(strategy, "batch_to_device", self.transfer, patches)

    def _optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """In the place of `Strategy.optimizer_step`: the whole training step happens in here."""
        run, part = self._run, self._part
        try:
            part.adopt(optimizer, not self._engine.given_up)
        except UnsupportedError as error:
            self._engine.unsupported(error)

        def eagerly() -> Any:
            """In the arithmetic of the captured step."""
            part.optimizer.refresh()
            with part.arithmetic(optimizer, capturing=False):
                self._is_in_optimizer = True
                try:
                    return self._eager_step(optimizer, closure, model, **kwargs)
                finally:
                    self._is_in_optimizer = False

        if not isinstance(closure, GraphClosure):
            if not run.optimization._skip_backward:
                reason = "a step of the optimizer without one of Lightning's closures"
                self._engine.counts.note_eager(reason)
            with run.backend.on_side_stream():
                return eagerly()
        plain = self._plain.next(self._engine.counts, closure.batch)
        if plain is not Plain.NOT and not self._engine.given_up:
            return self._plainly(plain, eagerly)
        if part.behind is not None:
            # The closure is what is captured, wherever the optimizer calls it.
            with part.arithmetic(optimizer, capturing=False):
                result = self._eager_step(optimizer, closure, model, **kwargs)
            run.times.pace.tick(self.phase)
            if self.phase is Phase.CAPTURED:  # only now it has ended
                is_next_due = self._clock.is_due(run.steps_before + 1)
                self._clock.ended(None, step_number(run.trainer), is_next_due)
            return result
        body = StepBody(
            lambda inner: self._eager_step(optimizer, inner, model, **kwargs),
            part.optimizer,
            lambda capturing: part.arithmetic(optimizer, capturing),
            Place(closure.drops_gradients, True, self._replicas.syncs),
        )
        return self._take(closure, body, eagerly)

    def _plainly(self, plain: Plain, eagerly: Callable[[], Any]) -> Any:
        """Do a step that nothing watches, to measure it."""
        backend, times = self._run.backend, self._run.times
        self.is_in_step = True
        try:
            with backend.on_side_stream():
                result = eagerly()
        finally:
            self.is_in_step = False
        if plain is Plain.LAST:
            backend.synchronize()
        self._engine.counts.warmed_up += 1
        times.pace.tick(Phase.WARMING, plain)
        return result

    def _call_closure(self, closure: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
        """In the place of `Closure.__call__`."""

        def eagerly() -> Tensor | None:
            self.transfer.use_own(closure)
            return self._eager.call(closure, plain)

        if self._is_in_optimizer:
            with self._part.optimizer.floats_inside():
                return eagerly()
        # The optimizer steps behind the graph, or not at all on this batch.
        body = StepBody(
            lambda inner: inner(),
            EagerOptimizer(self._part.optimizer.optimizer),
            lambda capturing: nullcontext(),
            Place(closure.drops_gradients, False, self._replicas.syncs),
        )
        return self._take(closure, body, eagerly)

    def is_plain(self) -> bool:
        """Whether Lightning would do nothing of somebody else's on the way of a batch to its replay."""
        trainer = self._run.trainer
        optimization = self._optimization
        optimizer: LightningOptimizer = self._strategy._lightning_optimizers[0]
        return (
            trainer.fit_loop.epoch_loop.automatic_optimization is optimization
            and vars(optimization).keys().isdisjoint(_METHODS)
            and "step" not in vars(optimizer)
            and optimizer._on_before_step is do_nothing_closure
            and optimizer._on_after_step is do_nothing_closure
            and not self._run.hooks.after_backward
        )

    def again(self, batch: Any, drops: bool, steps: bool, wanted: bool) -> Any:
        """Do a step without a closure, if a replay is all there is to do.

        Args:
            batch: the batch of the step.
            drops: it drops gradients.
            steps: the optimizer takes its step in it.
            wanted: the outputs are.

        Returns:
            The outputs of the step as hooks are given them, or None if they are not wanted. `NOT_PLAIN`,
            if nothing has happened.
        """
        part, optimization = self._part, self._optimization
        place = Place(drops, steps, steps and bool(self._replicas.wrappers))
        if (
            part.behind is not None
            or optimization._skip_backward
            or not part.is_of(self._strategy.optimizers[0])
            or self._replicas.unlike_others(place)
        ):
            return NOT_PLAIN
        # As Lightning counts the steps of the optimizer.
        progress = optimization.optim_progress.optimizer.step
        total, current = progress.total, progress.current
        timed = self._clock.is_due(total.completed)
        replay = Replay(batch, place, timed, self._upcoming, self._clock.copying)
        if steps:
            total.ready += 1
            current.ready += 1
        outputs = self._engine.again(replay, self._refreshes[place])
        if outputs is None:
            if steps:
                total.ready -= 1
                current.ready -= 1
            return NOT_PLAIN
        given = self._hand_over.after(outputs, place, timed, wanted)
        if steps:
            total.completed += 1
            current.completed += 1
        return given

    def _take(self, closure: GraphClosure, body: StepBody, eagerly: Callable[[], R]) -> R | Tensor:
        """Do a step with a closure of Lightning's, in whichever way its phase says.

        Returns:
            The loss, if it was a replay; or else what `eagerly` has returned.
        """
        run, place = self._run, body.place
        run.hooks.watch(closure, self._part.optimizer.optimizer)
        run.logs.settle()
        timed = self._clock.is_due(run.steps_before)
        returned: list[R] = []
        step = self._step(closure, body, lambda: returned.append(eagerly()), timed)
        checked = self._verifier.checked
        self.is_in_step = True
        try:
            self.phase, outputs = self._engine.step(step, self._refreshes[place])
        finally:
            self.is_in_step = False
        if self.phase is not Phase.CAPTURED or self._verifier.checked != checked:
            self._clock.interrupted()
        if self._verifier.checked != checked:
            run.times.pace.pause()  # that took several replays, and an eager step
        if outputs is not None:
            given = self._hand_over.after(outputs, place, timed, wanted=True)
            assert given is not None
            loss: Tensor = given.pop("loss")
            closure._result = ClosureResult(None, extra=given)
            closure._result.loss = loss
            return loss
        if self.phase is Phase.WARMING:
            run.logs.warmed_up(place, closure.batch)
            # The last of them is timed: like the others, it begins on a device with nothing left to do.
            run.backend.synchronize()
            if closure._result is not None and closure._result.closure_loss is None:
                self._engine.unsupported(self._recorder.returned_none())
        if place.steps:
            run.times.pace.tick(self.phase)
        return returned[0]

    def _step(
        self, closure: GraphClosure, body: StepBody, eagerly: Callable[[], object], timed: bool
    ) -> Step[StepOutputs]:
        run, place, recorder = self._run, body.place, self._recorder

        def record(batch: Any, cut: Cut, timed: bool) -> StepOutputs:
            with run.replicas.undone():  # each capture of the step begins where the first one does
                timings = run.settings.timings if timed else None
                return recorder.record(batch, closure, body, timings, cut)

        def run_last() -> None:
            self._eager.run_marked(eagerly, place.steps)

        return Step(
            batch=closure.batch,
            place=place,
            timed=timed,
            upcoming=self._upcoming,
            copying=self._clock.copying,
            between=lambda outputs, index: self._hand_over.in_the_middle(outputs, index, closure, body),
            run=lambda: self._eager.run(eagerly),
            run_last=run_last if run.settings.timings is not None else None,
            record=record,
            rehearse=lambda batch: recorder.record(batch, closure, body, None, None),
            values=StepOutputs.values,
            state=lambda: {
                **self._part.state(place, self._makes_gradients(place)),
                **run.metrics.tensors(),
            },
            transaction=self._undone,
            parameters=lambda: self._part.parameters(self._makes_gradients(place)),
            is_broken=run.replicas.is_broken,
            mend=run.replicas.reset,
            unlike_others=run.replicas.unlike_others(place),
            in_window=run.trainer.accumulate_grad_batches > 1,
            kept=lambda: self._part.behind is not None or not gradients_unseen(run.trainer, run.module),
            learning=self._learning,
            takes=run.times.takes(place, run.trainer.accumulate_grad_batches),
        )

    def _makes_gradients(self, place: Place) -> bool:
        """True for a step that drops gradients and makes new ones, False for one that adds to them."""
        return place.drops and not self._run.hooks.leave_gradients

    def _refresh(self, place: Place) -> None:
        """Bring what a graph reads, and the host has made, to where it reads it."""
        if place.steps:
            self._part.optimizer.refresh()
        self._run.metrics.adopt()
        self._run.logs.before_replay(place)

    def _upcoming(self, outputs: StepOutputs) -> None:
        self._clock.upcoming(outputs.marks)

    @contextmanager
    def _learning(self) -> Iterator[None]:
        run = self._run
        detach_recomputed(run.module)  # before effects are watched, which holds what it compares
        with run.metrics.learning(), run.hooks.learning(), run.guards.effects.watched():
            yield

    @contextmanager
    def _undone(self) -> Iterator[None]:
        with self._recorder.undone(), self._part.undone(), self._run.replicas.undone():
            self._run.metrics.prepare()
            yield
