"""Optimizer state in host memory, mostly step counters.

torch has one counter for each parameter, and most of them are equal. Equal ones get one contiguous piece
of memory, so that a replay advances all of them at once. The tensor objects stay those of the optimizer.
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
    """Hide operations on host tensors from the modes of a capture."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


@dataclass(frozen=True)
class Alike:
    """0-dim tensors that have had the same value so far.

    Attributes:
        name: their name in the optimizer state.
        together: one tensor over the memory of all of them.
        members: the single tensors.
        data: the memory of `together`, byte by byte.
    """

    name: str
    together: Tensor
    members: list[Tensor]
    data: memoryview

    def are_equal(self) -> bool:
        """True if all members have the same value."""
        size_bytes = self.together.element_size()
        return self.data[size_bytes:] == self.data[:-size_bytes]

    def read(self) -> Tensor:
        """A copy of the common value."""
        return self.together[0].clone()


class HostTensors:
    """The state in host memory of one of torch's own optimizers.

    Attributes:
        alike: the groups of equal tensors, since `gather`.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self.alike: list[Alike] = []

    def found(self) -> list[tuple[str, Tensor]]:
        """The 0-dim state tensors in host memory, with their names in the state."""
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
        # On the emulator host and device are one. State that would be on a GPU has its parameter's
        # shape.
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
        """Group equal tensors into contiguous memory, unless the groups still hold."""
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
                for index, member in enumerate(members):
                    member.set_(together.untyped_storage(), index, (), ())
                numbers: Any = together.numpy()
                self.alike.append(Alike(name, together, members, memoryview(numbers).cast("B")))

    def are_alike(self) -> bool:
        """True if the tensors of each group are still equal."""
        return all(alike.are_equal() for alike in self.alike)

    def let_go(self) -> None:
        """Give each tensor memory of its own again."""
        with out_of_sight():
            for alike in self.alike:
                for member in alike.members:
                    member.set_(member.clone().untyped_storage(), 0, (), ())
        self.alike = []
