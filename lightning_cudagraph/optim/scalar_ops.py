"""Ops that take a number, with the number in a tensor: the same bits, and nothing read on the host.

Torch parses the `alpha`, `value`, weight or factor of an op as a `Scalar`: a capture freezes it, and a
tensor in its place is read back to the host. The table below has, for each op that optimizers of torch
pass such a number to, a form that reads it from a tensor on the device and rounds as the op itself does.
`tests/test_scalar_ops.py` holds each row against the op.

How an op rounds is decided by its kernel. On a GPU (ATen/native/cuda/PointwiseOpsKernel.cu,
BinaryDivTrueKernel.cu, ForeachPointwiseOp.cu) `add_`, `addcmul_` and `addcdiv_` end in one fused
multiply-add, and a division by a number is a product with its reciprocal, but not where `_foreach_div_`
is given a list of them. On a CPU nothing is fused, and the order is that of PointwiseOpsKernel.cpp.
Numbers are rounded to the dtype that the kernel computes in: float64, or else float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode

__all__ = ["Staged", "TensorScalarMode", "with_tensors"]

# Gives the number of an op as a tensor without dimensions of a dtype.
Staged = Callable[[Any, torch.dtype], Tensor]

_Tensors = list[Tensor] | tuple[Tensor, ...]
_WIDE = (torch.float32, torch.float64)
# Up to this weight `lerp` starts from the one end, and beyond it from the other (ATen/native/Lerp.h).
_LERP_TURNS_AT = 0.5


def _times(one: Tensor, number: Tensor, out: Tensor | None) -> Tensor:
    return torch.mul(one, number, out=out)


def _over(one: Tensor, number: Tensor, out: Tensor | None) -> Tensor:
    return torch.div(one, number, out=out)


def _plus(one: Tensor, number: Tensor, out: Tensor | None) -> Tensor:
    return torch.add(one, number, out=out)


def _plus_scaled(one: Tensor, other: Tensor, alpha: Tensor, out: Tensor | None) -> Tensor:
    return torch.addcmul(one, other, alpha, out=out)


def _plus_product(
    one: Tensor, first: Tensor, second: Tensor, value: Tensor, out: Tensor | None
) -> Tensor:
    if one.is_cuda:
        return torch.addcmul(one, first * second, value, out=out)
    return torch.addcmul(one, first * value, second, out=out)


def _plus_quotient(
    one: Tensor, dividend: Tensor, divisor: Tensor, value: Tensor, out: Tensor | None
) -> Tensor:
    if one.is_cuda:
        return torch.addcmul(one, dividend / divisor, value, out=out)
    return torch.add(one, dividend * value / divisor, out=out)


def _towards(one: Tensor, other: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    return torch.lerp(one, other, weight, out=out)


# By the name of the function of torch: how many tensors it takes before the number, and what it does.
_OPS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "mul": (1, _times),
    "div": (1, _over),
    "__rdiv__": (1, _times),
    "plus": (1, _plus),
    "add": (2, _plus_scaled),
    "lerp": (2, _towards),
    "addcmul": (3, _plus_product),
    "addcdiv": (3, _plus_quotient),
}
_NAMES_OF_NUMBERS = ("alpha", "value", "weight", "other", "scalars")


def _fused_step(targets: _Tensors, others: _Tensors, alpha: Tensor) -> None:
    """Add `alpha` times the others, rounded once, in one launch for the list: what fused SGD does."""
    torch._fused_sgd_(
        targets,
        others,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=-alpha,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


# In place on lists of float32 on a GPU, in a launch or two.
_LISTS: dict[str, Callable[..., None]] = {
    "mul": lambda ones, number: torch._foreach_mul_(ones, number),
    # `alpha` tells the overloads apart: without it torch takes the tensor for a number, and reads it.
    "plus": lambda ones, number: torch._foreach_add_(ones, number, alpha=1),
    "add": _fused_step,
    "addcmul": lambda ones, a, b, value: _fused_step(ones, torch._foreach_mul(a, b), value),
    "addcdiv": lambda ones, a, b, value: _fused_step(ones, torch._foreach_div(a, b), value),
    "lerp": lambda ones, others, weight: _fused_step(ones, torch._foreach_sub(others, ones), weight),
}


def _wide(one: Tensor) -> torch.dtype:
    return torch.float64 if one.dtype is torch.float64 else torch.float32


def _single(
    name: str, operands: Sequence[Tensor], number: Any, staged: Staged, in_place: bool
) -> Tensor:
    one = operands[0]
    if name == "div" and one.is_cuda:
        # A product with the reciprocal, which is taken on the host, in double precision.
        return _computed("mul", operands, _reciprocal(number, staged).type(_wide(one)), in_place)
    if name == "__rdiv__":
        operands = [one.reciprocal()]
    return _computed(name, operands, staged(number, _wide(one)), in_place)


def _reciprocal(number: Any, staged: Staged) -> Tensor:
    return staged(number, torch.float64).reciprocal()


def _computed(name: str, operands: Sequence[Tensor], number: Tensor, in_place: bool) -> Tensor:
    one, compute = operands[0], _OPS[name][1]
    out = one if in_place else None
    if one.dtype in _WIDE or not one.is_floating_point():
        return compute(*operands, number, out)
    if name == "add" and not one.is_cuda:
        # In 16 bits the CPU's vectorised `add_` rounds alpha to the parameter's dtype (its tail does
        # not: there, results can differ in the last place).
        return _plus_scaled(one, operands[1], number.to(one.dtype), out)
    wide: Tensor = compute(*(operand.float() for operand in operands), number, None)
    return wide.to(one.dtype) if out is None else out.copy_(wide)


def _list(
    name: str, operands: Sequence[Sequence[Tensor]], number: Any, staged: Staged, in_place: bool
) -> list[Tensor]:
    """An op on lists of tensors with one number for all of them."""
    ones = list(operands[0])
    is_in_one_launch = ones[0].is_cuda and ones[0].dtype is torch.float32
    if name == "lerp" and is_in_one_launch:
        # Which end it starts from is decided here, and asked again before each replay.
        is_in_one_launch = not isinstance(number, Tensor) and bool(abs(number) < _LERP_TURNS_AT)
    if not is_in_one_launch:
        return [
            _single(name, each, number, staged, in_place)
            for each in zip(ones, *operands[1:], strict=True)
        ]
    tensor = staged(number, torch.float32)
    if name == "div":
        name, tensor = "mul", _reciprocal(number, staged).float()
    if not in_place and name == "mul":
        return list(torch._foreach_mul(ones, tensor))
    if not in_place:
        ones = [one.clone() for one in ones]
    _LISTS[name](ones, *operands[1:], tensor)
    return ones


def _quotients(ones: list[Tensor], number: Tensor, in_place: bool) -> list[Tensor]:
    """Divisions of a list by numbers of a list, which are no products on a GPU either."""
    if ones[0].is_cuda and ones[0].dtype is torch.float32 and in_place:
        torch._foreach_div_(ones, number)
        return ones
    return [_computed("div", [one], number, in_place) for one in ones]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (int, float))
    )


def with_tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], staged: Staged
) -> tuple[Any] | None:
    """Call an op of the table with its number in a tensor.

    Args:
        func: the function of torch.
        args: its positional arguments.
        kwargs: its keyword arguments.
        staged: gives the number as a tensor.

    Returns:
        What it returns, in a tuple; None if the table has no such call, and nothing has happened.
    """
    name: str = getattr(func, "__name__", "")
    if name.startswith("_fused_"):
        # Their kernels read the learning rate from a tensor just as well.
        rest = {key: value for key, value in kwargs.items() if key != "lr"}
        target: Tensor = args[0][0]
        # On a GPU it is a float in a tensor, and a double as a number.
        is_rounded = target.is_cuda and target.dtype is torch.float64
        if "lr" not in kwargs or is_rounded or any(_is_moving(value) for value in rest.values()):
            return None
        dtype = torch.float32 if target.is_cuda else torch.float64
        return (func(*args, **rest, lr=staged(kwargs["lr"], dtype)),)
    base = name.removeprefix("_foreach_")
    in_place = base.endswith("_") and not base.endswith("__")
    base = base.removesuffix("_") if in_place else base
    if base == "add" and len(args) > 1 and _is_number(args[1]):
        base = "plus"
    if base not in _OPS:
        return None
    count = _OPS[base][0]
    operands = args[:count]
    named = [kwargs[key] for key in _NAMES_OF_NUMBERS if key in kwargs]
    numbers = [*args[count:], *named]
    if len(operands) != count or len(numbers) != 1 or len(named) != len(kwargs):
        return None
    number = numbers[0]
    if not name.startswith("_foreach_"):
        return (_single(base, operands, number, staged, in_place),)
    if not isinstance(number, (list, tuple)):
        return (_list(base, operands, number, staged, in_place),)
    # One list for each number: of parameters that have made as many steps.
    places: dict[Any, list[int]] = {}
    for place, each in enumerate(number):
        places.setdefault((type(each), getattr(each, "node", each)), []).append(place)
    results: list[Any] = [None] * len(number)
    for chosen in places.values():
        some = [[operand[place] for place in chosen] for operand in operands]
        one = number[chosen[0]]
        if base == "div":
            made = _quotients(some[0], staged(one, _wide(some[0][0])), in_place)
        else:
            made = _list(base, some, one, staged, in_place)
        for place, result in zip(chosen, made, strict=True):
            results[place] = result
    return (results,)


def _is_moving(value: Any) -> bool:
    return hasattr(value, "node")


def _as_it_is(number: Tensor, dtype: torch.dtype) -> Tensor:
    return number.type(dtype)


class TensorScalarMode(OwnFunctionMode):
    """Lets ops take a tensor as `alpha` or `value` without reading it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = any(isinstance(kwargs.get(name), Tensor) for name in ("alpha", "value"))
        if given and not any_sparse(args):
            done = with_tensors(func, args, kwargs, _as_it_is)
            if done is not None:
                return done[0]
        return func(*args, **kwargs)


def any_sparse(values: Any) -> bool:
    """Whether there is a tensor among some arguments that is not strided."""
    return any(
        leaf.layout is not torch.strided for leaf in tree_iter(values) if isinstance(leaf, Tensor)
    )
