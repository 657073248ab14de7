"""Optimizer state in host memory, mostly step counters.

torch has one counter for each parameter, and most of them are equal. A replay computes the next value of
equal ones once, and writes it into the memory of each, which stays where it is: user code may hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.names.torch_names import _disable_current_modes
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.optim.host_arithmetic.host_program import State


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Hide operations on host tensors from the modes of a capture."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


@dataclass(frozen=True)
class Alike:
    """0-dim tensors that have had the same value so far.

    Attributes:
        places: addresses of their memory.
        memories: that memory, as a memoryview of one number each.
    """

    name: str
    members: list[Tensor]
    places: list[int]
    memories: list[Any]

    @classmethod
    def of(cls, name: str, members: list[Tensor]) -> Alike:
        arrays: list[Any] = [member.detach().view(1).numpy() for member in members]
        places = [member.data_ptr() for member in members]
        return cls(name, members, places, [memoryview(array) for array in arrays])

    @property
    def key(self) -> tuple[str, int]:
        """The name of the common value in a host program."""
        return ("state", id(self))

    def are_equal(self) -> bool:
        data, size_bytes = b"".join(self.memories), self.memories[0].nbytes
        return data[size_bytes:] == data[:-size_bytes]

    def is_whole(self) -> bool:
        """True if no member was given other memory (`member.data = ...`)."""
        return [member.data_ptr() for member in self.members] == self.places

    def read(self) -> Tensor:
        return self.members[0].detach().clone()

    def write(self, value: Tensor) -> None:
        # Not by an op, which would count as a write of the user's.
        number = value.item()
        for memory in self.memories:
            memory[0] = number


class HostTensors:
    """The state in host memory of one of torch's own optimizers.

    Args:
        lists_on_device: the step reads no state on the host if it works on lists of tensors.
    """

    def __init__(self, optimizer: Optimizer, lists_on_device: bool) -> None:
        self._optimizer = optimizer
        self._lists_on_device = lists_on_device
        self._brought: list[tuple[dict[str, Any], str, Tensor]] = []  # with the user's tensors
        self.alike: list[Alike] = []

    def found(self) -> list[tuple[str, Tensor]]:
        """The 0-dim state tensors in host memory, with their names in the state."""
        # On the emulator host and device are one.
        found = self._read_on_host()
        return [(name, state[name]) for state, name in found if state[name].device.type == "cpu"]

    def _read_on_host(self) -> list[tuple[dict[str, Any], str]]:
        """The 0-dim state that the step reads on the host, wherever it is, and the dictionaries.

        The rest of a parameter's state is on its device, and has its shape, which may be a number's.
        """
        groups = [
            (group, self._lists_on_device and _is_on_lists(group))
            for group in self._optimizer.param_groups
            if not group.get("capturable") and not group.get("fused")
        ]
        scalars = [
            (parameter.dim() > 0 or value.device != parameter.device, state, name)
            for group, stays in groups
            for parameter in group["params"]
            if (state := self._optimizer.state.get(parameter))
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim() == 0
            # A checkpoint may have put it on the host.
            if not (stays and value.device == parameter.device)
        ]
        names = {name for is_surely, _, name in scalars if is_surely} or {"step"}
        return [(state, name) for _, state, name in scalars if name in names]

    def bring(self) -> None:
        """Move the state that the step reads on the host there; not within a capture.

        `load_state_dict` puts all but `step` on the device of the parameter, where each step waits for
        the value.
        """
        with hidden_from_modes():
            for state, name in self._read_on_host():
                if (value := state[name]).device.type != "cpu":
                    self._brought.append((state, name, value))
                    state[name] = value.cpu()

    def before_moves(self) -> dict[int, Tensor]:
        """The user's tensors in place of which `bring` has put others, by the ids of these.

        They get the values of now: nothing writes them while graphs are replayed.
        """
        with hidden_from_modes():
            return {
                id(state[name]): users.copy_(state[name])
                for state, name, users in self._brought
                if name in state
            }

    def gather(self) -> None:
        """Group equal tensors, unless the groups still hold.

        Raises:
            CaptureError: two parameters share one of them.
        """
        by_value: dict[Any, list[Tensor]] = {}
        with hidden_from_modes():
            found = self.found()
            known = {id(tensor) for alike in self.alike for tensor in alike.members}
            is_same = known == {id(tensor) for _, tensor in found} and self.are_alike()
            if is_same and all(alike.is_whole() for alike in self.alike):
                return
            if len({tensor.data_ptr() for _, tensor in found}) < len(found):
                raise CaptureError(
                    f"`{type(self._optimizer).__qualname__}` counts in one tensor for several"
                    " parameters: a step counts in it once for each of them.",
                    "Give each parameter state of its own: load a deep copy of a `state_dict`.",
                    in_optimizer=True,
                )
            for name, tensor in found:
                by_value.setdefault((name, tensor.dtype, tensor.item()), []).append(tensor)
            self.alike = [Alike.of(name, members) for (name, _, _), members in by_value.items()]

    def split(self, alike: Alike, moved: Collection[int]) -> tuple[Alike, Alike]:
        """Split a group into the members with these ids, and the others."""
        parts = (
            Alike.of(alike.name, [each for each in alike.members if id(each) in moved]),
            Alike.of(alike.name, [each for each in alike.members if id(each) not in moved]),
        )
        self.alike = [each for each in self.alike if each is not alike] + [*parts]
        return parts

    def are_of_now(self, groups: Iterable[Alike]) -> bool:
        """True if none of the groups was split or replaced since."""
        return {id(alike) for alike in groups} <= {id(alike) for alike in self.alike}

    def are_alike(self) -> bool:
        return all(alike.are_equal() for alike in self.alike)

    def write(self, state: State) -> None:
        """Give the tensors of some groups other values, by the keys of the groups."""
        for alike in self.alike:
            if alike.key in state:
                alike.write(state[alike.key])

    def let_go(self) -> None:
        """Move state that was brought to the host back to where it was."""
        self.before_moves()
        for state, name, users in self._brought:
            if name in state:
                state[name] = users
        self.alike = []
        self._brought = []


def _is_on_lists(group: dict[str, Any]) -> bool:
    # The default is that of `torch.optim.optimizer._default_to_fused_or_foreach`.
    foreach: bool | None = group["foreach"]
    if foreach is not None:
        return foreach
    return all(type(p) in (Tensor, torch.nn.Parameter) and p.is_cuda for p in group["params"])
