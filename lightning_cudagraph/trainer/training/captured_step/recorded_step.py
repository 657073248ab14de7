"""What is captured of a training step, and what the capture leaves: outputs, logs, turns of the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.optim.optimizers import EagerOptimizer
from lightning_cudagraph.tensors.batch import compared_outputs
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.recomputed import Recomputed
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.trainer.logs.logged_step import LoggedStep
from lightning_cudagraph.trainer.training.closures import GraphClosure

__all__ = ["HostTurn", "StepBody", "StepOutputs"]


@dataclass
class HostTurn:
    """A turn of the host in the middle of a replay.

    Attributes:
        whose: hooks, in words.
        logs: what the step has logged since the turn before.
        zero_grads: how often the step has dropped gradients since the turn before.
        run: calls the hooks, given the closure of the step.
        recomputed: attributes of modules that hooks of torch have set so far.
    """

    whose: str
    logs: LoggedStep
    zero_grads: int
    run: Callable[[GraphClosure], None]
    recomputed: list[Recomputed]


@dataclass
class StepOutputs:
    """The static outputs of a captured step.

    Attributes:
        loss: what `training_step` returned.
        extra: what else it returned.
        logs: what was logged, after the last turn of the host.
        marks: the timing events, or None.
        parameters: those with gradients by name, if the optimizer steps behind the graph.
        zero_grads: how often gradients were dropped after the last turn of the host. In all once, unless
            the optimizer calls the closure more often than that, the gradients of several batches are
            accumulated, or the host drops them.
        turns: those of the host.
        after_backward: `on_after_backward` runs on the host.
        recomputed: attributes of modules that hooks of torch have set.
    """

    loss: Tensor
    extra: dict[str, Any]
    logs: LoggedStep
    marks: StepMarks | None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    zero_grads: int = 1
    turns: list[HostTurn] = field(default_factory=list)
    after_backward: bool = False
    recomputed: list[Recomputed] = field(default_factory=list)

    def values(self) -> dict[str, Tensor]:
        """What can be compared just after the step, by name, in its order."""
        gradients = {
            f"the gradient of `{name}`": local(parameter.grad)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        found = {"the loss": self.loss, **compared_outputs(self.extra, "the output of `training_step`")}
        for index, logs in enumerate((*(turn.logs for turn in self.turns), self.logs)):
            part = f" (part {index + 1})" if self.turns else ""
            found |= {f"{name}{part}": value for name, value in logs.values().items()}
        return found | gradients


@dataclass
class StepBody:
    """What is captured of a step.

    Attributes:
        run: does it, with the closure that it is given.
        optimizer: the optimizer, as far as it is in the graph.
        arithmetic: entered around it, told whether a capture is under way.
        place: in the window of batches whose gradients are accumulated.
    """

    run: Callable[[GraphClosure], object]
    optimizer: EagerOptimizer
    arithmetic: Callable[[bool], AbstractContextManager[None]]
    place: Place

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's step is part of it."""
        return self.place.steps
