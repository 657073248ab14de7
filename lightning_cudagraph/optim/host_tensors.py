"""The state that an optimizer keeps in host memory: the counters of its steps, above all.

Torch has one for each parameter, and most of them are always the same number. Those that are lie side by
side in one piece of memory, so that a replay moves all of them at once. The tensors themselves stay the
ones that the optimizer and its user know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.names.torch_names import _disable_current_modes

__all__ = ["Alike", "HostTensors", "out_of_sight"]


@contextmanager
def out_of_sight() -> Iterator[None]:
    """Inside, a capture does not see what is done to tensors in host memory."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


@dataclass(frozen=True)
class Alike:
    """Tensors without dimensions that have had the same value so far.

    Attributes:
        name: that they have in the state of the optimizer.
        together: all of them, in one tensor.
        members: each of them.
        data: its memory, byte by byte.
    """

    name: str
    together: Tensor
    members: list[Tensor]
    data: memoryview

    def are_equal(self) -> bool:
        """Whether they have the same value."""
        size_bytes = self.together.element_size()
        return self.data[size_bytes:] == self.data[:-size_bytes]

    def read(self) -> Tensor:
        """A copy of the value."""
        return self.together[0].clone()


class HostTensors:
    """The state of an optimizer in host memory.

    Args:
        optimizer: one of torch's own.
        device: where its parameters are.

    Attributes:
        alike: the tensors, since `gather`.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self.alike: list[Alike] = []

    def found(self) -> list[tuple[str, Tensor]]:
        """Each tensor that is in host memory, with its name in the state."""
        is_on_host = self._is_on_host()
        return [
            (name, value)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for name, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() == 0 and is_on_host(group, name, value)
        ]

    def _is_on_host(self) -> Callable[[Any, str, Tensor], bool]:
        if self._device.type != "cpu":
            return lambda group, name, value: value.device.type == "cpu"
        # On the emulator host and device are one. What a GPU would have has the shape of its parameter.
        shaped = [
            (name, value.dim())
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.dim()
            for name, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        names = {name for name, dimensions in shaped if not dimensions} or {"step"}
        return lambda group, name, value: (
            name in names and not group.get("capturable") and not group.get("fused")
        )

    def gather(self) -> None:
        """Bring those that are alike together, if they are not."""
        by_value: dict[Any, list[Tensor]] = {}
        with out_of_sight():
            found = self.found()
            known = {id(tensor) for alike in self.alike for tensor in alike.members}
            if known == {id(tensor) for _, tensor in found} and self.are_alike():
                return
            for name, tensor in found:
                by_value.setdefault((name, tensor.dtype, tensor.item()), []).append(tensor)
            self.alike = []
            for (name, _, _), members in by_value.items():
                together = torch.stack([member.detach() for member in members])
                for place, member in enumerate(members):
                    member.set_(together.untyped_storage(), place, (), ())
                numbers: Any = together.numpy()
                self.alike.append(Alike(name, together, members, memoryview(numbers).cast("B")))

    def are_alike(self) -> bool:
        """Whether those that were alike still are."""
        return all(alike.are_equal() for alike in self.alike)

    def let_go(self) -> None:
        """Give each of them memory of its own."""
        with out_of_sight():
            for alike in self.alike:
                for member in alike.members:
                    member.set_(member.clone().untyped_storage(), 0, (), ())
        self.alike = []
