"""The seat in Lightning's training loop.

Lightning's loop stays in charge. One object of it is replaced by a thin subclass, whose closures say
which batch they belong to, and one method of the strategy, in which the whole optimizer step happens:
that is where a batch is warmed up, captured or replayed. Everything replaced goes through one
`ExitStack`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.capture.backend import Backend
from lightning_cudagraph.capture.batch import map_leaves, refuse_hidden_tensors
from lightning_cudagraph.capture.engine import Phase, Step, StepCounts, StepEngine
from lightning_cudagraph.capture.frozen import FrozenIndex, frozen_python_audit
from lightning_cudagraph.capture.guards import Guards
from lightning_cudagraph.capture.verify import Verifier
from lightning_cudagraph.closures import GraphClosure, GraphedOptimization
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.logs import LoggedStep, recorded_logs
from lightning_cudagraph.metrics import metrics_refused
from lightning_cudagraph.optim.optimizers import PreparedOptimizer
from lightning_cudagraph.support import check_private_names
from lightning_cudagraph.timing.layers import LayerTimings, select_layers
from lightning_cudagraph.timing.marks import StepMarks
from lightning_cudagraph.timing.report import LayerTimes, StepPace, fit_report
from lightning_cudagraph.timing.tensorboard import TensorBoardWriter

__all__ = ["GraphedTraining"]


# What torch and Lightning keep for themselves in every module.
_OWN = frozenset(vars(pl.LightningModule()))


@dataclass
class _StepOutputs:
    """The static outputs of a captured step."""

    loss: Tensor
    extra: dict[str, Any]
    logs: LoggedStep
    marks: StepMarks | None

    def values(self) -> dict[str, Tensor]:
        """What can be compared, by name."""
        return {"the loss": self.loss, **self.logs.values()}


# Getters of what moves from step to step, and is frozen in a graph.
_COUNTERS = {
    owner.__dict__[name].fget.__code__: f"{label}.{name}"
    for owner, label in ((pl.LightningModule, "self"), (pl.Trainer, "trainer"))
    for name in ("global_step", "current_epoch")
}


class GraphedTraining:
    """One `fit` whose steps are captured.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        backend: where steps are captured.
        warmup_steps: training steps before a capture.
        raise_unsupported: raise when a step cannot be captured, instead of going on eagerly.
        timings: which layers are timed, or None for no events in the graph.
        verify_replays: how many of the first replays of a graph are checked against eager steps.
        verify_every_n_steps: beyond those, check one replay in so many; None for none.

    Raises:
        UnsupportedError: if the optimizer is not known to be right in a graph.
        ConfigurationError: if `timings` names a layer that is not there.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        warmup_steps: int,
        raise_unsupported: bool,
        timings: LayerTimings | None,
        verify_replays: int,
        verify_every_n_steps: int | None,
    ) -> None:
        check_private_names(trainer, module)
        self._trainer = trainer
        self._module = module
        self._backend = backend
        self._layers: dict[str, nn.Module] | None = (
            select_layers(module, timings) if timings is not None else None
        )
        self._pace = StepPace()
        self._times = LayerTimes()
        self._tensorboard = TensorBoardWriter(trainer.loggers)
        # The replay whose events have not been read yet, with its step.
        self._unread: tuple[StepMarks, int] | None = None
        self._patches = ExitStack()
        self._in_step = False
        # Last, because it changes the optimizer: nothing after it may fail.
        self._optimizer = PreparedOptimizer(
            trainer.optimizers[0], backend.device, backend.lr_dtype, self._forget
        )
        self._guards = Guards(module, self._cheap_state, lambda: self._optimizer.addresses(), _OWN)
        self._verifier = Verifier(backend, self._state, verify_replays, verify_every_n_steps)
        self._engine: StepEngine[_StepOutputs] = StepEngine(
            backend,
            self._guards,
            self._verifier,
            self._parameters,
            warmup_steps,
            backend.graphs_per_step if timings is not None else 1,
            raise_unsupported,
            lambda text: rank_zero_info(f"lightning_cudagraph: {text}"),
            lambda: self._optimizer.restore(),
        )

    @property
    def counts(self) -> StepCounts:
        """What became of the steps so far."""
        return self._engine.counts

    @property
    def notes(self) -> list[str]:
        """What was changed for the capture, in words."""
        return self._optimizer.notes

    def install(self) -> None:
        """Take the seat."""
        loop = self._trainer.fit_loop.epoch_loop
        strategy = self._trainer.strategy
        original = loop.automatic_optimization
        graphed = GraphedOptimization.__new__(GraphedOptimization)
        graphed.__dict__.update(original.__dict__)
        graphed.around_eager = self._floats_inside
        self._optimization = graphed

        def give_back() -> None:
            del graphed.around_eager
            original.__dict__.update(graphed.__dict__)
            loop.automatic_optimization = original

        loop.automatic_optimization = graphed
        self._patches.callback(give_back)

        self._eager_step: Callable[..., Any] = strategy.optimizer_step
        had = strategy.__dict__.get("optimizer_step")

        def put_back() -> None:
            if had is None:
                del strategy.__dict__["optimizer_step"]
            else:
                strategy.__dict__["optimizer_step"] = had

        strategy.__dict__["optimizer_step"] = self._optimizer_step
        self._patches.callback(put_back)

    def close(self) -> None:
        """Leave the seat: put everything back, and let go of graphs and their memory."""
        self._unread = None
        with ExitStack() as stack:  # every part, also where one of them fails
            stack.callback(self._engine.close)
            stack.callback(self._tensorboard.close)
            stack.callback(self._optimizer.restore)
            stack.callback(self._patches.close)

    def suspect(self) -> None:
        """Something other than training steps has happened, and can have changed what is baked in."""
        self._guards.suspect()
        self._pace.pause()

    def finish(self, description: str) -> str:
        """Read what is left to read, and write the report.

        Args:
            description: what the graphs ran on.

        Returns:
            The report.
        """
        self._read_times()
        text = fit_report(description, self._engine.counts, self._pace, self._times, self._notes())
        self._tensorboard.add_text("cudagraph/report", text, self._step_number())
        return text

    def _notes(self) -> list[str]:
        verified = [f"{self._verifier.checked} replay(s) verified against eager steps"]
        return [*verified, *self._verifier.notes, *self._optimizer.notes]

    def _step_number(self) -> int:
        return self._trainer.fit_loop.epoch_loop._batches_that_stepped

    def _forget(self, reason: str) -> None:
        self._engine.drop(reason)

    def _state(self) -> dict[str, Tensor]:
        """All tensors that a step changes, by name, in the order of the step."""
        return {
            **{f"buffer `{name}`": buffer for name, buffer in self._module.named_buffers()},
            **{
                f"the gradient of a parameter that no optimizer steps ({index})": parameter.grad
                for index, parameter in enumerate(self._parameters()[1])
                if parameter.grad is not None
            },
            **self._optimizer.state_tensors(),
            **{f"parameter `{name}`": value for name, value in self._module.named_parameters()},
        }

    def _parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those that the optimizer steps, and those of the module that nobody steps."""
        stepped = self._optimizer.parameters
        known = {id(parameter) for parameter in stepped}
        others = [p for p in self._module.parameters() if p.requires_grad and id(p) not in known]
        return stepped, others

    def _floats_inside(self) -> AbstractContextManager[None]:
        return self._optimizer.floats_inside() if self._in_step else nullcontext()

    def _cheap_state(self) -> dict[str, Any]:
        return {
            **self._optimizer.hyperparameters(),
            "`gradient_clip_val` of the trainer": self._trainer.gradient_clip_val,
            "`gradient_clip_algorithm` of the trainer": self._trainer.gradient_clip_algorithm,
        }

    def _optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """In the place of `Strategy.optimizer_step`: the whole training step happens in here."""
        self._adopt(optimizer)
        if not isinstance(closure, GraphClosure):
            reason = "a step without backward pass, with accumulation, or with a closure of one's own"
            self._engine.counts.note_eager(reason)
            with self._backend.on_side_stream():
                return self._run(optimizer, closure, model, kwargs)
        returned: list[Any] = []

        def run() -> None:
            returned.append(self._run(optimizer, closure, model, kwargs))

        step = Step(
            closure.batch,
            run,
            lambda batch: self._record(batch, closure, optimizer, model, kwargs, self._layers),
            lambda batch: self._record(batch, closure, optimizer, model, kwargs, None),
            _StepOutputs.values,
            self._undone,
        )
        phase, outputs = self._engine.step(step, self._optimizer.refresh)
        if outputs is None:
            self._check_result(closure, phase)
        else:
            returned.append(self._take_outputs(outputs, closure))
        self._pace.tick(phase)
        return returned[0]

    def _run(self, optimizer: Optimizer, closure: Any, model: Any, kwargs: dict[str, Any]) -> Any:
        """The training step, eagerly, in the arithmetic of the captured one."""
        self._optimizer.refresh()
        with self._optimizer.step_arithmetic():
            self._in_step = True
            try:
                return self._eager_step(optimizer, closure, model, **kwargs)
            finally:
                self._in_step = False

    def _adopt(self, optimizer: Optimizer) -> None:
        """Take over an optimizer that somebody has put in the place of the one before."""
        if optimizer is self._optimizer.optimizer:
            return
        self._optimizer.restore()
        self._optimizer = PreparedOptimizer(
            optimizer, self._backend.device, self._backend.lr_dtype, self._forget
        )
        self._forget("the trainer has another optimizer")

    def _check_result(self, closure: GraphClosure, phase: Phase) -> None:
        if phase is Phase.WARMING:
            # An eager step that is compared in time must have ended.
            self._backend.synchronize()
            if closure._result is not None and closure._result.closure_loss is None:
                self._engine.unsupported(self._returned_none())

    def _returned_none(self) -> UnsupportedError:
        return UnsupportedError(
            f"`{type(self._module).__qualname__}.training_step` returned None to skip the batch; a"
            " graph cannot skip.",
            "Return a loss for every batch, such as one multiplied with zero.",
        )

    def _record(
        self,
        batch: Any,
        closure: GraphClosure,
        optimizer: Optimizer,
        model: Any,
        kwargs: dict[str, Any],
        timed: Mapping[str, nn.Module] | None,
    ) -> _StepOutputs:
        """The training step, as it is captured: Lightning's own code, on the static batch."""
        names = list(closure.kwargs)
        step_kwargs = OrderedDict(closure.kwargs)
        step_kwargs[names[0]] = batch
        if "batch_idx" in step_kwargs:
            step_kwargs["batch_idx"] = FrozenIndex("batch_idx")
        inner = self._optimization.closure_for_capture(
            step_kwargs,
            optimizer,
            closure.batch_idx,
            lambda: self._optimizer.floats_inside(recording=True),
        )
        marks = StepMarks(self._backend, timed) if timed is not None else None
        if marks is not None:
            inner._step_fn = _then(inner._step_fn, marks.forward_ended)
            if inner._backward_fn is not None:
                inner._backward_fn = _then(inner._backward_fn, marks.backward_ended)
        before = self._optimizer.addresses()
        with ExitStack() as stack:
            logs = stack.enter_context(recorded_logs(self._trainer, self._module))
            stack.enter_context(metrics_refused(self._module))
            self._guards.mentioned = stack.enter_context(
                frozen_python_audit(self._module, self._backend.device, _COUNTERS)
            )
            stack.enter_context(self._optimizer.step_arithmetic(recording=True))
            if marks is not None:
                stack.enter_context(marks.recording())
            self._eager_step(optimizer, inner, model, **kwargs)
            result = inner.consume_result()
            logged = LoggedStep(logs)
        if result.loss is None:
            raise self._returned_none()
        if self._optimizer.addresses() != before:
            raise UnsupportedError(
                f"`{type(optimizer).__qualname__}` makes state in this step that it did not have after"
                " warm-up, because a parameter has its first gradient only now.",
                "Raise `warmup_steps` until every parameter has had a gradient.",
            )
        # The result still holds autograd's graph, and with it the memory of all activations.
        refuse_hidden_tensors(result.extra, "the output of `training_step`")
        extra = map_leaves(result.extra, _detached)
        return _StepOutputs(result.loss, extra, logged, marks)

    def _take_outputs(self, outputs: _StepOutputs, closure: GraphClosure) -> Tensor:
        """After a replay: hand on what Lightning would have had from an eager step."""
        # Copies, because callbacks keep outputs, and the next replay overwrites the static ones.
        result = ClosureResult(None, extra=map_leaves(outputs.extra, _copied))
        result.loss = outputs.loss.clone()
        closure._result = result
        zero_grad = self._optimization.optim_progress.optimizer.zero_grad
        zero_grad.increment_ready()
        zero_grad.increment_started()
        zero_grad.increment_completed()
        outputs.logs.hand_over(self._trainer)
        if outputs.marks is not None:
            if self._backend.graphs_per_step > 1:
                self._read_times()
            self._unread = (outputs.marks, self._step_number())
            if self._backend.graphs_per_step == 1:
                self._read_times()
        return result.loss

    def _read_times(self) -> None:
        """Read the events of the replay before this one, while this one runs."""
        if self._unread is None:
            return
        marks, step_number = self._unread
        self._unread = None
        times_ms = marks.read()
        self._times.add(marks.tags, times_ms)
        self._tensorboard.add(marks.tags, times_ms, step_number)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo what Lightning's own code does on the host in a capture: counters and names."""
        progress = self._optimization.optim_progress
        saved = deepcopy(progress.state_dict())
        fx_name = self._module._current_fx_name
        try:
            yield
        finally:
            progress.load_state_dict(saved)
            self._module._current_fx_name = fx_name


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, FrozenIndex):
        raise CaptureError(
            "The output of `training_step` holds `batch_idx`, which would stay what it is in this step.",
            "Leave it out: `on_train_batch_end` is given it.",
        )
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _then(function: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        result = function(*args)
        after()
        return result

    return both
