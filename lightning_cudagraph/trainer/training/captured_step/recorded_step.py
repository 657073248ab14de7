"""The static outputs of a training step: loss, logs, graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.tensors.batch import compared_outputs, map_leaves
from lightning_cudagraph.tensors.host_values import held
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.recomputed import Recomputed
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.trainer.logs.logged_step import LoggedStep
from lightning_cudagraph.trainer.training.closures import GraphClosure


@dataclass
class HostBreak:
    """A graph break: hooks that run on the host in the middle of every replay.

    Attributes:
        zero_grads: number of `zero_grad` calls since the previous graph break.
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
        logs: values logged after the last graph break.
        marks: the timing events; None in an untimed capture instance.
        parameters: those with gradients by name, if the optimizer steps eagerly after the replay.
        zero_grads: number of `zero_grad` calls after the last graph break. The step makes one call in
            all, unless the optimizer calls the closure several times, gradients are accumulated, or a
            hook drops them.
        after_backward: `on_after_backward` runs on the host, after the replay.
        recomputed: attributes of modules that hooks of torch have set.
    """

    loss: Tensor
    extra: dict[str, Any]
    logs: LoggedStep
    marks: StepMarks | None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    zero_grads: int = 1
    breaks: list[HostBreak] = field(default_factory=list)
    after_backward: bool = False
    recomputed: list[Recomputed] = field(default_factory=list)

    def values(self) -> dict[str, Tensor]:
        """Tensors to compare right after the step, by name, in the order of the step."""
        gradients = {
            f"the gradient of `{name}`": local(parameter.grad)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        extra = map_leaves(self.extra, held)
        found = {"the loss": self.loss, **compared_outputs(extra, "the output of `training_step`")}
        for index, logs in enumerate((*(at_break.logs for at_break in self.breaks), self.logs)):
            part = f" (part {index + 1})" if self.breaks else ""
            found |= {f"{name}{part}": value for name, value in logs.values().items()}
        return found | gradients
