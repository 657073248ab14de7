"""Traced step of an optimizer: its host arithmetic becomes part of each replay.

The step's Python runs unchanged. Its computations on the host are recorded as a `HostProgram`: its
numbers are `HostScalar`s, and the tensors that it keeps in host memory are followed op by op. A device
op that takes such a number gets a tensor instead (`scalar_ops`), which each replay fills before its
launch, with one copy for all numbers, if they are other ones than before.

A number that the step reads from the device (`norm().item()`) stays there, in double precision, as long
as the step only adds, subtracts, multiplies and divides it, or takes the larger of two: these round on
the device as in Python.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.compat.names.torch_names import tree_iter, tree_map
from lightning_cudagraph.device.host_work import work_under_capture
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.optim.gate import gate_of
from lightning_cudagraph.optim.host_arithmetic.host_program import HostProgram, HostScalar, State
from lightning_cudagraph.optim.host_arithmetic.host_tensors import Alike, HostTensors, hidden_from_modes
from lightning_cudagraph.optim.host_arithmetic.refusal import refused
from lightning_cudagraph.optim.host_arithmetic.scalar_ops import any_sparse, is_gated_write, with_tensors
from lightning_cudagraph.optim.host_arithmetic.staged_numbers import Stage, StagedNumbers
from lightning_cudagraph.optim.host_arithmetic.tensor_operation import TensorOperation, of_one_tensor
from lightning_cudagraph.optim.outcomes import Outcomes

# How the names of its modules begin.
_LIGHTNING = "lightning."
_MAKE_TENSORS = (torch.tensor, torch.as_tensor)
_READ = frozenset(f"__{name}__" for name in ("float", "int", "index", "format", "repr", "array")) | {
    "equal",
    "allclose",
    "is_nonzero",
    "tolist",
    "numpy",
}
# Ops on numbers that are read from the device, by the names of torch's functions.
_ON_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "__rsub__": lambda one, other: torch.sub(other, one),
    "__rdiv__": lambda one, other: torch.div(other, one),
    "neg": torch.neg,
}


class TracedStep(OwnFunctionMode):
    """Function mode that records the host computations of an optimizer's steps in one capture."""

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        tensors: HostTensors,
        stage: Stage,
        outcomes: Outcomes,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._step: Any = inspect.unwrap(type(optimizer).step)
        self._outcomes = outcomes
        self._device = device
        self._stage = stage
        self._staged = StagedNumbers(stage, optimizer)
        self.program = program = HostProgram()
        self.is_under_way = True
        self._tensors = tensors
        # By id; holds the tensor, so that the id is not reused.
        self._nodes: dict[int, tuple[Tensor, int]] = {}
        # By id; numbers that the step has read from the device, and what it has computed from them.
        self._device_numbers: dict[int, Tensor] = {}
        self._starts: dict[int, int] = {}
        self._used: set[int] = set()  # ids of the state that the step has read
        for alike in tensors.alike:
            with hidden_from_modes():
                node = program.source(alike, alike.read, alike.read())
            self._starts[id(alike)] = node
            self._nodes.update((id(member), (member, node)) for member in alike.members)
        # What each replay writes: the final nodes of counters, and the numbers for the static input.
        self._moves: list[tuple[Alike, int]] = []
        self._fills: list[tuple[int, float]] = []
        self._is_registered = False

    def option(self, name: tuple[object, ...], read: Callable[[], float]) -> HostScalar:
        """A traced option of the optimizer, for the step to find; `read` gives its value."""
        return self.program.scalar(self.program.source(("option", *name), read, read()))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.is_under_way:
            return func(*args, **kwargs)
        leaves = list(tree_iter((args, kwargs)))
        if func is Tensor.item and id(args[0]) not in self._nodes and self._is_of_step(args[0]):
            return self._device_number(args[0].detach().to(torch.float64, copy=True))
        if any(id(leaf) in self._device_numbers for leaf in leaves):
            return self._with_device_numbers(func, args, kwargs, leaves)
        if any(_is_nan(leaf) for leaf in leaves):
            name = getattr(func, "__name__", str(func))
            raise refused(
                f"gives `{name}` a NaN, or a number that C code has made of one that moves",
                "Compute it with Python's operators, `lr ** 0.5` for `math.sqrt(lr)`: they are traced.",
            )
        is_scalar = any(isinstance(leaf, HostScalar) for leaf in leaves)
        is_host = any(id(leaf) in self._nodes for leaf in leaves)
        if is_host:
            self._used.update(map(id, leaves))
        # A tensor made from device tensors is no host number; the capture itself refuses it.
        is_given = any(isinstance(leaf, Tensor) and id(leaf) not in self._nodes for leaf in leaves)
        makes = func in _MAKE_TENSORS and (is_scalar or is_host or _device_of(kwargs).type == "cpu")
        if makes and not is_given:
            return self._made(func, args, kwargs)
        if func is Tensor.__setitem__ and _fills(*args[1:]):
            # torch makes a host tensor of the number, and the emulator cannot tell that it is on the
            # host.
            return args[0].masked_fill_(*args[1:])
        if is_host and self._is_of_host(args[0]):
            with hidden_from_modes():
                return self._on_host(func, args, kwargs)
        if is_host:
            args, kwargs = tree_map(self._for_device, (args, kwargs))
        gate = gate_of(self._optimizer)
        if gate is not None and is_gated_write(func, args, gate) and not any_sparse(leaves):
            done = with_tensors(func, args, kwargs, self._number, gate)
            if done is not None:
                return done[0]
        if is_scalar or any(isinstance(kwargs.get(name), Tensor) for name in ("alpha", "value")):
            done = None if any_sparse(leaves) else self._numbered(func, args, kwargs)
            if done is not None:
                return done[0]
        if is_scalar:
            name = getattr(func, "__name__", str(func))
            raise refused(f"gives `{name}` a number that is another one in each step")
        return func(*args, **kwargs)

    def _is_of_step(self, tensor: Tensor) -> bool:
        """True for a real number that the optimizer's own code asks for, and not clipping or a hook."""
        for frame in frames(sys._getframe(1)):
            if frame.f_code is self._step.__code__:
                return tensor.is_floating_point()
            if module_of(frame).startswith(_LIGHTNING):
                return False  # in the closure that the step has called
        return False

    def _device_number(self, number: Tensor) -> Tensor:
        self._device_numbers[id(number)] = number
        return number

    def _with_device_numbers(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        """An op on numbers that the step has read from the device, or with such a number."""
        name: str = func.__name__
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if name in _ON_NUMBERS and not kwargs and all(id(o) in self._device_numbers for o in others):
            return self._device_number(_ON_NUMBERS[name](*map(self._on_device, args)))
        is_first = id(args[0]) in self._device_numbers
        if is_first and func in _MAKE_TENSORS and _device_of(kwargs).type == self._device.type:
            return args[0].to(kwargs.get("dtype") or torch.get_default_dtype(), copy=True)
        done = None if is_first else self._numbered(func, args, kwargs)
        if done is None:
            raise refused(f"gives `{name}` a number that it reads from the device")
        return done[0]

    def _numbered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        return with_tensors(func, args, kwargs, self._number)

    def _on_device(self, number: Any) -> Tensor:
        # A tensor: CUDA multiplies by the reciprocal of a number instead of dividing by it.
        return self._number(number, torch.float64, None)

    @contextmanager
    def selecting(self) -> Iterator[None]:
        """Let `max` and `min` of the optimizer's module take the step's numbers without a branch.

        Functions of `math` refuse them: they would read NaN.
        """
        with ExitStack() as stack:
            module: dict[str, Any] = self._step.__globals__
            functions = {
                id(value): name
                for name, value in vars(math).items()
                if isinstance(value, BuiltinFunctionType)
            }
            for namespace in (vars(math), module):
                for name, value in [*namespace.items()]:
                    if id(value) in functions:
                        stack.callback(namespace.__setitem__, name, value)
                        namespace[name] = _refusing(value, functions[id(value)])
            for builtin, is_better in ((max, torch.gt), (min, torch.lt)):
                name = builtin.__name__
                if name not in module:
                    module[name] = self._select(builtin, is_better)
                    stack.callback(module.pop, name)
            yield

    def _select(self, builtin: Any, is_better: Callable[..., Tensor]) -> Callable[..., Any]:
        def select(*values: Any, **kwargs: Any) -> Any:
            if kwargs or not any(id(value) in self._device_numbers for value in values):
                if kwargs or not any(isinstance(value, HostScalar) for value in values):
                    return builtin(*values, **kwargs)
                nodes = tuple(map(self.program.node_of, values))
                return self.program.scalar(self.program.operation(builtin.__name__, builtin, nodes))
            with torch._C.DisableTorchFunction():
                best, *others = map(self._on_device, values)
                for other in others:
                    # As in Python, the first of two that cannot be compared.
                    best = torch.where(is_better(other, best), other, best)
                return self._device_number(best)

        return select

    def _is_of_host(self, value: Any) -> bool:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        return id(first) in self._nodes

    def _for_device(self, leaf: Any) -> Any:
        if id(leaf) not in self._nodes:
            return leaf
        return self._staged.at(self._nodes[id(leaf)][1], leaf.dtype)

    def _number(self, number: Any, dtype: torch.dtype, neutral: float | None) -> Tensor:
        if isinstance(number, Tensor):
            return number.type(dtype)
        return self._staged.at(self.program.node_of(number), dtype, neutral)

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor from a number, or from a host tensor."""
        with hidden_from_modes():
            on_host = self._recorded(func, args, {**kwargs, "device": torch.device("cpu")})
        if _device_of(kwargs).type == "cpu":
            return on_host
        return self._staged.at(self._nodes[id(on_host)][1], on_host.dtype)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name: str = getattr(func, "__name__", "")
        if func is Tensor.item:
            node = self._nodes[id(args[0])][1]
            return self.program.scalar(self.program.operation("item", Tensor.item, (node,)))
        if func is Tensor.__bool__:
            node = self._nodes[id(args[0])][1]
            return self.program.decide(self.program.operation("bool", bool, (node,)))
        if name in _READ:
            raise refused(f"reads its state in host memory with `{name}`")
        if name == "__get__":
            return func(*args, **kwargs)
        if not name.startswith("_foreach_"):
            return self._recorded(func, args, kwargs)
        return [
            self._recorded(func, *of_one_tensor(index, len(args[0]), args, kwargs))
            for index in range(len(args[0]))
        ]

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the host, and record it in the program."""

        def node_of(leaf: Any) -> int | None:
            if id(leaf) in self._nodes:
                return self._nodes[id(leaf)][1]
            if isinstance(leaf, Tensor):
                raise refused(f"gives `{func.__name__}` tensors of the host and of the device")
            return leaf.node if isinstance(leaf, HostScalar) else None

        operation = TensorOperation.of(func, args, kwargs, node_of)
        nodes = operation.nodes
        done = operation(*map(self.program.value, nodes))
        if not isinstance(done, Tensor):
            return done  # such as a shape, which does not change
        if nodes:
            node = self.program.operation(operation.key, operation, nodes)
        else:
            node = self.program.constant(done)
        if operation.in_place:
            result = args[0][0] if operation.is_list else args[0]
        else:
            result = self.program.value(node).clone()
        self._nodes[id(result)] = (result, node)
        return result

    def register(self) -> None:
        """Run the host program around each replay of the graph from now on, at the end of a step."""
        work, program, stage, tensors = work_under_capture(), self.program, self._stage, self._tensors
        moves, staged = self._moves, self._fills
        with hidden_from_modes():
            for alike in tensors.alike:
                self._split(alike)
        moves[:] = [(each, node) for each in tensors.alike if (node := self._end_of(each)) is not None]
        program.groups = [*tensors.alike]
        staged[:] = self._staged.nodes
        gate, outcomes = gate_of(self._optimizer), self._outcomes
        if self._is_registered and gate is not None and moves:
            raise refused("is called several times with a gradient scaler, and counts on the host")
        if self._is_registered or not (staged or moves):
            return
        self._is_registered = True
        runs: list[list[Any]] = []

        def before() -> None:
            if not self._staged.depend_on_outcome or outcomes.have_moved_others(program.groups):
                outcomes.settle()
            runs[:] = [program.run(state) for state in outcomes.possible()]
            if staged:
                stage.fill(
                    [(float(runs[0][node]), float(runs[-1][node]), neutral) for node, neutral in staged]
                )

        def behind() -> None:
            ends: list[State] = [{alike: run[node] for alike, node in moves} for run in runs]
            if gate is not None:
                outcomes.add(gate.last_was_skipped, ends)
            else:
                tensors.write(ends[0])

        work.add(before, behind)

    def _split(self, alike: Alike) -> None:
        """Split a group of equal tensors if the step moves some, and does not look at the others."""
        start, nodes = self._starts[id(alike)], self._nodes
        moved = {id(member) for member in alike.members if nodes[id(member)][1] != start}
        left = [member for member in alike.members if id(member) not in moved]
        if not moved or not left or any(id(member) in self._used for member in left):
            return
        moving, staying = self._tensors.split(alike, moved)
        self.program.renamed(start, moving, moving.read)
        node = self.program.source(staying, staying.read, staying.read())
        self._starts |= {id(moving): start, id(staying): node}
        self._nodes |= {id(member): (member, node) for member in left}

    def _end_of(self, alike: Alike) -> int | None:
        """The node with the final value of a group of equal tensors; None if the step leaves them."""
        ends = {self._nodes[id(member)][1] for member in alike.members}
        if len(ends) > 1:
            raise refused(
                f"moves `{alike.name}` of some parameters and not of others, which it has moved so far,"
                " because they have no gradient in this step"
            )
        end = ends.pop()
        return None if end == self._starts[id(alike)] else end


def _is_nan(leaf: Any) -> bool:
    return isinstance(leaf, float) and not isinstance(leaf, HostScalar) and leaf != leaf


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of `math` that refuses traced numbers."""

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:  # the name that searches for user code know
        if any(isinstance(arg, HostScalar) for arg in args):
            raise refused(f"gives `math.{name}` a number that is another one in each step")
        return function(*args, **kwargs)

    return stand_in


def _fills(index: Any, value: Any) -> bool:
    is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
    return is_mask and type(value) in (int, float)


def _device_of(kwargs: dict[str, Any]) -> torch.device:
    return torch.device(kwargs.get("device") or "cpu")
