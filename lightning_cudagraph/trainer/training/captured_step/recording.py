"""Recording of a training step: Lightning's own code runs on the static batch.

This happens in a capture, and without one where a replay is verified. Effects on the host are undone;
those that a replay would miss are refused.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.capture.gradients.lost_gradients import LostGradients
from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.checks.audit.host_lines import line_that_returns_none
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.refusals.first_refusal import going_on
from lightning_cudagraph.device.refusals.host_reads import SKIP
from lightning_cudagraph.device.sentry.compiled import recompilation
from lightning_cudagraph.errors import CaptureError, HookError, UnsupportedError
from lightning_cudagraph.optim.supported_optimizers import refuse_own_zero_grad
from lightning_cudagraph.tensors.batch import flatten_batch, map_leaves, refuse_odd_outputs
from lightning_cudagraph.tensors.host_values import HostReads, HostValue, as_output, names_a_class
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.layers.layer_selection import LayerTimings, never_timed
from lightning_cudagraph.trainer.common.captured_run import Gradient, gradient_of
from lightning_cudagraph.trainer.common.host_rules import refuse_replaced_methods
from lightning_cudagraph.trainer.common.profilers import unprofiled
from lightning_cudagraph.trainer.common.step_numbers import STEP_GETTERS
from lightning_cudagraph.trainer.config.support import check_optimizer_part
from lightning_cudagraph.trainer.training.captured_step.recorded_step import (
    HostBreak,
    StepBody,
    StepOutputs,
)
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.run import TrainingRun
from lightning_cudagraph.trainer.training.times.marked_steps import timed_forward, timed_stages


class Recorder:
    """Recorder of the training steps of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._trainer = run.trainer
        self._module = run.module
        self._hooks = run.hooks
        self._metrics = run.metrics
        self._logs = run.logs
        self._harmless = run.settings.harmless
        self._untimed: dict[str, str] | None = None  # until a timed step was captured
        self.with_gradients: set[int] = set()  # parameters, at the end of a warm-up step

    def record(
        self,
        batch: Any,
        body: StepBody,
        timings: LayerTimings | None,
        cut: BreakGraph | None,
        step_kind: Hashable,
        reads: HostReads | None = None,
    ) -> StepOutputs:
        """Run a step on the static batch.

        Args:
            step_kind: the kind of step: its accumulation phase and batch signature.
            reads: in a capture, notes what the step reads of numbers that move.
        """
        capturing, closure = cut is not None, body.closure
        with going_on():
            body.optimizer.check_state()
        if body.has_optimizer:
            with going_on():
                check_optimizer_part(self._trainer)  # callbacks may have been added since
        optimizer = body.optimizer.optimizer if body.has_optimizer else None
        called = (self._trainer.strategy, self._trainer.precision_plugin)
        if capturing:
            with going_on():
                refuse_own_zero_grad(body.optimizer.optimizer)
        with going_on():
            refuse_replaced_methods(self._module, optimizer, self._harmless, callees=called)
        marks: StepMarks | None = None
        if timings is not None:
            marks = self._run.times.marks(body.has_optimizer, timings.placement)
        carried = self._run.carried
        uncounted = 0

        def call(own: GraphClosure, plain: Callable[[], Tensor | None]) -> Tensor | None:
            nonlocal uncounted
            uncounted += counts_drops
            with body.optimizer.floats_inside(capturing):
                loss = plain()
            end_backward()
            return loss

        inner = self._run.closure_for(
            _arguments(batch, closure, self._run.numbers.noted(reads, closure.batch_idx)),
            body.optimizer.optimizer,
            closure.batch_idx,
            call,
        )
        if marks is not None:
            inner._step_fn = timed_forward(inner._step_fn, marks)
        # Each call of the closure drops gradients once, before its backward pass.
        counts_drops = inner._zero_grad_fn is not None and not self._hooks.around_zero_grad()
        gradients = self._gradients(batch, closure) if capturing else None
        if gradients is not None:
            inner._step_fn = gradients.unused_in(inner._step_fn)
        behind = False

        def end_backward() -> None:
            nonlocal behind
            if marks is not None:
                marks.backward_ended()
            if parts.audit is not None:
                with parts.recomputed.as_before(), self._metrics.as_before(), carried.as_before():
                    parts.audit.end_backward()
            behind = True

        breaks: list[HostBreak] = []
        before = {id(p): gradient_of(p) for p in self._module.parameters()}
        taken = 0
        with ExitStack() as stack:
            stack.enter_context(unprofiled(self._trainer))
            if gradients is not None:
                stack.enter_context(gradients.restored())

            def break_graph(whose: str, drops_here: bool, run: Callable[[GraphClosure], None]) -> None:
                nonlocal taken, uncounted
                self._metrics.state.write_back()
                part = self._logs.finished(parts.events[taken:], step_kind, capturing, is_last=False)
                breaks.append(HostBreak(whose, part, uncounted, run, parts.recomputed.so_far()))
                taken, uncounted = len(parts.events), 0
                if cut is not None:
                    with marks.stage("host") if marks is not None else nullcontext():
                        cut(whose, drops_here)

            left_out = self._hooks.left_out(inner, body.optimizer.optimizer, break_graph, end_backward)
            stack.enter_context(left_out)
            if marks is not None:  # before the audit, which would attribute their hooks to the step
                stack.enter_context(marks.recording())
                stack.enter_context(timed_stages(marks, self._trainer, self._module))
            with (
                self._run.recorded(
                    step_kind,
                    batch,
                    capturing,
                    lambda: ", ".join(at_break.whose for at_break in breaks),
                    noted=frozenset() if capturing and reads is None else STEP_GETTERS,
                ) as parts,
                body.arithmetic(capturing),
            ):
                with self._run.numbers.noted_step(reads):
                    _run_body(body, inner, lambda: behind)
                result = inner.consume_result()
        if result.loss is None:
            raise self.returned_none()
        logged = self._logs.finished(parts.events[taken:], step_kind, capturing, result.loss)
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
            self._untimed = never_timed(self._untimed, marks.untimed)
        trained = {} if body.has_optimizer else self._trained(before)
        return StepOutputs(
            loss,
            extra,
            logged,
            marks,
            trained,
            uncounted,
            breaks,
            self._hooks.after_backward,
            parts.recomputed,
        )

    def _gradients(self, batch: Any, closure: GraphClosure) -> LostGradients | None:
        """The gradients of a captured step; none with sharded weights, of which torch makes new ones."""
        if any(is_around_another(type(parameter)) for parameter in self._module.parameters()):
            return None
        part = self._run.part
        makes, _ = part.parameters(closure.drops_gradients and not self._hooks.leave_gradients)
        dropped = [parameter for parameter in makes if id(parameter) in self.with_gradients]
        return LostGradients(self._module, part.optimizer.parameters, dropped, batch)

    @property
    def untimed(self) -> dict[str, str]:
        """Layers and stages that no captured timed step has times of, with the reason."""
        return self._untimed or {}

    def _trained(self, before: Mapping[int, Gradient]) -> dict[str, nn.Parameter]:
        """The parameters with gradients that the step has written, and not the host before it."""
        return {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None and gradient_of(parameter) != before.get(id(parameter))
        }

    def returned_none(self) -> UnsupportedError:
        error = UnsupportedError(
            f"`{type(self._module).__qualname__}.training_step` returned None to skip the batch; a"
            " graph cannot skip.",
            SKIP,
            location=line_that_returns_none(type(self._module).training_step),
        )
        error.subject = SKIP  # as that of a branch on a tensor
        return error

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the effects of Lightning's own code in a capture on its counters."""
        progress = self._run.optimization.optim_progress
        saved = deepcopy(progress.state_dict())
        try:
            yield
        finally:
            progress.load_state_dict(saved)


def _arguments(batch: Any, closure: GraphClosure, batch_idx: int | HostValue) -> OrderedDict[str, Any]:
    arguments = OrderedDict(closure.kwargs)
    arguments[next(iter(arguments))] = batch
    if "batch_idx" in arguments:
        arguments["batch_idx"] = batch_idx
    return arguments


def _run_body(body: StepBody, closure: GraphClosure, steps_eagerly: Callable[[], bool]) -> None:
    """Run the step; mark an error as the optimizer's if it comes after the backward pass."""
    try:
        body.run(closure)
    except Exception as error:
        # C code insists on the type of a number: the step is captured again with the number itself.
        is_of_type = isinstance(error, TypeError) and names_a_class(str(error))
        if not steps_eagerly() or isinstance(error, HookError) or is_of_type:
            raise
        error = recompilation(error) or error
        if isinstance(error, UnsupportedError):
            error.in_optimizer = True
            raise error
        # For example a hook that synchronizes with the device, or an unknown optimizer that accepts no
        # tensor as learning rate.
        raise CaptureError(
            f"What comes after the backward pass cannot be captured: {type(error).__name__}: {error}",
            "Use one of torch's own optimizers, and keep host code out of `on_after_backward`,"
            " `on_before_optimizer_step` and `configure_gradient_clipping`.",
            in_optimizer=True,
        ) from error


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else as_output(leaf)
