"""Param groups of an optimizer, prepared for capture."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.host_arithmetic.host_program import HostScalar
from lightning_cudagraph.optim.host_arithmetic.traced_step import TracedStep
from lightning_cudagraph.optim.supported_optimizers import Form
from lightning_cudagraph.tensors.host_values import value_of

# An option that moves twice within so many calls (two or three a step) moves in every step.
_CALLS_BETWEEN_MOVES = 6

_COMPARED = (bool, int, float, complex, str, tuple, type(None))

_DELETED = "deleted"  # instead of an option: other than None, as which it may have been given

# The name of an option, and the index in it if it is a tuple.
_Part = tuple[str, int | None]


class PreparedGroup:
    """The options of one param group: those that a capture freezes, and replacements for the others.

    Attributes:
        group: the optimizer's own dictionary, with the user's values except inside a captured step.
    """

    def __init__(self, form: Form, optimizer: Optimizer, index: int, alone: bool) -> None:
        self._form = form
        self._index = index
        self._alone = alone
        self.group: dict[str, Any] = optimizer.param_groups[index]
        # The step does not read entries of schedulers (`initial_lr`).
        self._names = [name for name in optimizer.defaults if name != "lr"]
        self._lr_is_tensor = isinstance(self.group["lr"], Tensor)
        self._own: dict[str, Any] = {}  # the user's values, while they are replaced
        self._inside: dict[str, Any] = {}  # their replacements
        self._calls = 0
        self._seen = dict(self._parts())
        self._latest = self._values()
        self._moved_at: dict[_Part, int] = {}
        self._moving: set[_Part] = set()

    def fits(self, group: dict[str, Any]) -> bool:
        return group is self.group and isinstance(group["lr"], Tensor) == self._lr_is_tensor

    def _parts(self) -> Iterator[tuple[_Part, Any]]:
        """The numbers among the options, without the learning rate."""
        for name in self._names:
            value = self.group.get(name)
            if type(value) is float:
                yield (name, None), value
            elif type(value) is tuple:
                yield from (((name, index), each) for index, each in enumerate(value))

    def _values(self) -> list[Any]:
        return [*map(self.group.get, self._names)]

    def note_moves(self) -> None:
        """Find out which options a scheduler moves in every step, as `OneCycleLR` does with momentum."""
        self._calls += 1
        self._note_moves()

    def _note_moves(self) -> None:
        if self._form.inspected or self._alone:
            return
        latest, self._latest = self._latest, self._values()
        if all(map(operator.is_, self._latest, latest)):  # none was set
            return
        for part, value in self._parts():
            if self._seen.get(part) != value:
                if self._calls - self._moved_at.get(part, -_CALLS_BETWEEN_MOVES) < _CALLS_BETWEEN_MOVES:
                    self._moving.add(part)
                self._moved_at[part] = self._calls
                self._seen[part] = value

    def _frozen(self, name: str) -> Any:
        """The value of an option as a guard compares it: moving numbers are masked."""
        value = self.group.get(name, _DELETED)
        if type(value) is list:  # changed in place, it would equal itself
            value = tuple(value)
        if (name, None) in self._moving:
            return "a number that moves"
        if type(value) is tuple and self._moving:
            return tuple(
                "a number that moves" if (name, index) in self._moving else each
                for index, each in enumerate(value)
            )
        if self._form.inspected and type(value) not in _COMPARED:
            return type(value)  # the rest is compared with all else that the optimizer holds
        return value

    def frozen(self) -> dict[str, Any]:
        """The options of the group that a capture freezes, labelled for the user."""
        self._note_moves()  # guards look at each micro-batch: no call that counts
        values = {f"`{name}` of param group {self._index}": self._frozen(name) for name in self._names}
        lr = self.group["lr"]
        label = f"`lr` of param group {self._index}"
        values[label] = f"a tensor at {lr.data_ptr():#x}" if isinstance(lr, Tensor) else "a float"
        return values

    def frozen_values(self) -> tuple[Any, ...]:
        """The values of `frozen` and the parameters' identity, in a form that is fast to compare."""
        group = self.group
        lr, parameters = group["lr"], group["params"]
        # The type first: `isinstance(_, Tensor)` is slow for all other objects.
        is_tensor = type(lr) is not float and isinstance(lr, Tensor)
        lr_address = lr.data_ptr() if is_tensor else None
        options: Sequence[Any] = [*map(group.get, self._names, repeat(_DELETED))]
        if self._moving or self._form.inspected or list in map(type, options):
            options = [*map(self._frozen, self._names)]
        return (*options, lr_address, id(parameters), len(parameters))

    def swap_in(self, traced: TracedStep | None) -> bool:
        """Replace options with values that a capture does not freeze; True if they changed since."""
        value_of(self.group["lr"])  # which a scheduler may have moved on
        before = dict(self._own)
        if traced is not None:
            self._inside = dict(self._traced(traced))
        self._own = {name: self.group[name] for name in self._inside}
        self.group.update(self._inside)
        return bool(before) and before != self._own

    def _traced(self, traced: TracedStep) -> Iterator[tuple[str, Any]]:
        def part(name: str, index: int | None) -> HostScalar:
            group = self.group
            if index is None:
                return traced.option((self._index, name), lambda: group[name])
            return traced.option((self._index, name, index), lambda: group[name][index])

        if not self._lr_is_tensor:
            yield "lr", part("lr", None)
        for name in {name for name, _ in self._moving}:
            value = self.group[name]
            if type(value) is tuple:
                moving = [(name, index) in self._moving for index in range(len(value))]
                yield name, tuple(part(name, i) if moving[i] else each for i, each in enumerate(value))
            else:
                yield name, part(name, None)

    def swap_out(self) -> bool:
        """Restore the user's options, unless code has set others meanwhile; True if it has."""
        was_set = any(self.group[name] is not inside for name, inside in self._inside.items())
        if not was_set:
            self.group.update(self._own)
        self._inside = {}
        return was_set

    def forget(self) -> None:
        """Forget the user's options, at the end of a capture."""
        self._own = {}

    @property
    def is_left_alone(self) -> bool:
        """True if a capture changes nothing of the group, and the step keeps nothing on the host."""
        if self._alone:
            return True
        on_device = self.group.get("capturable") or self.group.get("fused")
        has_rate = self._form.reads_rate and not self._lr_is_tensor
        return bool(on_device) and not (self._form.alpha or has_rate or self._moving)


def check_group(optimizer: Optimizer, index: int, device: torch.device) -> None:
    """Refuse a group with options that cannot be captured."""
    group, name = optimizer.param_groups[index], type(optimizer).__qualname__
    if group.get("differentiable"):
        raise UnsupportedError(
            f"Param group {index} of `{name}` has `differentiable=True`: its step is part of a graph"
            " of autograd's.",
            "Leave it out.",
            in_optimizer=True,
        )
    for option in optimizer.defaults:
        value = group.get(option)
        parts = value if isinstance(value, (list, tuple)) and not group.get("capturable") else [value]
        if option != "lr" and any(isinstance(part, Tensor) for part in parts):
            raise UnsupportedError(
                f"`{option}` of param group {index} of `{name}` is or has a tensor; only `lr` may be"
                " one.",
                f"Pass `{option}` without tensors.",
                in_optimizer=True,
            )
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != device.type:
        raise UnsupportedError(
            f"`lr` of param group {index} of `{name}` is a tensor on {lr.device}; expected a float, or a"
            f" tensor on {device}.",
            "Pass a float: it is copied to the device before each replay.",
            in_optimizer=True,
        )
