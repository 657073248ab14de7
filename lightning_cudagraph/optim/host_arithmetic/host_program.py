"""The scalar arithmetic of an optimizer step, traced at capture and run before each replay.

`torch.optim.Adam` computes `lr / (1 - beta1 ** step)` in Python, from a learning rate and a counter in
host memory, and passes the result to an op. While such a step is captured, its numbers are
`HostScalar`s, which record the operations that made them. Each replay runs the recorded program with the
learning rate and the counter of its step: the same operations in the same order, so the same bits.

A graph is specialised on branches on such numbers. `HostProgram.holds` checks that they still go the
same way.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor

from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.optim.supported_optimizers import ANOTHER_OPTIMIZER

# Values of groups of equal state, by the groups, which are sources of a program.
State = Mapping[Any, Any]


_numbers = itertools.count()


class HostProgram:
    """A graph of operations on numbers and tensors in host memory, without duplicates.

    Attributes:
        number: of the program, of all in this process.
        groups: groups of equal state, of which each run reads and moves some.
        decided: branch conditions, with their outcomes.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.groups: list[Any] = []
        self._values: list[Any] = []
        self._nodes: dict[Hashable, int] = {}
        self._operations: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self._sources: dict[int, Hashable] = {}
        self.decided: dict[int, bool] = {}

    def constant(self, value: Any) -> int:
        """Add a node with the same value in each run: a number, or a 0-dim tensor in host memory."""
        if isinstance(value, float) and value != value:
            raise CaptureError(
                "The step of the optimizer computes with NaN, or with a number that C code has made of"
                " one that moves.",
                ANOTHER_OPTIMIZER,
                in_optimizer=True,
            )
        same = (value.dtype, value.item()) if isinstance(value, Tensor) else value
        key = ("constant", type(value), same)
        if key not in self._nodes:
            self._nodes[key] = len(self._values)
            self._values.append(value)
        return self._nodes[key]

    def source(self, name: Hashable, read: Callable[[], Any], value: Any) -> int:
        """Add a node that each run reads again."""
        node = self._add(("source", name), read, (), lambda: value)
        self._sources[node] = name
        return node

    def renamed(self, node: int, name: Hashable, read: Callable[[], Any]) -> None:
        """Let a source be another one with the same value."""
        self._sources[node] = name
        self._operations = [
            (each, read if each == node else do, of) for each, do, of in self._operations
        ]

    def operation(self, name: Hashable, do: Callable[..., Any], nodes: tuple[int, ...]) -> int:
        """Add a node computed from others by `do`, which must not change them, or return its equal."""
        return self._add((name, nodes), do, nodes, do)

    def _add(
        self, key: Hashable, do: Callable[..., Any], nodes: tuple[int, ...], do_now: Callable[..., Any]
    ) -> int:
        if key not in self._nodes:
            value = do_now(*(self._values[node] for node in nodes))
            self._nodes[key] = node = len(self._values)
            self._values.append(value)
            self._operations.append((node, do, nodes))
        return self._nodes[key]

    def node_of(self, value: float | HostScalar) -> int:
        """The node of a traced number, or a constant node for a plain one."""
        return value.node if isinstance(value, HostScalar) else self.constant(value)

    def value(self, node: int) -> Any:
        return self._values[node]

    def scalar(self, node: int) -> HostScalar:
        """The traced number of a node, for the captured step."""
        return HostScalar(self, node)

    def decide(self, node: int) -> bool:
        """The outcome of a branch condition, on which the graph is specialised from now on."""
        return self.decided.setdefault(node, bool(self._values[node]))

    def run(self, state: State = MappingProxyType({})) -> list[Any]:
        """Compute the values of all nodes; sources that are not in `state` are read."""
        values = self._values.copy()
        for node, do, nodes in self._operations:
            name = self._sources.get(node)
            if name in state:
                values[node] = state[name]
            else:
                values[node] = do(*[values[each] for each in nodes])
        return values

    def holds(self, state: State = MappingProxyType({})) -> bool:
        """True if each branch of the step would go as at the capture; `state` is as for `run`."""
        if not self.decided:
            return True
        values = self.run(state)
        return all(bool(values[node]) is outcome for node, outcome in self.decided.items())


class HostScalar(float):
    """A traced number: a float that records its operations in a program.

    To C code, which reads the memory of a float, it is NaN. What such code makes of it is refused where
    it comes to an op or to another traced number. The functions of `math` refuse it at once.
    """

    program: HostProgram
    node: int

    def __new__(cls, program: HostProgram, node: int) -> HostScalar:
        scalar = super().__new__(cls, math.nan)
        scalar.program, scalar.node = program, node
        return scalar

    def _do(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """Record and do one operation, with `operands` in the order of the function."""
        if not all(isinstance(operand, (int, float)) for operand in operands):
            return NotImplemented  # tensors know what to do with numbers
        nodes = tuple(map(self.program.node_of, operands))
        node = self.program.operation(name, function, nodes)
        if isinstance(self.program.value(node), bool):
            return self.program.decide(node)
        return self.program.scalar(node)

    def __bool__(self) -> bool:
        return bool(self._do("ne", operator.ne, self, 0.0))

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            "The step of the optimizer converts a number that it computes on the host to another type,"
            " which would freeze it at its value in this step: an option of NumPy's type does so too.",
            "Pass the options of the optimizer as Python's floats to have its step in the graph too.",
            in_optimizer=True,
        )

    __float__ = __int__ = __trunc__ = __round__ = __floor__ = __ceil__ = _refuse
    __divmod__ = __rdivmod__ = _refuse
    __hash__ = float.__hash__


def _forward(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._do(name, function, self, *others)


def _reflected(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._do(name, function, other, self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(HostScalar, f"__{_name}__", _forward(_name, getattr(operator, _name)))
    setattr(HostScalar, f"__r{_name}__", _reflected(_name, getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(HostScalar, f"__{_name}__", _forward(_name, getattr(operator, _name)))
