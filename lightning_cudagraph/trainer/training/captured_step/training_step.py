"""A training step as the engine takes it: eagerly, recorded in a capture, or replayed.

To record it, Lightning's own code runs on the static batch, in a capture, and without one where a replay
is verified. Effects on the host are undone; those that a replay would miss are refused.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_cudagraph.capture.gradients.lost_gradients import LostGradients
from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.capture.steps import Step
from lightning_cudagraph.checks.audit.host_lines import line_that_returns_none
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.refusals.first_refusal import going_on
from lightning_cudagraph.device.refusals.host_reads import SKIP
from lightning_cudagraph.device.sentry.compiled import recompilation
from lightning_cudagraph.errors import CaptureError, HookError, UnsupportedError
from lightning_cudagraph.optim.eager_optimizer import EagerOptimizer
from lightning_cudagraph.optim.supported_optimizers import refuse_own_zero_grad
from lightning_cudagraph.tensors.batch import flatten_batch, map_leaves, refuse_odd_outputs
from lightning_cudagraph.tensors.host_values import HostValue, as_output, names_a_class
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.tensors.recomputed import detach_recomputed
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.layers.layer_selection import LayerTimings, never_timed
from lightning_cudagraph.trainer.common.captured_run import Gradient, gradient_of
from lightning_cudagraph.trainer.common.profilers import unprofiled
from lightning_cudagraph.trainer.common.step_numbers import STEP_GETTERS
from lightning_cudagraph.trainer.config.support import check_optimizer_part
from lightning_cudagraph.trainer.training.captured_step.recorded_step import HostBreak, StepOutputs
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.hooks.user_hooks import gradients_unseen
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.host_times import AT_BREAKS
from lightning_cudagraph.trainer.training.times.marked_steps import timed_forward, timed_stages


@dataclass(kw_only=True, eq=False)
class TrainingStep(Step[StepOutputs]):
    """A training step on one batch.

    Attributes:
        closure: Lightning's own. None on the fast path, where the step is a replay or nothing.
        do: does the step with a closure.
        eagerly: runs the step without a graph.
    """

    training: TrainingRun
    batch_idx: int
    closure: GraphClosure | None = None
    do: Callable[[GraphClosure], object] = lambda closure: None
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
        closure = self._new_closure() if self.closure is None else self.closure
        with setting(training, is_in_step=True), training.times.host.of(AT_BREAKS):
            at_break.logs.hand_over(training.trainer)
            training.count_zero_grads(at_break.zero_grads)
            for attribute in at_break.recomputed:
                attribute.hand_over()
            at_break.run(closure)
            if self.accumulation.steps:
                training.part.optimizer.note_moves()
            training.metrics.state.adopt()
            if change := training.guards.changed() or training.guards.recurring.changed():
                raise HookError(
                    f"In the middle of a step that is replayed, after {at_break.whose}, {change}; the"
                    " rest of the graph holds what was there at the capture.",
                    "Change it in `on_train_batch_start` or `on_train_batch_end`.",
                )

    def _new_closure(self) -> GraphClosure:
        """Lightning's closure of the batch, for hooks at a graph break on the fast path."""
        training = self.training
        closure = training.optimization._make_closure(
            OrderedDict(batch=self.batch), training.trainer.strategy.optimizers[0], self.batch_idx
        )
        assert isinstance(closure, GraphClosure)
        training.hooks.watch(closure, training.part.optimizer.optimizer)
        return closure

    def run(self) -> None:
        self.eagerly()

    def record(self, batch: Any, cut: BreakGraph | None, timed: bool) -> StepOutputs:
        if cut is None:
            return self._record(batch, None, None)
        with self.training.replicas.undone():  # each capture instance begins in the same state
            return self._record(batch, cut, self.training.settings.timings if timed else None)

    def _record(self, batch: Any, cut: BreakGraph | None, timings: LayerTimings | None) -> StepOutputs:
        """Run the step on the static batch; in a capture, note what it reads of numbers that move."""
        training, part = self.training, self.training.part
        closure, signature, steps = self.closure, self.signature, self.accumulation.steps
        assert closure is not None
        assert signature is not None
        capturing, step_kind = cut is not None, (self.accumulation, signature)
        reads = signature.reads if capturing else None
        optimizer = part.optimizer if steps else EagerOptimizer(part.optimizer.optimizer)
        with going_on():
            optimizer.check_state()
        if steps:
            with going_on():
                check_optimizer_part(training.trainer)  # callbacks may have been added since
        if capturing:
            with going_on():
                refuse_own_zero_grad(optimizer.optimizer)
        marks: StepMarks | None = None
        if timings is not None:
            marks = training.times.marks(steps, timings.placement)
        carried = training.carried
        uncounted = 0

        def call(own: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
            nonlocal uncounted
            uncounted += counts_drops
            with optimizer.floats_inside(capturing):
                loss = plain()
            end_backward()
            return loss

        inner = training.closure_for(
            _arguments(batch, closure, training.numbers.noted(reads, closure.batch_idx)),
            optimizer.optimizer,
            closure.batch_idx,
            call,
        )
        if marks is not None:
            inner._step_fn = timed_forward(inner._step_fn, marks)
        # Each call of the closure drops gradients once, before its backward pass.
        counts_drops = inner._zero_grad_fn is not None and not training.hooks.around_zero_grad()
        gradients = self._gradients(batch) if capturing else None
        if gradients is not None:
            inner._step_fn = gradients.unused_in(inner._step_fn)
        behind = False

        def end_backward() -> None:
            nonlocal behind
            if marks is not None:
                marks.backward_ended()
            if parts.audit is not None:
                with parts.recomputed.as_before(), training.metrics.as_before(), carried.as_before():
                    parts.audit.end_backward()
            behind = True

        breaks: list[HostBreak] = []
        before = {id(p): gradient_of(p) for p in training.module.parameters()}
        taken = 0
        with ExitStack() as stack:
            stack.enter_context(unprofiled(training.trainer))
            if gradients is not None:
                stack.enter_context(gradients.restored())

            def break_graph(whose: str, drops_here: bool, run: Callable[[GraphClosure], None]) -> None:
                nonlocal taken, uncounted
                training.metrics.state.write_back()
                logs = training.logs.finished(parts.events[taken:], step_kind, capturing, is_last=False)
                breaks.append(HostBreak(whose, logs, uncounted, run, parts.recomputed.so_far()))
                taken, uncounted = len(parts.events), 0
                if cut is not None:
                    with marks.stage("host") if marks is not None else nullcontext():
                        cut(whose, drops_here)

            left_out = training.hooks.left_out(inner, optimizer.optimizer, break_graph, end_backward)
            stack.enter_context(left_out)
            if marks is not None:  # before the audit, which would attribute their hooks to the step
                stack.enter_context(marks.recording())
                stack.enter_context(timed_stages(marks, training.trainer, training.module))
            with (
                training.recorded(
                    step_kind,
                    capturing,
                    lambda: ", ".join(at_break.whose for at_break in breaks),
                    noted=frozenset() if capturing and reads is None else STEP_GETTERS,
                ) as parts,
                part.arithmetic(optimizer.optimizer, capturing) if steps else nullcontext(),
            ):
                with training.numbers.noted_step(reads):
                    self._do(inner, lambda: behind)
                result = inner.consume_result()
        if result.loss is None:
            raise returned_none(training.module)
        logged = training.logs.finished(parts.events[taken:], step_kind, capturing, result.loss)
        # The result still refers to autograd's graph, and so to the memory of all activations.
        refuse_odd_outputs(result.extra, "the output of `training_step`")
        for path, leaf in flatten_batch(result.extra):
            if reads is not None and isinstance(leaf, HostValue):
                with setting(reads, returned=re.sub(r"^batch\['(\w+)'\]", r"\1", path)):
                    as_output(leaf)
        extra, loss = map_leaves(result.extra, _detached), result.loss
        del result, inner
        if gradients is not None:
            gradients.check()
        if marks is not None:
            training.untimed = never_timed(training.untimed, marks.untimed)
        trained = {} if steps else _trained(training.module, before)
        return StepOutputs(
            loss,
            extra,
            logged,
            marks,
            trained,
            uncounted,
            breaks,
            training.hooks.after_backward,
            parts.recomputed,
        )

    def _gradients(self, batch: Any) -> LostGradients | None:
        """The gradients of a captured step; none with sharded weights, of which torch makes new ones."""
        training, part = self.training, self.training.part
        if any(is_around_another(type(parameter)) for parameter in training.module.parameters()):
            return None
        makes, _ = part.parameters(self._makes_gradients())
        dropped = [parameter for parameter in makes if id(parameter) in training.with_gradients]
        return LostGradients(training.module, part.optimizer.parameters, dropped, batch)

    def _do(self, closure: GraphClosure, is_behind: Callable[[], bool]) -> None:
        """Run the step; mark an error as the optimizer's if it comes after the backward pass."""
        try:
            self.do(closure)
        except Exception as error:
            # C code insists on the type of a number: the step is captured again with the number itself.
            is_of_type = isinstance(error, TypeError) and names_a_class(str(error))
            if not is_behind() or isinstance(error, HookError) or is_of_type:
                raise
            error = recompilation(error) or error
            if isinstance(error, UnsupportedError):
                error.in_optimizer = True
                raise error
            # For example a hook that synchronizes with the device, or an unknown optimizer that accepts
            # no tensor as learning rate.
            raise CaptureError(
                "What comes after the backward pass cannot be captured:"
                f" {type(error).__name__}: {error}",
                "Use one of torch's own optimizers, and keep host code out of `on_after_backward`,"
                " `on_before_optimizer_step` and `configure_gradient_clipping`.",
                in_optimizer=True,
            ) from error

    def state(self) -> dict[str, Tensor]:
        part, metrics = self.training.part, self.training.metrics
        return {**part.state(self.accumulation, self._makes_gradients()), **metrics.state.tensors()}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        training, progress = self.training, self.training.optimization.optim_progress
        saved = deepcopy(progress.state_dict())
        try:
            with training.part.undone(), training.undone():
                yield
        finally:
            progress.load_state_dict(saved)

    @contextmanager
    def learning(self) -> Iterator[None]:
        training = self.training
        detach_recomputed(training.module)  # first, because the watch of effects keeps references
        with training.hooks.learning(), training.learning():
            yield
        parameters = training.module.parameters()
        training.with_gradients |= {id(p) for p in parameters if p.grad is not None}

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


def _arguments(batch: Any, closure: GraphClosure, batch_idx: int | HostValue) -> OrderedDict[str, Any]:
    arguments = OrderedDict(closure.kwargs)
    arguments[next(iter(arguments))] = batch
    if "batch_idx" in arguments:
        arguments["batch_idx"] = batch_idx
    return arguments


def _trained(module: nn.Module, before: Mapping[int, Gradient]) -> dict[str, nn.Parameter]:
    """The parameters with gradients that the step has written, and not the host before it."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and gradient_of(parameter) != before.get(id(parameter))
    }


def returned_none(module: pl.LightningModule) -> UnsupportedError:
    """The error of a `training_step` that returns None."""
    error = UnsupportedError(
        f"`{type(module).__qualname__}.training_step` returned None to skip the batch; a graph"
        " cannot skip.",
        SKIP,
        location=line_that_returns_none(type(module).training_step),
    )
    error.subject = SKIP  # as that of a branch on a tensor
    return error


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else as_output(leaf)
