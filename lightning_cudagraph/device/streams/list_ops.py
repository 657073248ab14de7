"""Ops on lists of tensors (`_foreach_*`, `_fused_*`), which may run on some of the tensors at a time.

An optimizer's step on all gradients waits for the last all-reduce. In parts it waits, for each gradient,
for its own. A tensor of a list does not depend on the others, so the results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_FOREACH = "aten::_foreach_"
_FUSED = "aten::_fused_"


def length_of(func: Any, args: Any, kwargs: Any) -> int:
    """The tensors in each list of an op that treats them alike and one by one; 0 for other ops.

    With other strides or dtypes in a list, torch runs kernels for single tensors on all of it
    (`can_use_fast_route` in aten/src/ATen/native/ForeachUtils.h), which may round otherwise. In parts,
    it would not for some. So such ops count among the others.
    """
    if not _is_one_by_one(func):
        return 0
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, (list, tuple)) and len(value)]
    tensors = [each for each in lists if all(isinstance(one, Tensor) for one in each)]
    length = len(tensors[0]) if tensors else 0
    if any(len(each) != length for each in lists) or not all(map(_are_alike, tensors)):
        return 0
    if any(isinstance(value, Tensor) and value.numel() != 1 for value in values):
        return 0  # numbers for the tensors, in one tensor
    same_strides = all(
        len({one.stride() for one in ones if one.dim()}) <= 1 for ones in zip(*tensors, strict=True)
    )
    return length if same_strides else 0


@cache
def _is_one_by_one(func: Any) -> bool:
    name = func._schema.name
    if name.startswith(_FOREACH):
        one = getattr(torch.ops.aten, name.removeprefix(_FOREACH), None)
        overloads = [] if one is None else [getattr(one, each) for each in one.overloads()]
        return any(torch.Tag.pointwise in each.tags for each in overloads)
    return name.startswith(_FUSED) and bool(func._schema.is_mutable) and not func._schema.returns


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    kinds = {(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}
    return len(kinds) == 1 and tensors[0].is_cuda


def part_of(args: Any, kwargs: Any, indices: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op for some of the tensors of its lists."""

    def part(value: Any) -> Any:
        is_list = isinstance(value, (list, tuple)) and value
        return [value[index] for index in indices] if is_list else value

    return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}


def tensors_at(args: Any, kwargs: Any, length: int) -> Iterator[list[Tensor]]:
    """Yield for each index the tensors of all lists."""
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    for index in range(length):
        yield [each[index] for each in lists if isinstance(each[index], Tensor)]
