"""An op on tensors in host memory, as an operation of a host program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_cudagraph.compat.names.torch_names import tree_map


class _Operand:
    """Placeholder for an operand of the program, in the arguments of a host op."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"operand {self.index}"


@dataclass(frozen=True, eq=False)
class TensorOperation:
    """An op with placeholders for its operands, which are nodes of the program.

    An op in place works on a copy of its first argument, and returns that.

    Attributes:
        key: equal for equal ops.
        is_list: it is a `_foreach_` op, here of lists of one tensor.
    """

    key: tuple[str, str, str]
    nodes: tuple[int, ...]
    in_place: bool
    is_list: bool
    _function: Callable[..., Any]
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node_of: Callable[[Any], int | None],
    ) -> TensorOperation:
        """The operation of a call; `node_of` returns the node of an argument, None if it has none."""
        name, nodes = function.__name__, list[int]()

        def taken(leaf: Any) -> Any:
            if (node := node_of(leaf)) is None:
                return leaf
            nodes.append(node)
            return _Operand(len(nodes) - 1)

        args, kwargs = tree_map(taken, (args, kwargs))
        key = (name, repr(args), repr(sorted(kwargs.items(), key=lambda item: item[0])))
        in_place = name.endswith("_") and not name.endswith("__")
        is_list = name.startswith("_foreach_")
        return cls(key, tuple(nodes), in_place, is_list, function, args, kwargs)

    def __call__(self, *values: Any) -> Any:
        """Run the op on values of the operands."""
        args = [_given(arg, values) for arg in self._args]
        kwargs = {key: _given(value, values) for key, value in self._kwargs.items()}
        if not self.in_place:
            result = self._function(*args, **kwargs)
            return result[0] if self.is_list else result
        target = (args[0][0] if self.is_list else args[0]).clone()
        self._function([target] if self.is_list else target, *args[1:], **kwargs)
        return target


def _given(argument: Any, values: tuple[Any, ...]) -> Any:
    """An argument with operands filled in for the placeholders."""
    if isinstance(argument, _Operand):
        return values[argument.index]
    if type(argument) in (list, tuple):
        return [_given(each, values) for each in argument]
    return argument


def of_one_tensor(
    index: int, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `_foreach_` op for one of its tensors."""

    def own(value: Any) -> Any:
        return [value[index]] if isinstance(value, (list, tuple)) and len(value) == count else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}
