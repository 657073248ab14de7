"""A guard on addresses and layouts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.tensors.local import is_split, local

_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr


def _guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Dynamo's guard on class, device, dtype, shape, strides and `requires_grad` of all tensors."""
    guards: Any = torch._C._dynamo.guards
    check: Callable[..., bool] = guards.TensorGuards(
        *tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]
    ).check
    return check


def _guards_work() -> bool:
    """True if Dynamo's guard is available and detects the changes that it is needed for."""
    try:
        with torch.no_grad():
            tensor = torch.empty(2, 2)
            check = _guard_of([tensor])
            others = (tensor.t(), tensor[:1], tensor.double(), torch.nn.Parameter(tensor))
            seen = check(tensor) and not any(map(check, others))
            return seen and not check(tensor.requires_grad_())
    except (AttributeError, TypeError):
        return False


_has_guards = _guards_work()


def _layout(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.requires_grad


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The address and layout of a tensor, as far as graphs bake them in, as one comparable value."""
    return _layout(tensor), tensor.data_ptr(), local(tensor).data_ptr()


class Layouts:
    """A guard on addresses, classes, shapes, strides, dtypes and `requires_grad` of tensors.

    The offset in the storage is part of the address. Of a `DTensor`, the local part is compared too.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._are_split = any(is_split(type(tensor)) for tensor in tensors)
        tensors = self._with_parts(tensors)
        self._addresses = [*map(_data_ptr, tensors)]
        self._layouts = [*map(_layout, tensors)]
        self._check = _guard_of(tensors) if _has_guards else None

    def _with_parts(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return [*tensors, *map(local, tensors)] if self._are_split else tensors

    def changed(self, tensors: Sequence[Tensor | None]) -> bool:
        now = self._with_parts(tensors)
        if self._check is None or not self._check(*now):
            if [*map(_layout, now)] != self._layouts:
                return True
            # Dynamo's guard also compares the dispatch state of the thread, which changes no tensor.
            self._check = _guard_of(now) if _has_guards else None
        return [*map(_data_ptr, now)] != self._addresses
