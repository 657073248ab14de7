"""Gate around an optimizer step that a gradient scaler may skip: a skipped step changes no memory.

The step is always taken. Ops with a form that leaves its target alone after an overflow, bit for bit,
run in that form (`scalar_ops.py`). Memory that any other op of the step writes is copied before, and
`torch.where` restores it. A learning rate of zero would not do: momentum and averages move.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.host_work import work_under_capture
from lightning_cudagraph.device.sentry.own_modes import InputsMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.writes import storage_id, written_by


class Gate(InputsMode):
    """Dispatch mode that finds the older memory that a step writes, and keeps copies of it.

    Args:
        overflowed: 1 on the device if the step is skipped, else 0; fused kernels read it.
        last_was_skipped: until the end of the step, true on the device if the step before was skipped.
    """

    def __init__(self, overflowed: Tensor, last_was_skipped: Tensor) -> None:
        super().__init__()
        self.last_was_skipped = last_was_skipped
        self.overflowed = overflowed
        self.skip = overflowed.ne(0)
        self.is_open = False
        # By storage, offset, shape and strides: the tensor, and a copy of it.
        self._saved: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._passes = False

    def __enter__(self) -> Any:
        self.is_open = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.is_open = False
        super().__exit__(*error)

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"The step of the optimizer draws random numbers (`{func.name()}`), which a step that"
                " overflows in fp16 must not do.",
                "Use bf16, or another optimizer, to have its step in the graph too.",
                in_optimizer=True,
            )
        if not self._passes and kwargs.get("found_inf") is None:
            self.save(t for t in written_by(func, args, kwargs) if self.holds(t))

    def holds(self, tensor: Tensor) -> bool:
        """True for memory that is older than the step, which must not change if it is skipped."""
        return storage_id(tensor) not in self.made

    def save(self, tensors: Iterable[Tensor]) -> None:
        """Keep copies of tensors as they are now, to restore them."""
        for tensor in tensors:
            own = local(tensor).detach()
            key = (storage_id(own), own.storage_offset(), own.shape, own.stride())
            if key not in self._saved:
                self._saved[key] = own, own.clone()

    def restore(self) -> None:
        """Restore what was copied, on the device, if the step is skipped."""
        with torch.no_grad():
            # Two may share memory: the copy saved first holds the state before.
            for tensor, before in reversed(self._saved.values()):
                torch.where(self.skip, before, tensor, out=tensor)
        self._saved.clear()  # their memory is free for the rest of the graph

    def passing(self) -> AbstractContextManager[None]:
        """Let the enclosed ops write: they leave their targets alone if the step is skipped."""
        return setting(self, _passes=True)

    def put(self, target: Tensor, value: Tensor) -> Tensor:
        """Write a value into a tensor, unless the step is skipped."""
        with self.passing():
            return torch.where(self.skip, target, value, out=target)


def gate_of(optimizer: Optimizer) -> Gate | None:
    """The gate of an optimizer's step in the capture under way, if a gradient scaler may skip it."""
    gate: Gate | None = work_under_capture().gates.get(id(optimizer))
    return gate
