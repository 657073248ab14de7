"""Scalar ops with the scalar in a device tensor: the same bits, and no read on the host.

torch parses the `alpha`, `value`, weight or factor of an op as a `Scalar`: a capture freezes it, and a
tensor there is read back to the host. For each op that torch's optimizers pass such a number to, the
table below has a form that reads it from a device tensor and rounds as the op itself does.
`tests/test_optimizer_runs.py` compares each row with the op.

The kernel decides the rounding. On a GPU (ATen/native/cuda/PointwiseOpsKernel.cu,
BinaryDivTrueKernel.cu, ForeachPointwiseOp.cu) `add_`, `addcmul_` and `addcdiv_` end in one fused
multiply-add. A division by a number is a product with its reciprocal, except in `_foreach_div_` with a
list of numbers. On a CPU nothing is fused, and the order is that of PointwiseOpsKernel.cpp. Numbers are
rounded to the dtype that the kernel computes in: float64, or else float32.

With a `Gate`, an op in place leaves its target alone, bit for bit, if the step is skipped: fused SGD
reads the flag itself, factors and summands become neutral, and the rest is computed beside the target
and selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.optim.gate import Gate
from lightning_cudagraph.tensors.local import local

# Gives the number of an op as a 0-dim device tensor of a dtype. In a step that is skipped it has the
# value of the third argument, unless that is None.
Staged = Callable[[Any, torch.dtype, float | None], Tensor]

_Tensors = list[Tensor] | tuple[Tensor, ...]
_WIDE = (torch.float32, torch.float64)
# Below this weight `lerp` starts from its first argument, else from the second (ATen/native/Lerp.h).
_LERP_TURNS_AT = 0.5
# The numbers with which ops leave each float as it is, with its sign: -0.0 + x is x.
_NEUTRAL = {"mul": 1.0, "div": 1.0, "plus": -0.0}


def _plus_product(
    one: Tensor, first: Tensor, second: Tensor, value: Tensor, out: Tensor | None = None
) -> Tensor:
    if one.is_cuda:
        return torch.addcmul(one, first * second, value, out=out)
    return torch.addcmul(one, first * value, second, out=out)


def _plus_quotient(
    one: Tensor, dividend: Tensor, divisor: Tensor, value: Tensor, out: Tensor | None = None
) -> Tensor:
    if one.is_cuda:
        return torch.addcmul(one, dividend / divisor, value, out=out)
    return torch.add(one, dividend * value / divisor, out=out)


# By the name of torch's function: the number of tensors before the number, and the form with a tensor.
_OPS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "mul": (1, torch.mul),
    "div": (1, torch.div),
    "__rdiv__": (1, torch.mul),
    "plus": (1, torch.add),
    "add": (2, torch.addcmul),
    "lerp": (2, torch.lerp),
    "addcmul": (3, _plus_product),
    "addcdiv": (3, _plus_quotient),
}
_NAMES_OF_NUMBERS = ("alpha", "value", "weight", "other", "scalars")


def _fused_step(targets: _Tensors, others: _Tensors, minus_alpha: Tensor, gate: Gate | None) -> None:
    """Add `alpha` times the others, rounded once, in one launch of fused SGD for the list."""
    torch._fused_sgd_(
        [*map(local, targets)],  # `DTensor` has no fused SGD in torch 2.11
        [*map(local, others)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=minus_alpha,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=None if gate is None else gate.overflowed,
    )


# In place on lists of float32 on a GPU, in a launch or two: by a factor or a summand, or by fused SGD.
_BY_NUMBER: dict[str, Callable[..., None]] = {
    "mul": lambda ones, number: torch._foreach_mul_(ones, number),
    "div": lambda ones, number: torch._foreach_div_(ones, number),
    # `alpha` tells the overloads apart: without it torch takes the tensor for a number, and reads it.
    "plus": lambda ones, number: torch._foreach_add_(ones, number, alpha=1),
}
_BY_FUSED_STEP: dict[str, Callable[..., Any]] = {
    "add": lambda ones, others: others,
    "addcmul": lambda ones, a, b: torch._foreach_mul(a, b),
    "addcdiv": lambda ones, a, b: torch._foreach_div(a, b),
    "lerp": lambda ones, others: torch._foreach_sub(others, ones),
}


def _neutral(name: str, gate: Gate | None) -> float | None:
    return None if gate is None else _NEUTRAL.get(name)


def _is_in_one_launch(one: Tensor) -> bool:
    return one.is_cuda and one.dtype is torch.float32


def _wide(one: Tensor) -> torch.dtype:
    return torch.float64 if one.dtype is torch.float64 else torch.float32


@dataclass(frozen=True)
class _Call:
    """A call of an op of the table: its name there, and how it gets its number and writes its result."""

    name: str
    staged: Staged
    in_place: bool
    gate: Gate | None

    def single(self, operands: Sequence[Tensor], number: Any) -> Tensor:
        one = operands[0]
        if self.name == "div" and one.is_cuda:
            # torch multiplies by the reciprocal, which it takes on the host in double precision.
            return self._product().computed(operands, self._reciprocal(number).type(_wide(one)))
        if self.name == "__rdiv__":
            operands = [one.reciprocal()]
        return self.computed(operands, self._tensor(number, _wide(one)))

    def computed(self, operands: Sequence[Tensor], number: Tensor) -> Tensor:
        one, compute, gate = operands[0], _OPS[self.name][1], self.gate
        if gate is not None and self.name in _NEUTRAL:
            with gate.passing():
                return compute(one, number, out=one)
        out = one if self.in_place and gate is None else None
        if one.dtype in _WIDE or not one.is_floating_point():
            value = compute(*operands, number, out=out)
        else:
            wide: Tensor = compute(*(operand.float() for operand in operands), number)
            value = wide.to(one.dtype) if out is None else out.copy_(wide)
        return value if gate is None else gate.put(one, value)

    def on_list(self, operands: Sequence[Sequence[Tensor]], number: Any) -> list[Tensor]:
        """The op on lists of tensors with one number for all of them."""
        ones = list(operands[0])
        is_in_one_launch = _is_in_one_launch(ones[0])
        if self.name == "lerp" and is_in_one_launch:
            # The end that it starts from: a branch of the host program, checked before each replay.
            is_in_one_launch = not isinstance(number, Tensor) and bool(abs(number) < _LERP_TURNS_AT)
        if not is_in_one_launch:
            return [self.single(each, number) for each in zip(ones, *operands[1:], strict=True)]
        if self.name in _BY_FUSED_STEP:
            if not self.in_place:
                ones = [one.clone() for one in ones]
            others = _BY_FUSED_STEP[self.name](ones, *operands[1:])
            _fused_step(ones, others, self.staged(-number, torch.float32, None), self.gate)
            return ones
        if self.name == "div":
            return self._product()._in_one_launch(ones, self._reciprocal(number).float())
        return self._in_one_launch(ones, self._tensor(number, torch.float32))

    def quotients(self, ones: list[Tensor], number: Any) -> list[Tensor]:
        """Divide by a number of a list: true divisions, on a GPU too."""
        divisor = self._tensor(number, _wide(ones[0]))
        if _is_in_one_launch(ones[0]) and self.in_place:
            return self._in_one_launch(ones, divisor)
        return [self.computed([one], divisor) for one in ones]

    def _in_one_launch(self, ones: list[Tensor], number: Tensor) -> list[Tensor]:
        if not self.in_place and self.name == "mul":
            return list(torch._foreach_mul(ones, number))
        if not self.in_place:
            ones = [one.clone() for one in ones]
        with nullcontext() if self.gate is None else self.gate.passing():
            _BY_NUMBER[self.name]([*map(local, ones)], number)
        return ones

    def _product(self) -> _Call:
        return replace(self, name="mul")

    def _tensor(self, number: Any, dtype: torch.dtype) -> Tensor:
        return self.staged(number, dtype, _neutral(self.name, self.gate))

    def _reciprocal(self, number: Any) -> Tensor:
        return self._tensor(number, torch.float64).reciprocal()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (int, float))
    )


def with_tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], staged: Staged, gate: Gate | None = None
) -> tuple[Any] | None:
    """Call an op of the table with its number in a tensor.

    Args:
        gate: of a step that may be skipped, if the op writes memory that must not change then.

    Returns:
        A tuple with the result; None if the table has no such call, and nothing was done.

    Raises:
        CaptureError: if the op cannot take the number from a tensor and round as it does without.
    """
    name: str = getattr(func, "__name__", "")
    if name.startswith("_fused_"):
        # Their kernels can read the learning rate from a tensor.
        rest = {key: value for key, value in kwargs.items() if key != "lr"}
        target: Tensor = args[0][0]
        # On a GPU the kernels read a tensor as float32, and a number as float64.
        is_rounded = target.is_cuda and target.dtype is torch.float64
        if "lr" not in kwargs:
            return None
        if moving := [key for key, value in rest.items() if _is_moving(value)]:
            raise CaptureError(
                f"A schedule moves `{moving[0]}` in each step, which a fused kernel (`{name}`) takes as"
                " a number alone.",
                "Leave out `fused=True`, or keep that option constant, to have its step in the graph"
                " too.",
                in_optimizer=True,
            )
        if is_rounded:
            raise CaptureError(
                f"A fused kernel (`{name}`) reads a learning rate from a tensor in 32 bits, which is too"
                " little for parameters of 64 bits.",
                "Leave out `fused=True` to have its step in the graph too.",
                in_optimizer=True,
            )
        dtype = torch.float32 if target.is_cuda else torch.float64
        return (func(*args, **rest, lr=staged(kwargs["lr"], dtype, None)),)
    base = name.removeprefix("_foreach_")
    in_place = base.endswith("_") and not base.endswith("__")
    base = base.removesuffix("_") if in_place else base
    if base == "add" and len(args) > 1 and _is_number(args[1]):
        base = "plus"
    if base not in _OPS:
        return None
    is_list = name.startswith("_foreach_")
    count = _OPS[base][0]
    operands = args[:count]
    named = [kwargs[key] for key in _NAMES_OF_NUMBERS if key in kwargs]
    numbers = [*args[count:], *named]
    if gate is not None and base == "add" and not numbers:
        numbers = [1.0]
    if len(operands) != count or len(numbers) != 1 or len(named) != len(kwargs):
        return None
    if base == "add" and any(map(_rounds_alpha, operands[0] if is_list else operands[:1])):
        raise CaptureError(
            "The step of the optimizer adds a multiple of a tensor to one of 16 bits on a CPU, which"
            " rounds the factor in some elements and not in others.",
            "Use parameters of 32 bits to have its step in the graph too.",
            in_optimizer=True,
        )
    number = numbers[0]
    if gate is not None and not _is_gated(base, operands[1:], number, is_list):
        return None
    call = _Call(base, staged, in_place, gate)
    if not is_list:
        return (call.single(operands, number),)
    if not isinstance(number, (list, tuple)):
        return (call.on_list(operands, number),)
    # One call for each number, with the parameters that share it: those with equal step counters.
    positions: dict[Any, list[int]] = {}
    for position, each in enumerate(number):
        positions.setdefault((type(each), getattr(each, "node", each)), []).append(position)
    results: list[Any] = [None] * len(number)
    for chosen in positions.values():
        some = [[operand[position] for position in chosen] for operand in operands]
        one = number[chosen[0]]
        made = call.quotients(some[0], one) if base == "div" else call.on_list(some, one)
        for position, result in zip(chosen, made, strict=True):
            results[position] = result
    return (results,)


def _rounds_alpha(one: Tensor) -> bool:
    """True if `add` to a tensor rounds alpha in its vectorised elements, and not in the others."""
    return not one.is_cuda and one.is_floating_point() and one.dtype not in _WIDE


def _is_gated(base: str, others: Sequence[Any], number: Any, is_list: bool) -> bool:
    """True if an op in place has a form with a gate."""
    if type(number) in (int, float) and number == 1 and base in ("addcmul", "addcdiv"):
        return False  # kernels of torch may leave the factor out, and round in another way
    return _is_number(number) and all(isinstance(other, (list, tuple)) is is_list for other in others)


def is_gated_write(func: Any, args: tuple[Any, ...], gate: Gate) -> bool:
    """True for an op of the table, in place in full precision, on memory that a gate holds."""
    name: str = getattr(func, "__name__", "")
    base = name.removeprefix("_foreach_").removesuffix("_")
    if not gate.is_open or not name.endswith("_") or base not in _OPS:
        return False
    targets: Any = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    # Parts of a `DTensor` are copied: ops on it do not take the flag, a plain tensor.
    is_plain = all(t.dtype in _WIDE and local(t) is t for t in targets)
    return is_plain and any(map(gate.holds, targets))


def _is_moving(value: Any) -> bool:
    return hasattr(value, "node")


def _as_it_is(number: Tensor, dtype: torch.dtype, neutral: float | None) -> Tensor:
    return number.type(dtype)


class TensorScalarMode(OwnFunctionMode):
    """Function mode in which ops take a tensor as `alpha` or `value` without reading it.

    Fused kernels get a learning rate in the precision that they read it in.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_fused = getattr(func, "__name__", "").startswith("_fused_")
        names = ("lr",) if is_fused else ("alpha", "value")
        given = any(isinstance(kwargs.get(name), Tensor) for name in names)
        if given and not any_sparse(args):
            done = with_tensors(func, args, kwargs, _as_it_is)
            if done is not None:
                return done[0]
        return func(*args, **kwargs)


def any_sparse(values: Any) -> bool:
    """True if any tensor in (nested) arguments is not strided."""
    return any(
        leaf.layout is not torch.strided for leaf in tree_iter(values) if isinstance(leaf, Tensor)
    )
