"""Optimizer state in host memory, mostly step counters.

torch has one counter for each parameter, and most of them are equal. A replay computes the next value of
equal ones once, and writes it into the memory of each, which stays where it is: user code may hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


# Integers with the sizes of the dtypes, in bytes: a `memoryview` knows not all dtypes themselves.
_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _memory_of(tensor: Tensor) -> memoryview[int]:
    """The memory of a 0-dim tensor, as one integer."""
    array: Any = tensor.detach().view(1).view(torch.uint8).numpy()
    return memoryview(array).cast("B").cast(_FORMATS[tensor.element_size()])  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, eq=False)
class Alike:
    """0-dim tensors that have had the same value so far.

    Attributes:
        places: addresses of their memory.
        memories: that memory, as one integer each.
    """

    name: str
    members: list[Tensor]
    places: list[int]
    memories: list[memoryview[int]]

    @classmethod
    def of(cls, name: str, members: list[Tensor]) -> Alike:
        places = [member.data_ptr() for member in members]
        return cls(name, members, places, [_memory_of(member) for member in members])

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
        number = _memory_of(value.to(self.members[0].dtype))[0]
        for memory in self.memories:
            memory[0] = number


@dataclass
class _Moved:
    """State that was moved to the host: its dictionary and name there, and the user's tensor.

    Attributes:
        version: of the user's tensor, when it had the same value.
    """

    state: dict[str, Any]
    name: str
    users: Tensor
    version: int

    def agree(self) -> None:
        """Give the user's tensor the value of now, or take that which the user has written into it."""
        if self.users._version == self.version:
            self.users.copy_(self.state[self.name])
        else:
            self.state[self.name].copy_(self.users)
        self.version = self.users._version


class HostTensors:
    """The state in host memory of one of torch's own optimizers.

    Args:
        lists_on_device: the step reads no state on the host if it works on lists of tensors.
    """

    def __init__(self, optimizer: Optimizer, lists_on_device: bool) -> None:
        self._optimizer = optimizer
        self._lists_on_device = lists_on_device
        self._moved: list[_Moved] = []
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
                    self._moved.append(_Moved(state, name, value, value._version))
                    state[name] = value.cpu()

    def before_moves(self) -> dict[int, Tensor]:
        """The user's tensors in place of which `bring` has put others, by the ids of these.

        They get the values of now: nothing writes them while graphs are replayed.
        """
        states = {id(state) for state in self._optimizer.state.values()}
        # Those of dictionaries that a load has replaced are the user's alone.
        self._moved = [
            each for each in self._moved if id(each.state) in states and each.name in each.state
        ]
        with hidden_from_modes():
            for each in self._moved:
                each.agree()
        return {id(each.state[each.name]): each.users for each in self._moved}

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
                    " parameters, or has a parameter twice.",
                    'Give each a tensor of its own: `state["step"] = state["step"].clone()`.',
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

    def are_alike(self) -> bool:
        return all(alike.are_equal() for alike in self.alike)

    def write(self, state: State) -> None:
        """Give the tensors of some groups other values."""
        for alike, value in state.items():
            alike.write(value)

    def let_go(self) -> None:
        """Move state that was brought to the host back to where it was."""
        self.before_moves()
        for each in self._moved:
            each.state[each.name] = each.users
        self.alike = []
        self._moved = []


def _is_on_lists(group: dict[str, Any]) -> bool:
    # The default is that of `torch.optim.optimizer._default_to_fused_or_foreach`.
    foreach: bool | None = group["foreach"]
    if foreach is not None:
        return foreach
    return all(type(p) in (Tensor, torch.nn.Parameter) and p.is_cuda for p in group["params"])
