"""A step of one of torch's own optimizers, captured as the user has made it.

Its Python runs as it is. What it computes on the host is noted as a `HostProgram`: its numbers are
`HostScalar`s, and the tensors that it keeps in host memory are followed op by op. Where such a number
goes into an op on the device, the op gets a tensor (`scalar_ops`), which each replay fills before its
launch: one copy for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.names.torch_names import tree_iter, tree_map
from lightning_cudagraph.device.host_work import work_under_capture
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.optim.host_program import HostProgram, HostScalar
from lightning_cudagraph.optim.host_tensors import Alike, HostTensors, out_of_sight
from lightning_cudagraph.optim.scalar_ops import any_sparse, with_tensors

__all__ = ["Stage", "TracedStep"]

_MAKE_TENSORS = (torch.tensor, torch.as_tensor)
_READ = frozenset(f"__{name}__" for name in ("float", "int", "index", "format", "repr", "array")) | {
    "equal",
    "allclose",
    "is_nonzero",
    "tolist",
    "numpy",
}


def _refused(what: str) -> CaptureError:
    return CaptureError(
        f"The step of the optimizer {what}.",
        "Use another optimizer to have its step in the graph too.",
        in_optimizer=True,
    )


class Stage:
    """Where numbers of the host are for a graph to read.

    Args:
        device: the device of the graph.
        size: how many there may be.

    Attributes:
        numbers: on the device, in double precision.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.numbers = torch.zeros(size, dtype=torch.float64, device=device)
        self._is_pinned = device.type == "cuda"

    def fill(self, numbers: list[float]) -> None:
        """Bring numbers there, on the current stream."""
        # Memory of torch's own pool, which is not given to others before the copy has been made.
        source = torch.tensor(numbers, dtype=torch.float64, pin_memory=self._is_pinned)
        self.numbers[: len(numbers)].copy_(source, non_blocking=True)


class TracedStep(OwnFunctionMode):
    """Notes what the step of an optimizer computes on the host, while it is captured.

    Args:
        optimizer: the optimizer.
        device: where its parameters are.
        tensors: the state that it keeps in host memory.
        stage: where its numbers are for the graph.

    Attributes:
        program: what is computed on the host.
        is_under_way: the step is; otherwise, code of the user's inside it.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, tensors: HostTensors, stage: Stage
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._device = device
        self._stage = stage
        self.program = program = HostProgram()
        self.is_under_way = True
        self._alike = tensors.alike
        # By identity; kept, so that it is not given to another one.
        self._nodes: dict[int, tuple[Tensor, int]] = {}
        self._starts: dict[int, int] = {}
        for alike in tensors.alike:
            with out_of_sight():
                node = program.source(("state", id(alike)), alike.read, alike.read())
            self._starts[id(alike)] = node
            self._nodes.update((id(member), (member, node)) for member in alike.members)
        self._staged: dict[int, int] = {}
        self._casts: dict[torch.dtype, Tensor] = {}

    def option(self, name: tuple[object, ...], read: Callable[[], float]) -> HostScalar:
        """An option of the optimizer, as the step finds it.

        Args:
            name: which one.
            read: gives it, in this step as in later ones.
        """
        return self.program.scalar(self.program.source(("option", *name), read, read()))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_under_way:
            return func(*args, **kwargs)
        leaves = list(tree_iter((args, kwargs)))
        is_scalar = any(isinstance(leaf, HostScalar) for leaf in leaves)
        is_host = any(id(leaf) in self._nodes for leaf in leaves)
        # What is made of tensors of the device is no number of the host; the capture itself refuses it.
        is_given = any(isinstance(leaf, Tensor) and id(leaf) not in self._nodes for leaf in leaves)
        makes = func in _MAKE_TENSORS and (is_scalar or is_host or _device_of(kwargs).type == "cpu")
        if makes and not is_given:
            return self._made(func, args, kwargs)
        if func is Tensor.__setitem__ and _fills(*args[1:]):
            # Torch makes a tensor of the number. It is on the host, which the emulator cannot tell.
            return args[0].masked_fill_(*args[1:])
        if is_host and self._is_of_host(args[0]):
            with out_of_sight():
                return self._on_host(func, args, kwargs)
        if is_host:
            args, kwargs = tree_map(self._for_device, (args, kwargs))
        if is_scalar or any(isinstance(kwargs.get(name), Tensor) for name in ("alpha", "value")):
            done = None if any_sparse(leaves) else with_tensors(func, args, kwargs, self._number)
            if done is not None:
                return done[0]
        if is_scalar:
            name = getattr(func, "__name__", str(func))
            raise _refused(f"gives `{name}` a number that is another one in each step")
        return func(*args, **kwargs)

    def _is_of_host(self, value: Any) -> bool:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        return id(first) in self._nodes

    def _for_device(self, leaf: Any) -> Any:
        if id(leaf) not in self._nodes:
            return leaf
        return self._at(self._nodes[id(leaf)][1], leaf.dtype)

    def _number(self, number: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(number, Tensor):
            return number.type(dtype)
        return self._at(self.program.node_of(number), dtype)

    def _at(self, node: int, dtype: torch.dtype) -> Tensor:
        """The value of a node where the graph reads it."""
        slot = self._staged.setdefault(node, len(self._staged))
        if slot >= self._stage.numbers.numel():
            raise _refused("computes more numbers on the host than there are places for")
        if dtype not in self._casts:
            self._casts[dtype] = self._stage.numbers.type(dtype)
        return self._casts[dtype][slot]

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor that is made of a number or of a tensor of the host."""
        with out_of_sight():
            on_host = self._noted(func, args, {**kwargs, "device": torch.device("cpu")})
        if _device_of(kwargs).type == "cpu":
            return on_host
        return self._at(self._nodes[id(on_host)][1], on_host.dtype)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name: str = getattr(func, "__name__", "")
        if func is Tensor.item:
            node = self._nodes[id(args[0])][1]
            return self.program.scalar(self.program.operation("item", Tensor.item, (node,)))
        if func is Tensor.__bool__:
            node = self._nodes[id(args[0])][1]
            return self.program.decide(self.program.operation("bool", bool, (node,)))
        if name in _READ:
            raise _refused(f"reads its state in host memory with `{name}`")
        if name == "__get__":
            return func(*args, **kwargs)
        if not name.startswith("_foreach_"):
            return self._noted(func, args, kwargs)
        return [
            self._noted(func, *_each(place, len(args[0]), args, kwargs)) for place in range(len(args[0]))
        ]

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do something on the host, and note it."""
        name: str = func.__name__
        nodes: list[int] = []

        def taken(leaf: Any) -> Any:
            if id(leaf) in self._nodes:
                nodes.append(self._nodes[id(leaf)][1])
            elif isinstance(leaf, HostScalar):
                nodes.append(leaf.node)
            elif isinstance(leaf, Tensor):
                raise _refused(f"gives `{name}` tensors of the host and of the device")
            else:
                return leaf
            return _Operand(len(nodes) - 1)

        shape_args, shape_kwargs = tree_map(taken, (args, kwargs))
        in_place = name.endswith("_") and not name.endswith("__")
        is_list = name.startswith("_foreach_")

        def do(*values: Any) -> Any:
            own_args = [_given(shape, values) for shape in shape_args]
            own_kwargs = {key: _given(shape, values) for key, shape in shape_kwargs.items()}
            if not in_place:
                result = func(*own_args, **own_kwargs)
                return result[0] if is_list else result
            target = (own_args[0][0] if is_list else own_args[0]).clone()
            func([target] if is_list else target, *own_args[1:], **own_kwargs)
            return target

        key = (name, repr(shape_args), repr(sorted(shape_kwargs.items(), key=lambda item: item[0])))
        done = do(*map(self.program.value, nodes))
        if not isinstance(done, Tensor):
            return done  # its shape, say, which does not move
        node = self.program.operation(key, do, tuple(nodes)) if nodes else self.program.constant(done)
        value = self.program.value(node)
        result = (args[0][0] if is_list else args[0]) if in_place else value.clone()
        self._nodes[id(result)] = (result, node)
        return result

    def register(self) -> None:
        """At the end of the step: have each replay of the graph do what it does on the host."""
        work, program, stage = work_under_capture(), self.program, self._stage
        moves = [(alike, node) for alike in self._alike if (node := self._end_of(alike)) is not None]
        staged, key = list(self._staged), id(self._optimizer)
        if not staged and not moves:
            return
        values: list[Any] = []

        def before() -> None:
            values[:] = program.run()
            if staged:
                stage.fill([float(values[node]) for node in staged])

        def behind() -> None:
            skipped = work.skipped.get(key)
            if moves and (skipped is None or not bool(skipped)):
                for alike, node in moves:
                    alike.together.fill_(values[node])

        work.add(before, behind)

    def _end_of(self, alike: Alike) -> int | None:
        """What becomes of tensors that were alike; None for nothing."""
        ends = {self._nodes[id(member)][1] for member in alike.members}
        if len(ends) > 1:
            raise _refused(
                f"moves `{alike.name}` of some parameters and not of others, which it has moved so far,"
                " because they have no gradient in this step"
            )
        end = ends.pop()
        return None if end == self._starts[id(alike)] else end


def _fills(index: Any, value: Any) -> bool:
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
    return is_mask and type(value) in (int, float)


def _device_of(kwargs: dict[str, Any]) -> torch.device:
    return torch.device(kwargs.get("device") or "cpu")


class _Operand:
    """The place of what is computed anew, among the arguments of an op on the host."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __repr__(self) -> str:
        return f"operand {self.place}"


def _given(shape: Any, values: tuple[Any, ...]) -> Any:
    """An argument, with what is computed anew in its places."""
    if isinstance(shape, _Operand):
        return values[shape.place]
    if type(shape) in (list, tuple):
        return [_given(each, values) for each in shape]
    return shape


def _each(
    place: int, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `_foreach_` op for one of its tensors."""

    def own(value: Any) -> Any:
        return [value[place]] if isinstance(value, (list, tuple)) and len(value) == count else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}
