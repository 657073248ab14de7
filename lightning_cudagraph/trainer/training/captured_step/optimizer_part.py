"""The optimizer's part of a training step: in the graph, or eager after the replay.

Unscaling, clipping, hooks, the optimizer's step and the scaler's update are captured with forward and
backward if they can be; otherwise they run eagerly after the replay. Guards and verification ask here
for the state that belongs to the graph in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.checks.verify.compare import buffers_and_gradients
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.eager_optimizer import EagerOptimizer
from lightning_cudagraph.optim.prepared_optimizer import PreparedOptimizer
from lightning_cudagraph.optim.scaler import PreparedScaler
from lightning_cudagraph.processes.agreement import Agreement, of_ranks
from lightning_cudagraph.trainer.config.settings import Scope
from lightning_cudagraph.trainer.config.support import check_closures, check_optimizer_part, scaler_of


class OptimizerPart:
    """The optimizer and the gradient scaler of a run, as far as they are captured.

    Attributes:
        eager_reason: why the optimizer steps eagerly after the replay; None if it is in the graph.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        scope: Scope,
        drop: Callable[[str], None],
        announce: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._backend = backend
        self._scope = scope
        self._drop = drop  # invalidates the graphs
        self._announce = announce
        self._untold = ""
        self.eager_reason: str | None = (
            '`scope="forward_backward"`' if scope == "forward_backward" else None
        )
        self.scaler = self._prepared_scaler()
        self.optimizer = EagerOptimizer(trainer.optimizers[0])

    @property
    def notes(self) -> list[str]:
        if not self.eager_reason:
            return []
        are = "are to be" if self._untold else "are"
        return [
            f"forward and backward {are} captured, and the optimizer steps eagerly: {self.eager_reason}"
        ]

    def prepare(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer for capture, unless it steps eagerly; a refusal changes nothing."""
        self.optimizer = EagerOptimizer(optimizer)
        if self.eager_reason is not None:
            return
        try:
            check_optimizer_part(self._trainer)
            self.optimizer = PreparedOptimizer(optimizer, self._backend.device, self._drop)
        except UnsupportedError as error:
            if self._scope == "step" or not error.in_optimizer:
                raise
            self.eager_reason = error.reason

    def step_eagerly(self, error: UnsupportedError) -> bool:
        """Let the optimizer step eagerly after the replay. Returns False if `error` is not about it."""
        if not error.in_optimizer or self._scope != "auto" or self.eager_reason is not None:
            return False
        self.eager_reason = error.reason
        self.let_go()
        is_done = "forward_backward" in error.remedy  # to step eagerly is the remedy
        self._untold = (
            "Forward and backward are captured from now on, and the optimizer steps eagerly:"
            f" {error.reason}" + ("" if is_done else f" Remedy: {error.remedy}")
        )
        return True

    def captured(self) -> None:
        """Announce, once a smaller part of the step has a graph, that the optimizer steps eagerly."""
        if self._untold:
            self._announce(self._untold)
        self._untold = ""

    def agree(self, agreement: Agreement) -> None:
        """Let the optimizer step eagerly in all processes or none. All call this before the first step.

        Checks repeat what is in the graph, with its collectives, and not what runs after it.
        """
        behind = of_ranks(agreement.gather(self.eager_reason and self.eager_reason.rstrip(".")))
        if behind and self.eager_reason is None:
            self.eager_reason = f"so it does in other processes: {behind}"
            self.optimizer.restore()
            self.optimizer = EagerOptimizer(self.optimizer.optimizer)

    def let_go(self) -> None:
        """Restore the optimizer to the user's form; it steps eagerly from now on."""
        self.optimizer.restore()
        self.optimizer = EagerOptimizer(self.optimizer.optimizer)

    def adopt(self, optimizer: Optimizer, has_graphs: bool) -> None:
        """Take over another optimizer or scaler, if user code has replaced the trainer's."""
        if has_graphs:
            check_closures(self._trainer, self._module, optimizer)
        if not self._has_scaler():
            self.scaler = self._prepared_scaler()
            self._drop("the trainer has another gradient scaler")
        if optimizer is self.optimizer.optimizer:
            return
        self.optimizer.restore()
        self.optimizer = EagerOptimizer(optimizer)
        if has_graphs:
            self._drop("the trainer has another optimizer")
            self.prepare(optimizer)

    def is_of(self, optimizer: Optimizer) -> bool:
        """True if neither this optimizer nor the scaler has been replaced: `adopt` has nothing to do."""
        return optimizer is self.optimizer.optimizer and self._has_scaler()

    def _has_scaler(self) -> bool:
        return scaler_of(self._trainer) is (self.scaler.scaler if self.scaler is not None else None)

    @contextmanager
    def arithmetic(self, optimizer: Optimizer, capturing: bool) -> Iterator[None]:
        """Let scaler and optimizer compute as in a graph, in captures and in eager steps."""
        with ExitStack() as stack:
            if self.scaler is not None:
                stack.enter_context(self.scaler.step_arithmetic((optimizer,), capturing))
            stack.enter_context(self.optimizer.step_arithmetic(capturing))
            yield

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the host effects of a captured step on the scaler."""
        with ExitStack() as stack:
            if self.scaler is not None:
                stack.enter_context(self.scaler.undone())
            yield

    def is_settled(self) -> bool:
        """True once the optimizer has made its state, in steps that the scaler did not skip."""
        return self.eager_reason is not None or self.scaler is None or self.scaler.applied

    def state(self, accumulation: AccumulationPhase, makes_gradients: bool) -> dict[str, Tensor]:
        """All tensors that a captured step changes, by name, in the order of the step."""
        state = buffers_and_gradients(self._module, self.parameters(makes_gradients)[1])
        if not accumulation.steps:
            return state
        if self.scaler is not None:
            state |= self.scaler.tensors()
        return {
            **state,
            **self.optimizer.state_tensors(),
            **{f"parameter `{name}`": value for name, value in self._module.named_parameters()},
        }

    def parameters(self, makes_gradients: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with gradients that a step makes, and those that it only adds to."""
        stepped = self.optimizer.parameters
        known = {id(parameter) for parameter in stepped}
        others = [p for p in self._module.parameters() if p.requires_grad and id(p) not in known]
        return (stepped, others) if makes_gradients else ([], stepped + others)

    def cheap_state(self) -> dict[str, Any]:
        """Values that a graph bakes in and that are cheap to compare before every replay, by name."""
        state = self.optimizer.hyperparameters()
        state["`accumulate_grad_batches` of the trainer"] = self._trainer.accumulate_grad_batches
        if self.eager_reason is None:
            state["`gradient_clip_val` of the trainer"] = self._trainer.gradient_clip_val
            state["`gradient_clip_algorithm` of the trainer"] = self._trainer.gradient_clip_algorithm
            if self.scaler is not None:
                state |= self.scaler.frozen()
        return state

    def quick_state(self) -> tuple[Any, ...]:
        """The values of `cheap_state` without the words."""
        trainer, values = self._trainer, self.optimizer.frozen_values()
        if self.eager_reason is not None:
            return (*values, trainer.accumulate_grad_batches)
        return (
            *values,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            *(() if self.scaler is None else self.scaler.frozen().values()),
        )

    def _prepared_scaler(self) -> PreparedScaler | None:
        scaler = scaler_of(self._trainer)
        if scaler is None:
            return None
        return PreparedScaler(scaler, self._backend.device, lambda: self.optimizer.device_state())
