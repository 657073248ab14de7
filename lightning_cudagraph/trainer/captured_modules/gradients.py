"""The gradients that a backward pass brings to the outputs of a module, and static ones like them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cudagraph.checks.guards.switches import global_switches
from lightning_cudagraph.tensors.batch import copied_leaf
from lightning_cudagraph.tensors.layouts import (
    alignment_bytes,
    empty_past,
    has_strides,
    without_repeats,
)


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_strided: bool
    alignment_bytes: int

    @classmethod
    def of(cls, gradient: Tensor) -> _Form:
        """The form of a gradient."""
        is_strided = type(gradient) is Tensor and has_strides(gradient)
        if not is_strided or gradient.is_conj() or gradient.is_neg():
            return cls(tuple(gradient.shape), (), gradient.dtype, False, 0)
        shape, stride = tuple(gradient.shape), gradient.stride()
        return cls(shape, stride, gradient.dtype, True, alignment_bytes(gradient))

    def static(self, device: torch.device) -> Tensor:
        """Make a gradient of this form, with the same strides: an expanded one stays expanded."""
        once = [1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True)]
        memory = empty_past(self.alignment_bytes, once, self.stride, self.dtype, device)
        return memory.expand(self.shape)


@dataclass(frozen=True)
class Mode:
    """The mode of torch in which a pass runs, that a trainer sets around it.

    Attributes:
        autocast: the dtype of autocast; None without autocast.
        caches: autocast keeps what it has cast, also where it is off.
        default_dtype: torch's default dtype; Lightning sets another for the forward pass.
    """

    device_type: str
    is_grad_enabled: bool
    autocast: torch.dtype | None
    caches: bool
    default_dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Mode:
        """The present mode."""
        is_on = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_on else None
        caches = torch.is_autocast_cache_enabled()
        return cls(device_type, torch.is_grad_enabled(), dtype, caches, torch.get_default_dtype())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the `with` block in this mode."""
        on, dtype = self.autocast is not None, torch.get_default_dtype()
        caches = self.caches and not on  # of a graph's memory
        torch.set_default_dtype(self.default_dtype)
        try:
            with (
                torch.set_grad_enabled(self.is_grad_enabled),
                torch.autocast(self.device_type, self.autocast, enabled=on, cache_enabled=caches),
            ):
                yield
        finally:
            torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class GradientForms:
    """The form in which gradients come to the outputs of a module. A backward graph is made for one.

    Attributes:
        forms: of each output; None for one without a gradient.
        mode: the mode of torch in the backward pass.
        switches: other switches of torch in it.
    """

    forms: tuple[_Form | None, ...]
    mode: Mode
    switches: tuple[object, ...]
    device: torch.device

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None], device: torch.device) -> GradientForms:
        """The form of these gradients."""
        forms = tuple(None if each is None else _Form.of(each) for each in gradients)
        return cls(forms, Mode.now(device.type), _switches(), device)

    @property
    def is_plain(self) -> bool:
        """True if static gradients can have this form, and a capture now has the same switches."""
        there = [form for form in self.forms if form is not None]
        is_strided = bool(there) and all(form.is_strided for form in there)
        return is_strided and self.switches == _switches()

    def static(self) -> list[Tensor | None]:
        """Make static gradients of this form."""
        return [None if form is None else form.static(self.device) for form in self.forms]


def _switches() -> tuple[object, ...]:
    """The switches that choose kernels of a backward pass, in which gradients are off."""
    others = ("is_grad_enabled", "autocast", "default_dtype")
    return tuple(v for k, v in global_switches().items() if not any(name in k for name in others))


def fill(static: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients into static ones of the same form."""
    for own, given in zip(static, gradients, strict=True):
        if own is not None and given is not None:
            without_repeats(own).copy_(without_repeats(given), non_blocking=True)


def copied(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy tensors with their strides, most of them in one launch."""
    found = [None if tensor is None else _empty_like(tensor) for tensor in tensors]
    pairs = [pair for pair in zip(found, tensors, strict=True) if pair[0] is not None]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
    return [
        copied_leaf(tensor) if own is None and tensor is not None else own
        for own, tensor in zip(found, tensors, strict=True)
    ]


def _empty_like(tensor: Tensor) -> Tensor | None:
    """Memory for a copy that starts where an allocation starts, in order; None for any other."""
    return torch.empty_like(tensor) if tensor.is_contiguous() and not tensor.storage_offset() else None


def fill_for_check(static: Sequence[Tensor | None]) -> None:
    """Fill static gradients with numbers, the same each time, that draw from no generator."""
    for own in static:
        if own is not None:
            part = without_repeats(own)
            numbers = torch.arange(part.numel(), device=own.device).remainder_(7).sub_(3)
            part.copy_(numbers.view(part.shape))
