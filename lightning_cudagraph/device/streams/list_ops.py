"""Ops on lists of tensors (`_foreach_*`, `_fused_*`), which may run on some of the tensors at a time.

An optimizer's step on all gradients waits for the last all-reduce. In parts it waits, for each gradient,
for its own. A tensor of a list does not depend on the others, so the results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.streams.dataflow import AddressRange

_FOREACH = "aten::_foreach_"
_FUSED = "aten::_fused_"


@cache
def is_whole_step(func: Any) -> bool:
    """True for the step of an optimizer in one op."""
    schema = func._schema
    return schema.name.startswith(_FUSED) and bool(schema.is_mutable) and not schema.returns


def length_of(func: Any, args: Any, kwargs: Any) -> int:
    """The tensors in each list of an op that treats them alike and one by one; 0 for other ops.

    `_foreach_*` of tensors that are not alike is among the others: for one such tensor, torch runs other
    kernels on all of them (`can_use_fast_route` in aten/src/ATen/native/ForeachUtils.h), which may round
    otherwise.
    """
    is_foreach = _is_pointwise(func)
    if not is_foreach and not is_whole_step(func):
        return 0
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, (list, tuple)) and len(value)]
    tensors = [each for each in lists if all(isinstance(one, Tensor) for one in each)]
    length = len(tensors[0]) if tensors else 0
    if any(len(each) != length for each in lists):
        return 0
    if any(isinstance(value, Tensor) and value.numel() != 1 for value in values):
        return 0  # numbers for the tensors, in one tensor
    if any(len({(one.dtype, one.device, one.layout) for one in each}) != 1 for each in tensors):
        return 0
    is_alike = all(len({*map(_form, ones)} - {None}) == 1 for ones in zip(*tensors, strict=True))
    is_dense = all(_form(one) is not None for each in tensors for one in each)
    return length if not is_foreach or (is_alike and is_dense) else 0


@cache
def _is_pointwise(func: Any) -> bool:
    """True for an op on lists that does to each tensor what a pointwise op does."""
    name = func._schema.name
    one = getattr(torch.ops.aten, name.removeprefix(_FOREACH).rstrip("_"), None)
    if not name.startswith(_FOREACH) or one is None:
        return False
    return any(torch.Tag.pointwise in getattr(one, each).tags for each in one.overloads())


def _form(tensor: Tensor) -> tuple[tuple[int, int], ...] | None:
    """Sizes and strides of dimensions that are longer than one; None with gaps or overlaps in memory."""
    form = tuple(
        (size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    expected = 1
    for size, stride in sorted(form, key=lambda each: each[1]):
        if stride != expected:
            return None
        expected *= size
    return form


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


def overlap(spans: Sequence[Sequence[AddressRange]]) -> bool:
    """True if tensors at two indices share memory, so that their order counts."""
    in_order = sorted(
        (start, end, index) for index, own in enumerate(spans) for start, end in own if start < end
    )
    reached, of = 0, -1
    for start, end, index in in_order:
        if start < reached and index != of:
            return True
        if end > reached:
            reached, of = end, index
    return False


def merged(parts: Sequence[list[int]], number: int) -> list[list[int]]:
    """Join neighbours to at most so many parts.

    The ops of a step follow one another part by part, each part on a stream of its own: on one stream,
    the first part of an op would come behind the last part of the op before.
    """
    bounds = [round(index * len(parts) / number) for index in range(number + 1)]
    joined = [[i for part in parts[begin:end] for i in part] for begin, end in pairwise(bounds)]
    return [part for part in joined if part]
