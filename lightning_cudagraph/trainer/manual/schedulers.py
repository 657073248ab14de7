"""Schedulers that a captured `training_step` of manual optimization calls.

A scheduler sets a learning rate on the host. In a capture its `step` is put off until after the replay:
the step may neither read that rate nor use it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import refuse
from lightning_cudagraph.errors import CaptureError, see
from lightning_cudagraph.graphed_step.framework import optimizer_inside
from lightning_cudagraph.tensors.host_values import HostValue
from lightning_cudagraph.trainer.common.host_rules import SCHEDULED_BY_LOSS


class MovedRate(HostValue):
    """A learning rate that a scheduler has moved on; each read is refused."""

    refuses_reads = True

    def __init__(self, rate: float) -> None:
        super().__init__(rate, refuse_read)


class ScheduledOptimizers:
    """The optimizers that schedulers have moved on in the step under capture.

    Their learning rates move after the replay. A step that reads one of them before is refused.
    """

    def __init__(self) -> None:
        self._rates: dict[int, list[tuple[dict[str, Any], Any]]] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Refuse reads of the learning rates of an optimizer from now on."""
        if id(optimizer) in self._rates:
            return
        self._rates[id(optimizer)] = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._rates[id(optimizer)]:
            # A number for a tensor too: C code would take a `HostValue` for it.
            group["lr"] = MovedRate(0.0 if isinstance(rate, Tensor) else rate)

    def restore(self) -> None:
        """Restore the learning rates, at the end of a step."""
        rates, self._rates = self._rates, {}
        for group, rate in (each for groups in rates.values() for each in groups):
            group["lr"] = rate


def refuse_read() -> None:
    """Refuse a read of a learning rate that a scheduler has moved on."""
    error = CaptureError(
        "The step reads a learning rate after its scheduler has moved it;"
        " the rate moves after the replay.",
        "Call the scheduler at the end of the step." + see("manual_optimization"),
        location=user_location(),
    )
    refuse(error)


def noting_step(
    notes: list[Callable[[], object]], scheduler: Any, scheduled: ScheduledOptimizers
) -> Callable[..., None]:
    """Replacement of a scheduler's `step`: the rate moves after each replay, for the next step."""
    step = scheduler.step

    def note(*args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            error = CaptureError(
                f"`{type(scheduler).__qualname__}.step` is given an argument in the step.",
                SCHEDULED_BY_LOSS,
                location=user_location(),
            )
            refuse(error)
            return
        scheduled.add(optimizer_inside(scheduler.optimizer))
        notes.append(step)

    return note
