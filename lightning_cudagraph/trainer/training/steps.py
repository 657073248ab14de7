"""Training steps between Lightning's loop and the engine: transfer of a batch, and its step.

Lightning makes a closure for each batch and passes it to `Strategy.optimizer_step`, in which the whole
step happens: there a batch is warmed up, captured or replayed. If the optimizer steps eagerly after the
replay, or not at all on this batch, it happens in the call of the closure. On the fast path, the loop
(`fast_path.py`) makes no closure and asks for the replay itself (`TrainingSteps.replay`).

Lightning moves a batch to the device, and a replay would copy it from there into the static inputs that
the graph reads. If no user code sees the batch in between, one copy is enough: from the loader's memory,
pinned or not, into the static inputs. User hooks, the user's own calls of `batch_to_device`, and eager
steps get a batch of their own, which no later step overwrites.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.signatures.by_signature import GraphsOfSignature
from lightning_cudagraph.capture.steps import AccumulationPhase, Phase
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.method_patches import MethodPatch, Original, patch_method
from lightning_cudagraph.compat.names.lightning_names import _AutomaticOptimization
from lightning_cudagraph.errors import CUDAGraphError, UnsupportedError
from lightning_cudagraph.tensors.batch import map_leaves
from lightning_cudagraph.tensors.host_values import copied_output
from lightning_cudagraph.timing.readings.step_time import Plain
from lightning_cudagraph.trainer.training.captured_step.compiled_step import uncompiled
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepOutputs
from lightning_cudagraph.trainer.training.captured_step.training_step import TrainingStep, returned_none
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.conditions import MAKE_CLOSURE, OF_OPTIMIZATION, TRANSFER
from lightning_cudagraph.trainer.training.hooks.user_hooks import batches_unseen, is_known
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.baseline import PlainSteps
from lightning_cudagraph.trainer.training.times.run_times import batch_of_step, step_number

R = TypeVar("R")


class TrainingSteps:
    """The training steps of a `fit`, passed to the engine.

    Attributes:
        is_state_unread: True if no user code between two replays can read the optimizer's state; set by
            the fast path.
        n_apart: the batches whose closure was called before the optimizer was stepped, without it.
    """

    def __init__(self, run: TrainingRun, engine: StepEngine[StepOutputs]) -> None:
        self._run = run
        # Read in every replay, so held directly.
        self._trainer = run.trainer
        self._strategy = run.trainer.strategy
        self._part = run.part
        self._optimization = run.optimization
        self._replicas = run.replicas
        self._clock = run.times.clock
        self._engine = engine
        self._graphs = engine.graphs
        run.times.on_other_rate = engine.graphs.clear_plain
        self._plain = PlainSteps(run.trainer, run.backend, run.settings)
        self._n_without_loss = 0  # warm-up steps, in a row
        self.phase = Phase.EAGER
        self.is_state_unread = False
        self.n_apart = 0
        self._was_closure_called = False  # outside of a step of the optimizer
        self._is_in_optimizer = False  # in an eager step, whose closure the optimizer calls
        self._are_batches_unseen: bool | None = None
        # The graphs with the latest batch in their static inputs, and the loader's batch.
        self._moved: tuple[GraphsOfSignature[StepOutputs], Any] | None = None

    def install(self, patches: ExitStack) -> None:
        """Patch Lightning where it moves batches and does their steps, until `patches` is closed."""
        run, strategy = self._run, self._strategy
        self._own_closure = Original(run.optimization, MAKE_CLOSURE)
        patch_method(run.optimization, MAKE_CLOSURE, self._make_closure, patches)
        self._eager_step = Original(strategy, "optimizer_step")
        patch_method(strategy, "optimizer_step", self._optimizer_step, patches)
        self._eager_transfer = Original(strategy, TRANSFER)
        patch_method(strategy, TRANSFER, self._batch_to_device, patches)

    def suspect(self) -> None:
        """Look for hooks that see batches again: code other than training steps has run."""
        self._are_batches_unseen = None

    def _batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Patch of `Strategy.batch_to_device`."""
        if self._run.module._current_fx_name != TRANSFER:
            # User code that moves batches (a prefetching loader, for example) may keep them.
            return self._eager_transfer(batch, *args, **kwargs)
        self._moved = None
        if self._trainer.state.stage is not RunningStage.TRAINING or not self._has_static():
            return self._eager_transfer(batch, *args, **kwargs)
        self.suspect()  # on Lightning's own path, any code may have run
        static = self.to_static(batch)
        if static is not None:
            return static
        is_timed = self._clock.is_due(self._run.steps_before)
        with self._clock.copying() if is_timed else nullcontext():
            return self._eager_transfer(batch, *args, **kwargs)

    def to_static(self, batch: Any) -> Any:
        """Copy a loader's batch into the static inputs if no user code sees it; else return None."""
        if not self._has_static():
            return None
        if self._are_batches_unseen is None:
            method = self._eager_transfer.now
            by_lightning = getattr(method, "__func__", None) is Strategy.batch_to_device
            self._are_batches_unseen = (
                by_lightning and is_known(method) and batches_unseen(self._trainer, self._run.module)
            )
        if not self._are_batches_unseen:
            return None
        numbers: dict[str, int] = {}
        if self._graphs.reads.is_any:
            progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
            numbers = self._run.numbers.of(progress.ready)  # the batch is counted after its transfer
        if (found := self._graphs.find(batch, numbers, from_loader=True)) is None:
            return None
        graphs, tensors, values = found
        if self._clock.is_due(self._run.steps_before):
            with self._clock.copying():
                graphs.static.fill(tensors, values)
        else:
            graphs.static.fill(tensors, values)
        self._moved = graphs, batch
        return graphs.static.batch

    def graphs_of(self, batch: Any) -> GraphsOfSignature[StepOutputs] | None:
        """The graphs of a batch, if it is their static batch, which later replays overwrite."""
        moved = self._moved
        return moved[0] if moved is not None and batch is moved[0].static.batch else None

    def own(self, batch: Any) -> Any:
        """The batch for code that may keep it: a new transfer if `batch` is the static one."""
        if self._moved is None or self.graphs_of(batch) is None:
            return batch
        # Without hooks: there were none when this batch arrived, and code may have set some since.
        return move_data_to_device(self._moved[1], self._strategy.root_device)

    def _use_own(self, closure: GraphClosure) -> None:
        """Give an eager step a batch of its own, which later replays do not overwrite."""
        before = closure.batch
        if (batch := self.own(before)) is before:
            return
        closure.kwargs[next(iter(closure.kwargs))] = batch
        results = self._trainer.fit_loop.epoch_loop._results
        if results.batch is before:  # `self.log` takes the batch size from it
            results.batch = batch

    def _has_static(self) -> bool:
        # Batches that only update batch norm are never replayed.
        return not self._optimization._skip_backward and bool(self._graphs)

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Closure:
        """Patch of the automatic optimization's method: a `GraphClosure` for each batch."""
        run = self._run
        if run.optimization._skip_backward:
            self._engine.counts.note_eager(
                "`StochasticWeightAveraging` updates batch norm, without training"
            )
        elif getattr(self._own_closure.now, "__func__", None) is _AutomaticOptimization._make_closure:
            return run.closure_for(kwargs, optimizer, batch_idx, self._call_closure)
        return self._own_closure(kwargs, optimizer, batch_idx)  # type: ignore[no-any-return]

    def _optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """Patch of `Strategy.optimizer_step`, in which the whole training step happens."""
        try:
            return self._step(optimizer, closure, model, **kwargs)
        finally:
            self._was_closure_called = False

    def _step(self, optimizer: Optimizer, closure: Any, model: Any, **kwargs: Any) -> Any:
        run, part = self._run, self._part
        try:
            part.adopt(optimizer, not self._engine.given_up)
        except UnsupportedError as error:
            self._engine.invalidation.unsupported(error)

        def eagerly() -> Any:
            """Step eagerly, with the arithmetic of the captured step."""
            part.optimizer.note_moves()
            with part.arithmetic(optimizer, capturing=False), setting(self, _is_in_optimizer=True):
                return self._eager_step(optimizer, closure, model, **kwargs)

        if not isinstance(closure, GraphClosure):
            if self._was_closure_called:  # and its batch counted there
                self.n_apart += 1
            elif not run.optimization._skip_backward:
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

        def do(inner: GraphClosure) -> Any:
            return self._eager_step(optimizer, inner, model, **kwargs)

        return self._take(closure, do, True, eagerly)

    def _plainly(self, plain: Plain, eagerly: Callable[[], R]) -> R:
        """Do a warm-up step that is not watched, to measure the eager step time."""
        self._engine.vote_on_plain_step()
        with (
            setting(self._run, is_in_step=True),
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
            self._use_own(closure)
            return plain()

        if self._is_in_optimizer:
            with self._part.optimizer.floats_inside():
                return eagerly()
        # While gradients are accumulated, Lightning calls it, and no step of the optimizer follows.
        self._was_closure_called = not self._trainer.fit_loop._should_accumulate()
        if self._part.eager_reason is None and not self._engine.given_up:
            counts, drops = self._engine.counts, closure.drops_gradients
            kind = self._plain.next(counts, closure.batch, drops, steps=False)
            if kind is not Plain.NOT:
                return self._plainly(kind, eagerly)
        # The optimizer steps eagerly after the replay, or not at all on this batch.
        return self._take(closure, lambda inner: inner(), False, eagerly)

    def is_plain(self) -> bool:
        """True if no user code is called between a batch's arrival and its replay."""
        trainer = self._run.trainer
        optimization = self._optimization
        optimizer: LightningOptimizer = self._strategy._lightning_optimizers[0]
        return (
            trainer.fit_loop.epoch_loop.automatic_optimization is optimization
            and type(optimization) is _AutomaticOptimization
            and vars(optimization).keys().isdisjoint(OF_OPTIMIZATION)
            and type(vars(optimization).get(MAKE_CLOSURE)) is MethodPatch
            and is_known(optimizer.step)
            and "step" not in vars(optimizer)
            and optimizer._on_before_step is do_nothing_closure
            and optimizer._on_after_step is do_nothing_closure
            and not self._run.hooks.after_backward
        )

    def replay(self, batch: Any, batch_idx: int, accumulation: AccumulationPhase) -> StepOutputs | None:
        """Do a step on the fast path: a replay without a closure; None if more than that is due."""
        part, optimization = self._part, self._optimization
        if (
            part.eager_reason is not None
            or optimization._skip_backward
            or not part.is_of(self._strategy.optimizers[0])
        ):
            return None
        # Lightning's own counters of optimizer steps.
        progress = optimization.optim_progress.optimizer.step
        total, current = progress.total, progress.current
        step = TrainingStep(
            batch,
            accumulation,
            self._clock.is_due(total.completed),
            numbers=self._run.numbers.of(batch_idx),
            eager_reason=self._replicas.eager_reason(accumulation),
            training=self._run,
            batch_idx=batch_idx,
        )
        if accumulation.steps:
            total.ready += 1
            current.ready += 1
        outcomes = part.optimizer.outcomes
        outcomes.may_be_late = self.is_state_unread
        try:
            outputs = self._engine.replay(step, self.graphs_of(batch))
        finally:
            outcomes.may_be_late = False
        if outputs is None:
            if accumulation.steps:
                total.ready -= 1
                current.ready -= 1
            return None
        self._run.logs.put_off(outputs.logs)
        self._leave(outputs, step)
        if accumulation.steps:
            total.completed += 1
            current.completed += 1
        return outputs

    def _leave(self, outputs: StepOutputs, step: TrainingStep) -> None:
        """Leave the state that Lightning has at the end of an eager step, but for logged values."""
        run, accumulation, trainer = self._run, step.accumulation, self._trainer
        self._replicas.replayed(accumulation)
        run.count_zero_grads(outputs.zero_grads)
        for attribute in outputs.recomputed:
            attribute.hand_over()
        run.metrics.state.count_references()
        if outputs.after_backward:
            run.hooks.run_after_backward()
        marks = outputs.marks if step.timed else None
        steps = self._optimization.optim_progress.optimizer_steps
        is_next_due = self._clock.is_due(steps + accumulation.steps)
        self._clock.ended(marks, step_number(trainer), is_next_due, *batch_of_step(trainer))
        graphs = self._graphs.latest
        if graphs is None or not graphs.is_timed:
            run.times.pace.pause()
        elif accumulation.steps:
            run.times.pace.tick(Phase.CAPTURED)

    def outputs(self, outputs: StepOutputs, loss: Tensor | None = None) -> dict[str, Any]:
        """Copies of the static outputs of the last replay, as hooks get them."""
        # Callbacks keep outputs, and the next replay overwrites the static ones.
        loss = outputs.loss.clone() if loss is None else loss
        return {"loss": loss, **map_leaves(outputs.extra, copied_output)}

    def _take(
        self,
        closure: GraphClosure,
        do: Callable[[GraphClosure], object],
        steps: bool,
        eagerly: Callable[[], R],
    ) -> R | Tensor:
        """Do a step with one of Lightning's closures: eagerly, by capture, or by replay.

        Args:
            steps: the optimizer steps in it.
        """
        run = self._run
        accumulation = AccumulationPhase(closure.drops_gradients, steps, self._replicas.syncs)
        run.hooks.watch(closure, self._part.optimizer.optimizer)
        run.logs.settle()
        returned: list[R] = []
        step = TrainingStep(
            closure.batch,
            accumulation,
            self._clock.is_due(run.steps_before),
            numbers=run.numbers.of(closure.batch_idx),
            eager_reason=self._replicas.eager_reason(accumulation),
            training=run,
            batch_idx=closure.batch_idx,
            closure=closure,
            do=do,
            eagerly=lambda: returned.append(eagerly()),
        )
        verifier, checked = self._engine.verifier, self._engine.verifier.checked
        try:
            with setting(run, is_in_step=True):
                self.phase, outputs = self._engine.step(step, self.graphs_of(step.batch))
        except CUDAGraphError as error:
            closure.failure = error
            raise
        if self.phase is not Phase.CAPTURED or verifier.checked != checked:
            self._clock.interrupted()
        if verifier.checked != checked:
            run.times.pace.pause()  # a check takes several replays and an eager step
        if outputs is not None:
            loss = outputs.logs.hand_over(self._trainer)
            assert loss is not None
            given = self.outputs(outputs, loss)
            self._leave(outputs, step)
            closure._result = ClosureResult(None, extra=given)
            closure._result.loss = given.pop("loss")
            return loss
        if self.phase is Phase.WARMING:
            # The first plain step, which is timed, has to begin on an idle device.
            run.backend.synchronize()
            self._look_for_loss(closure, step)
        if accumulation.steps:
            run.times.pace.tick(self.phase)
        return returned[0]

    def _look_for_loss(self, closure: GraphClosure, step: TrainingStep) -> None:
        """Leave a path without a loss eager; refuse steps of which as many as a warm-up have none."""
        if closure._result is None or closure._result.closure_loss is not None:
            self._n_without_loss = 0
            return
        self._n_without_loss += 1
        error = returned_none(self._run.module)
        assert step.signature is not None
        if not self._engine.refuses_alone(step.signature, error) and (
            self._n_without_loss >= self._run.settings.warmup_steps
        ):
            self._engine.invalidation.unsupported(error, step.signature)
