"""What the step of an optimizer computes on the host, as a program that can run without the step.

`torch.optim.Adam` computes `lr / (1 - beta1 ** step)` in Python, from a learning rate and a counter in
host memory, and passes the result to an op. While such a step is captured, its numbers are
`HostScalar`s, which remember what they were computed from. The program that comes of it is run in each
replay, with the learning rate and the counter of that step, and does the same operations in the same
order: the same bits.

Branches on such numbers are part of what is captured; `HostProgram.holds` says whether they go the same
way now.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from torch import Tensor

from lightning_cudagraph.errors import CaptureError

__all__ = ["HostProgram", "HostScalar"]


class HostProgram:
    """Operations on numbers and tensors in host memory, each done once however often it comes up.

    Attributes:
        decided: of each branch the node of what was asked, and how it came out in the capture.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._nodes: dict[Hashable, int] = {}
        self._operations: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self.decided: dict[int, bool] = {}

    def constant(self, value: Any) -> int:
        """A node that has the same value in each run.

        Args:
            value: a number, or a tensor without dimensions in host memory.
        """
        same = (value.dtype, value.item()) if isinstance(value, Tensor) else value
        key = ("constant", type(value), same)
        if key not in self._nodes:
            self._nodes[key] = len(self._values)
            self._values.append(value)
        return self._nodes[key]

    def source(self, name: Hashable, read: Callable[[], Any], value: Any) -> int:
        """A node that is read anew in each run.

        Args:
            name: which one it is.
            read: reads it.
            value: what that gives now.
        """
        return self._add(("source", name), read, (), lambda: value)

    def operation(self, name: Hashable, do: Callable[..., Any], nodes: tuple[int, ...]) -> int:
        """A node that is computed from others; the one that there is, if it has been computed before.

        Args:
            name: says what is done, other than on which nodes.
            do: does it. It must not change what it is given.
            nodes: what it is given.
        """
        return self._add((name, nodes), do, nodes, do)

    def _add(
        self,
        key: Hashable,
        do: Callable[..., Any],
        nodes: tuple[int, ...],
        do_now: Callable[..., Any],
    ) -> int:
        if key not in self._nodes:
            value = do_now(*(self._values[node] for node in nodes))
            self._nodes[key] = node = len(self._values)
            self._values.append(value)
            self._operations.append((node, do, nodes))
        return self._nodes[key]

    def node_of(self, value: float | HostScalar) -> int:
        """The node of a number: its own, or a constant."""
        return value.node if isinstance(value, HostScalar) else self.constant(value)

    def value(self, node: int) -> Any:
        """The value of a node in the capture."""
        return self._values[node]

    def scalar(self, node: int) -> HostScalar:
        """The number of a node, as the captured step computes with it."""
        return HostScalar(self, node)

    def decide(self, node: int) -> bool:
        """How a question comes out, on which the captured step depends from now on."""
        return self.decided.setdefault(node, bool(self._values[node]))

    def run(self) -> list[Any]:
        """The values of all nodes, with what the sources say now."""
        values = self._values.copy()
        for node, do, nodes in self._operations:
            values[node] = do(*[values[each] for each in nodes])
        return values

    def holds(self) -> bool:
        """Whether each branch of the captured step would go now as it went then."""
        if not self.decided:
            return True
        values = self.run()
        return all(bool(values[node]) is way for node, way in self.decided.items())


class HostScalar(float):
    """A number that a captured step computes on the host, and what it was computed from.

    Args:
        program: what it is part of.
        node: its node in it.
    """

    program: HostProgram
    node: int

    def __new__(cls, program: HostProgram, node: int) -> HostScalar:
        scalar = super().__new__(cls, program.value(node))
        scalar.program, scalar.node = program, node
        return scalar

    def _do(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """One operation on itself and others, `operands` being in the order of the function."""
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
            "The step of the optimizer makes another kind of number of one that it computes on the host,"
            " which would stay what it is in this step.",
            "Use another optimizer to have its step in the graph too.",
            in_optimizer=True,
        )

    __float__ = __int__ = __trunc__ = __round__ = __floor__ = __ceil__ = _refuse
    __hash__ = float.__hash__


def _forwards(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._do(name, function, self, *others)


def _backwards(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._do(name, function, other, self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(HostScalar, f"__{_name}__", _forwards(_name, getattr(operator, _name)))
    setattr(HostScalar, f"__r{_name}__", _backwards(_name, getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(HostScalar, f"__{_name}__", _forwards(_name, getattr(operator, _name)))
