"""Training steps between Lightning's loop and the engine.

Lightning makes a closure for each batch and passes it to `Strategy.optimizer_step`, in which the whole
step happens: there a batch is warmed up, captured or replayed. If the optimizer steps eagerly after the
replay, or not at all on this batch, it happens in the call of the closure. On the fast path, the loop
(`fast_path.py`) makes no closure and asks for the replay itself (`TrainingSteps.again`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.capture.steps import AccumulationPhase, Phase, Replay, Step
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.method_patches import Original, patch_method
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.optimizers import EagerOptimizer
from lightning_cudagraph.tensors.recomputed import detach_recomputed
from lightning_cudagraph.timing.readings.step_time import Plain
from lightning_cudagraph.trainer.training.after_replay import AfterReplay
from lightning_cudagraph.trainer.training.captured_step.compiled_step import uncompiled
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepBody, StepOutputs
from lightning_cudagraph.trainer.training.captured_step.recording import Recorder
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.conditions import OF_OPTIMIZATION
from lightning_cudagraph.trainer.training.eager_steps import EagerSteps
from lightning_cudagraph.trainer.training.hooks.user_hooks import gradients_unseen, is_known
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.baseline import PlainSteps
from lightning_cudagraph.trainer.training.times.host_times import AT_BREAKS
from lightning_cudagraph.trainer.training.times.run_times import step_number
from lightning_cudagraph.trainer.training.transfer import BatchTransfer

R = TypeVar("R")


class TrainingSteps:
    """The training steps of a `fit`, passed to the engine.

    Attributes:
        is_state_unread: True if no user code between two replays can read the optimizer's state; set by
            the fast path.
    """

    transfer: BatchTransfer

    def __init__(
        self, run: TrainingRun, engine: StepEngine[StepOutputs], verifier: Verifier, recorder: Recorder
    ) -> None:
        self._run = run
        # Read in every replay, so held directly.
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
        self._after_replay = AfterReplay(run)
        self._n_without_loss = 0  # warm-up steps, in a row
        self.phase = Phase.EAGER
        self.is_in_step = self.is_state_unread = False
        self._is_in_optimizer = False  # in an eager step, whose closure the optimizer calls

    def install(self, patches: ExitStack) -> None:
        """Patch Lightning where it moves batches and does their steps, until `patches` is closed."""
        run, strategy = self._run, self._strategy
        loop = run.trainer.fit_loop.epoch_loop
        run.optimization.install(loop, self._call_closure, self._engine.counts.note_eager, patches)
        self._eager_step = Original(strategy, "optimizer_step")
        patch_method(strategy, "optimizer_step", self._optimizer_step, patches)
        self.transfer = BatchTransfer(run, self._engine)
        patch_method(strategy, "batch_to_device", self.transfer, patches)

    def _optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """Patch of `Strategy.optimizer_step`, in which the whole training step happens."""
        run, part = self._run, self._part
        try:
            part.adopt(optimizer, not self._engine.given_up)
        except UnsupportedError as error:
            self._engine.unsupported(error)

        def eagerly() -> Any:
            """Step eagerly, with the arithmetic of the captured step."""
            part.optimizer.note_moves()
            with part.arithmetic(optimizer, capturing=False), setting(self, _is_in_optimizer=True):
                return self._eager_step(optimizer, closure, model, **kwargs)

        if not isinstance(closure, GraphClosure):
            if not run.optimization._skip_backward:
                reason = "a step of the optimizer without one of Lightning's closures"
                self._engine.counts.note_eager(reason)
            with run.backend.on_side_stream():
                return eagerly()
        plain = self._plain.next(self._engine.counts, closure.batch, closure.drops_gradients)
        if plain is not Plain.NOT and not self._engine.given_up:
            result = self._plainly(plain, eagerly)
            run.times.pace.tick(Phase.WARMING, plain)
            return result
        if part.eager_reason is not None:
            # The closure alone is captured, in the call that the optimizer makes of it.
            with part.arithmetic(optimizer, capturing=False):
                result = self._eager_step(optimizer, closure, model, **kwargs)
            run.times.pace.tick(self.phase)
            if self.phase is Phase.CAPTURED:  # the step ends here, after the eager optimizer step
                is_next_due = self._clock.is_due(run.steps_before + 1)
                self._clock.ended(None, step_number(run.trainer), is_next_due)
            return result
        body = StepBody(
            lambda inner: self._eager_step(optimizer, inner, model, **kwargs),
            part.optimizer,
            lambda capturing: part.arithmetic(optimizer, capturing),
            AccumulationPhase(closure.drops_gradients, True, self._replicas.syncs),
        )
        return self._take(closure, body, eagerly)

    def _plainly(self, plain: Plain, eagerly: Callable[[], R]) -> R:
        """Do a warm-up step that is not watched, to measure the eager step time."""
        self._engine.vote_on_plain_step()
        with (
            setting(self, is_in_step=True),
            self._run.backend.on_side_stream(),
            uncompiled(self._run.module),
        ):
            result = eagerly()
        if plain is Plain.LAST:
            self._run.backend.synchronize()
        self._engine.counts.warmed_up += 1
        return result

    def _call_closure(self, closure: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
        def eagerly() -> Tensor | None:
            self.transfer.use_own(closure)
            return self._eager.call(closure, plain)

        if self._is_in_optimizer:
            with self._part.optimizer.floats_inside():
                return eagerly()
        if self._part.eager_reason is None and not self._engine.given_up:
            counts, drops = self._engine.counts, closure.drops_gradients
            kind = self._plain.next(counts, closure.batch, drops, steps=False)
            if kind is not Plain.NOT:
                return self._plainly(kind, eagerly)
        # The optimizer steps eagerly after the replay, or not at all on this batch.
        body = StepBody(
            lambda inner: inner(),
            EagerOptimizer(self._part.optimizer.optimizer),
            lambda capturing: nullcontext(),
            AccumulationPhase(closure.drops_gradients, False, self._replicas.syncs),
        )
        return self._take(closure, body, eagerly)

    def is_plain(self) -> bool:
        """True if no user code is called between a batch's arrival and its replay."""
        trainer = self._run.trainer
        optimization = self._optimization
        optimizer: LightningOptimizer = self._strategy._lightning_optimizers[0]
        return (
            trainer.fit_loop.epoch_loop.automatic_optimization is optimization
            and vars(optimization).keys().isdisjoint(OF_OPTIMIZATION)
            and is_known(optimizer.step)
            and "step" not in vars(optimizer)
            and optimizer._on_before_step is do_nothing_closure
            and optimizer._on_after_step is do_nothing_closure
            and not self._run.hooks.after_backward
        )

    def again(self, batch: Any, batch_idx: int, drops: bool, steps: bool) -> StepOutputs | None:
        """Do a step on the fast path: a replay without a closure; None if more than that is due."""
        part, optimization = self._part, self._optimization
        accumulation = AccumulationPhase(drops, steps, steps and bool(self._replicas.wrappers))
        if (
            part.eager_reason is not None
            or optimization._skip_backward
            or not part.is_of(self._strategy.optimizers[0])
            or self._replicas.eager_reason(accumulation)
        ):
            return None
        # Lightning's own counters of optimizer steps.
        progress = optimization.optim_progress.optimizer.step
        total, current = progress.total, progress.current
        timed = self._clock.is_due(total.completed)
        replay = TrainingReplay(
            batch,
            accumulation,
            timed,
            numbers=self._run.numbers.of(batch_idx),
            steps=self,
            batch_idx=batch_idx,
        )
        if steps:
            total.ready += 1
            current.ready += 1
        with part.optimizer.outcomes.late(self.is_state_unread):
            outputs = self._engine.again(replay, self.transfer.graphs_of(batch))
        if outputs is None:
            if steps:
                total.ready -= 1
                current.ready -= 1
            return None
        self._after_replay.after(outputs, accumulation, timed, wanted=False)
        if steps:
            total.completed += 1
            current.completed += 1
        return outputs

    def outputs(self, outputs: StepOutputs) -> dict[str, Any]:
        """Copies of the static outputs of the last replay, as hooks get them."""
        return self._after_replay.outputs(outputs)

    def _take(self, closure: GraphClosure, body: StepBody, eagerly: Callable[[], R]) -> R | Tensor:
        """Do a step with one of Lightning's closures: eagerly, by capture, or by replay."""
        run, accumulation = self._run, body.accumulation
        run.hooks.watch(closure, self._part.optimizer.optimizer)
        run.logs.settle()
        timed = self._clock.is_due(run.steps_before)
        returned: list[R] = []
        step = TrainingStep(
            closure.batch,
            accumulation,
            timed,
            numbers=run.numbers.of(closure.batch_idx),
            eager_reason=run.replicas.eager_reason(accumulation),
            steps=self,
            batch_idx=closure.batch_idx,
            closure=closure,
            body=body,
            eagerly=lambda: returned.append(eagerly()),
        )
        checked = self._verifier.checked
        with setting(self, is_in_step=True):
            self.phase, outputs = self._engine.step(step)
        if self.phase is not Phase.CAPTURED or self._verifier.checked != checked:
            self._clock.interrupted()
        if self._verifier.checked != checked:
            run.times.pace.pause()  # a check takes several replays and an eager step
        if outputs is not None:
            given = self._after_replay.after(outputs, accumulation, timed, wanted=True)
            assert given is not None
            loss: Tensor = given.pop("loss")
            closure._result = ClosureResult(None, extra=given)
            closure._result.loss = loss
            return loss
        if self.phase is Phase.WARMING:
            run.logs.warmed_up((accumulation, step.signature), closure.batch)
            # The last one is timed, and has to begin on an idle device, as the others do.
            run.backend.synchronize()
            self._look_for_loss(closure, step)
        if accumulation.steps:
            run.times.pace.tick(self.phase)
        return returned[0]

    def _look_for_loss(self, closure: GraphClosure, step: Step[StepOutputs]) -> None:
        """Leave a path without a loss eager; refuse steps of which as many as a warm-up have none."""
        if closure._result is None or closure._result.closure_loss is not None:
            self._n_without_loss = 0
            return
        self._n_without_loss += 1
        error = self._recorder.returned_none()
        assert step.signature is not None
        if not self._engine.refuses_alone(step.signature, error) and (
            self._n_without_loss >= self._run.settings.warmup_steps
        ):
            self._engine.unsupported(error, step.signature)


@dataclass(kw_only=True, eq=False)
class TrainingReplay(Replay[StepOutputs]):
    """A training step on the fast path, without a closure."""

    steps: TrainingSteps
    batch_idx: int

    def refresh(self, outputs: StepOutputs | None) -> None:
        """Bring host values (learning rates, metric states, logs) to where the graph reads them."""
        steps = self.steps
        if self.accumulation.steps:
            steps._part.optimizer.note_moves()
        steps._run.metrics.adopt()
        steps._run.logs.before_replay(None if outputs is None else outputs.logs)

    def before_timed(self, outputs: StepOutputs) -> None:
        self.steps._clock.upcoming(outputs.marks)

    def copying(self) -> AbstractContextManager[None]:
        return self.steps._clock.copying()

    def between(self, outputs: StepOutputs, index: int) -> None:
        steps = self.steps
        run, prepared = steps._run, steps._part.optimizer
        closure = run.optimization.closure_for_capture(
            OrderedDict(batch=self.batch),
            run.trainer.strategy.optimizers[0],
            self.batch_idx,
            steps._call_closure,
        )
        run.hooks.watch(closure, prepared.optimizer)
        optimizer = prepared if self.accumulation.steps else EagerOptimizer(prepared.optimizer)
        with setting(steps, is_in_step=True), run.times.host.of(AT_BREAKS):
            steps._after_replay.in_the_middle(outputs, index, closure, optimizer)


@dataclass(kw_only=True, eq=False)
class TrainingStep(TrainingReplay, Step[StepOutputs]):
    """A training step with one of Lightning's closures."""

    closure: GraphClosure
    body: StepBody
    eagerly: Callable[[], object]

    def between(self, outputs: StepOutputs, index: int) -> None:
        self.steps._after_replay.in_the_middle(outputs, index, self.closure, self.body.optimizer)

    def run(self) -> None:
        self.steps._eager.run(self.eagerly)

    def run_last(self) -> None:
        if self.steps._run.settings.timings is None:
            self.run()
        else:
            self.steps._eager.run_marked(self.eagerly, self.accumulation.steps)

    def record(self, batch: Any, cut: BreakGraph, timed: bool) -> StepOutputs:
        steps, signature = self.steps, self.signature
        run = steps._run
        assert signature is not None
        step_kind = self.accumulation, signature
        with run.replicas.undone():  # each capture instance begins in the same state
            timings = run.settings.timings if timed else None
            outputs = steps._recorder.record(
                batch, self.closure, self.body, timings, cut, step_kind, signature.reads
            )
        outputs.is_measured = steps._engine.graphs.is_timed(signature)
        return outputs

    def rehearse(self, batch: Any) -> StepOutputs:
        step_kind = self.accumulation, self.signature
        return self.steps._recorder.record(batch, self.closure, self.body, None, None, step_kind)

    def values(self, outputs: StepOutputs) -> dict[str, Tensor]:
        return outputs.values()

    def state(self) -> dict[str, Tensor]:
        part, metrics = self.steps._part, self.steps._run.metrics
        return {**part.state(self.accumulation, self._makes_gradients()), **metrics.tensors()}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        steps = self.steps
        self.body.optimizer.bring_state()
        with steps._recorder.undone(), steps._part.undone(), steps._run.undone():
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        run = self.steps._run
        detach_recomputed(run.module)  # first, because the watch of effects keeps references
        with run.hooks.learning(), run.learning():
            yield

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return self.steps._part.parameters(self._makes_gradients())

    def _makes_gradients(self) -> bool:
        """True for a step that drops gradients and makes new ones, False for one that adds to them."""
        return self.accumulation.drops and not self.steps._run.hooks.leave_gradients

    def is_followed_by_user_code(self) -> bool:
        run = self.steps._run
        return self.steps._part.eager_reason is not None or not gradients_unseen(run.trainer, run.module)

    @property
    def in_window(self) -> bool:
        return self.steps._run.trainer.accumulate_grad_batches > 1

    @property
    def are_added_to(self) -> bool:
        return self.in_window or self.steps._run.hooks.leave_gradients

    @property
    def timed_instances(self) -> tuple[bool, ...]:
        run = self.steps._run
        return run.times.timed_instances(self.accumulation, run.trainer.accumulate_grad_batches)

    def is_broken(self) -> bool:
        return self.steps._run.replicas.is_broken()

    def repair(self) -> None:
        self.steps._run.replicas.reset()
