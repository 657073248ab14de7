"""Layouts of tensors: memory with the layout of another tensor, and a guard on addresses and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.tensors.local import is_split, local

# Bytes. Allocators of torch give memory that is aligned to this or more on CUDA.
_ALIGNED_BYTES = 256
# Bytes and elements that torch's sums read at once; for other addresses they sum in another order.
_READ_BYTES, _READ_ELEMENTS = 16, 4

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


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A function of as many tensors, True only if they have the layouts of these; None without Dynamo.

    It is also False in another dispatch state of the thread, which changes no tensor.
    """
    return _guard_of(tensors) if _has_guards else None


def _layout(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.requires_grad


def are_alike(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors have one shape, dtype and alignment, and the same strides."""
    return (
        tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and tensor.stride() == other.stride()
        and alignment_bytes(tensor) == alignment_bytes(other)
    )


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The address and layout of a tensor, as far as graphs bake them in, as one comparable value."""
    return _layout(tensor), tensor.data_ptr(), local(tensor).data_ptr()


def has_strides(tensor: Tensor) -> bool:
    """True for a tensor with one shape and its strides: neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def past_aligned_bytes(tensor: Tensor) -> int:
    """The bytes from an aligned address to that of a tensor."""
    # Kernels of a CPU do not depend on it. A batch that comes to a GPU from there is aligned.
    return tensor.data_ptr() % _ALIGNED_BYTES if tensor.is_cuda else 0


def alignment_bytes(tensor: Tensor) -> int:
    """The bytes by which an address is past those at which sums begin in their usual order."""
    if tensor.numel() < 2:
        return 0
    return past_aligned_bytes(tensor) % max(_READ_BYTES, _READ_ELEMENTS * tensor.itemsize)


def empty_like(tensor: Tensor) -> Tensor:
    """Memory with the layout and alignment of a tensor, so that the same kernels are chosen for it."""
    once = without_repeats(tensor)
    memory = empty_strided(once.shape, once.stride(), once)
    return with_lazy_signs(memory.expand(tensor.shape), tensor)


def empty_strided(shape: Sequence[int], stride: Sequence[int], like: Tensor) -> Tensor:
    """Memory for these strides, with the alignment, dtype and device of a tensor."""
    return empty_past(past_aligned_bytes(like), shape, stride, like.dtype, like.device)


def empty_past(
    past_bytes: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Memory for these strides, so many bytes past an aligned address."""
    past = past_bytes // dtype.itemsize
    if past == 0 or 0 in shape:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    memory = torch.empty(past + extent(shape, stride), dtype=dtype, device=device)
    return memory.as_strided(shape, stride, past)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The elements from the first one of a tensor to its last one."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def without_repeats(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that can be written: its repeated elements once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def with_lazy_signs(tensor: Tensor, like: Tensor) -> Tensor:
    """Conjugate and negate a tensor lazily where `like` is; where both are one, its plain memory."""
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


class Layouts:
    """A guard on addresses, classes, shapes, strides, dtypes and `requires_grad` of distinct tensors.

    The offset in the storage is part of the address. Of a `DTensor`, the local part is compared too.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._split = [index for index, tensor in enumerate(tensors) if is_split(type(tensor))]
        tensors = self._with_parts(tensors)
        self._addresses = [*map(_data_ptr, tensors)]
        self._layouts = [*map(_layout, tensors)]
        self._alignments_bytes = [*map(alignment_bytes, tensors)]
        self._check = layout_guard(tensors)

    def _with_parts(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return [*tensors, *(local(tensors[index]) for index in self._split)] if self._split else tensors

    def changed(self, tensors: Sequence[Tensor | None]) -> bool:
        now = self._with_parts(tensors)
        return self._are_others(now) or [*map(_data_ptr, now)] != self._addresses

    def changed_but_for_addresses(self, tensors: Sequence[Tensor]) -> bool:
        """True if tensors have other layouts or alignments, wherever they are."""
        now = self._with_parts(tensors)
        return self._are_others(now) or [*map(alignment_bytes, now)] != self._alignments_bytes

    def _are_others(self, now: Sequence[Any]) -> bool:
        if self._check is None or not self._check(*now):
            if [*map(_layout, now)] != self._layouts:
                return True
            self._check = layout_guard(now)
        return False
