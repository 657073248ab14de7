"""A training step as the engine takes it: eagerly, recorded in a capture, or replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.capture.steps import Step
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.optim.eager_optimizer import EagerOptimizer
from lightning_cudagraph.tensors.recomputed import detach_recomputed
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepBody, StepOutputs
from lightning_cudagraph.trainer.training.captured_step.recording import Recorder
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.hooks.user_hooks import gradients_unseen
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.host_times import AT_BREAKS


@dataclass(kw_only=True, eq=False)
class TrainingStep(Step[StepOutputs]):
    """A training step on one batch.

    Attributes:
        recorder: records the step in a capture.
        body: what is captured. None on the fast path, where the step is a replay or nothing.
        eagerly: runs the step without a graph.
    """

    training: TrainingRun
    recorder: Recorder
    batch_idx: int
    body: StepBody | None = None
    eagerly: Callable[[], object] = lambda: None

    def refresh(self, outputs: StepOutputs | None) -> None:
        """Bring host values (learning rates, metric states, logs) to where the graph reads them."""
        training = self.training
        if self.accumulation.steps:
            training.part.optimizer.note_moves()
            if outputs is None:
                training.part.optimizer.bring_state()
        training.metrics.state.adopt()
        training.logs.before_replay(None if outputs is None else outputs.logs)

    def before_timed(self, outputs: StepOutputs) -> None:
        self.training.times.clock.upcoming(outputs.marks)

    def copying(self) -> AbstractContextManager[None]:
        return self.training.times.clock.copying()

    def between(self, outputs: StepOutputs, index: int) -> None:
        """Call the hooks of one graph break, where an eager step calls them."""
        training, at_break = self.training, outputs.breaks[index]
        if self.body is None:
            prepared = training.part.optimizer
            closure = self._closure(prepared.optimizer)
            optimizer = prepared if self.accumulation.steps else EagerOptimizer(prepared.optimizer)
        else:
            closure, optimizer = self.body.closure, self.body.optimizer
        with setting(training, is_in_step=True), training.times.host.of(AT_BREAKS):
            at_break.logs.hand_over(training.trainer)
            training.count_zero_grads(at_break.zero_grads)
            for attribute in at_break.recomputed:
                attribute.hand_over()
            at_break.run(closure)
            optimizer.note_moves()
            training.metrics.state.adopt()
            if change := training.guards.changed() or training.guards.recurring.changed():
                raise HookError(
                    f"In the middle of a step that is replayed, after {at_break.whose}, {change}; the"
                    " rest of the graph holds what was there at the capture.",
                    "Change it in `on_train_batch_start` or `on_train_batch_end`.",
                )

    def _closure(self, optimizer: Any) -> GraphClosure:
        """Lightning's closure of the batch, for hooks at a graph break on the fast path."""
        training = self.training
        closure = training.optimization._make_closure(
            OrderedDict(batch=self.batch), training.trainer.strategy.optimizers[0], self.batch_idx
        )
        assert isinstance(closure, GraphClosure)
        training.hooks.watch(closure, optimizer)
        return closure

    def run(self) -> None:
        with self.training.logs.noted():
            self.eagerly()

    def record(self, batch: Any, cut: BreakGraph | None, timed: bool) -> StepOutputs:
        training, signature = self.training, self.signature
        assert self.body is not None
        assert signature is not None
        step_kind = self.accumulation, signature
        if cut is None:
            return self.recorder.record(batch, self.body, None, None, step_kind)
        timings = training.settings.timings if timed else None
        with training.replicas.undone():  # each capture instance begins in the same state
            return self.recorder.record(batch, self.body, timings, cut, step_kind, signature.reads)

    def state(self) -> dict[str, Tensor]:
        part, metrics = self.training.part, self.training.metrics
        return {**part.state(self.accumulation, self._makes_gradients()), **metrics.state.tensors()}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.recorder.undone(), self.training.part.undone(), self.training.undone():
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        training = self.training
        detach_recomputed(training.module)  # first, because the watch of effects keeps references
        with training.hooks.learning(), training.learning():
            yield
        parameters = training.module.parameters()
        self.recorder.with_gradients |= {id(p) for p in parameters if p.grad is not None}

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return self.training.part.parameters(self._makes_gradients())

    def _makes_gradients(self) -> bool:
        """True for a step that drops gradients and makes new ones, False for one that adds to them."""
        return self.accumulation.drops and not self.training.hooks.leave_gradients

    def is_followed_by_user_code(self) -> bool:
        training = self.training
        is_eager = training.part.eager_reason is not None
        return is_eager or not gradients_unseen(training.trainer, training.module)

    @property
    def in_window(self) -> bool:
        return self.training.trainer.accumulate_grad_batches > 1

    @property
    def are_added_to(self) -> bool:
        return self.in_window or self.training.hooks.leave_gradients

    @property
    def timed_instances(self) -> tuple[bool, ...]:
        training = self.training
        n_batches = training.trainer.accumulate_grad_batches
        return training.times.timed_instances(self.accumulation, n_batches)
