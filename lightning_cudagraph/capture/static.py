"""The static buffers that a graph reads its batches from.

A graph reads fixed addresses. The first batch of a signature gives the shape of a set of static
buffers; every later batch of the same signature is copied into them before the replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.capture.batch import PLAIN, flatten_batch, map_leaves, structure_of
from lightning_cudagraph.errors import CaptureError

__all__ = ["StaticBatch"]


class _Pattern:
    """What a batch looks like, for a quick yes.

    Knows lists, tuples and dictionaries (and none of their subclasses) of plain tensors and Python
    values. A signature says the same of any batch, and where two differ, in ten times the time.

    Args:
        batch: the batch to describe.
    """

    def __init__(self, batch: Any) -> None:
        self._known = True
        self._root = self._described(batch)

    def _described(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if kind is Tensor:
            return (Tensor, value.shape, value.stride(), value.dtype, value.requires_grad)
        if kind is list or kind is tuple:
            return (kind, [self._described(member) for member in value])
        if kind is dict:
            return (kind, list(value), [self._described(member) for member in value.values()])
        self._known &= kind in PLAIN
        return (kind, value)

    def tensors(self, batch: Any, device_type: str) -> list[Tensor] | None:
        """The tensors of a batch in their order, or None if it is not known to look like this one.

        Args:
            batch: any batch.
            device_type: where its tensors have to be.
        """
        found: list[Tensor] = []
        if not (self._known and _matches(self._root, batch, device_type, found)):
            return None
        # One tensor at two places is another signature.
        return found if len({id(tensor) for tensor in found}) == len(found) else None


def _matches(pattern: tuple[Any, ...], value: Any, device_type: str, found: list[Tensor]) -> bool:
    kind = pattern[0]
    if type(value) is not kind:
        return False
    if kind is Tensor:
        _, shape, stride, dtype, requires_grad = pattern
        found.append(value)
        return (
            value.layout is torch.strided
            and value.shape == shape
            and value.dtype is dtype
            and value.stride() == stride
            and value.requires_grad is requires_grad
            and value.device.type == device_type
        )
    if kind is list or kind is tuple:
        members = value
    elif kind is dict:
        if list(value) != pattern[1]:
            return False
        members = list(value.values())
    else:
        return bool(value == pattern[1])
    inner = pattern[-1]
    return len(members) == len(inner) and all(
        _matches(child, member, device_type, found) for child, member in zip(inner, members, strict=True)
    )


class StaticBatch:
    """A batch whose tensors stay at the same addresses.

    Args:
        example: a batch of the signature to hold; its values are copied.

    Attributes:
        batch: the same containers as `example` around the static buffers.
    """

    def __init__(self, example: Any) -> None:
        buffers: dict[int, Tensor] = {}

        def static(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in buffers:
                # `empty_strided` keeps the layout, so that the same kernels are chosen as in eager.
                buffers[id(leaf)] = self._empty_like(leaf)
            return buffers[id(leaf)]

        self.batch = map_leaves(example, static)
        self._buffers = list(buffers.values())
        self.copy_from(example)
        self._structure = structure_of(self.batch)
        self._pattern = _Pattern(example)

    @staticmethod
    def _empty_like(leaf: Tensor) -> Tensor:
        # `empty_strided` keeps the layout, so that the same kernels are chosen as in eager; not that
        # of an expanded tensor, whose elements share memory and cannot be written.
        overlaps = any(st == 0 and n > 1 for st, n in zip(leaf.stride(), leaf.shape, strict=True))
        if overlaps:
            buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        else:
            buffer = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return buffer.requires_grad_(leaf.requires_grad)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Refuse a step that changes the batch: hooks would see another one than in an eager step.

        Raises:
            CaptureError: naming the tensor that was written, or that the containers changed.
        """
        versions = [buffer._version for buffer in self._buffers]
        yield
        if structure_of(self.batch) != self._structure:
            raise CaptureError(
                "The training step adds to the containers of its batch, or takes from them.",
                "Copy the container first: `batch = dict(batch)`.",
            )
        for buffer, version in zip(self._buffers, versions, strict=True):
            if buffer._version != version:
                path = next(path for path, leaf in flatten_batch(self.batch) if leaf is buffer)
                raise CaptureError(
                    f"The training step writes into `{path}` in place.",
                    "Write into a copy: `x = x.clone()`.",
                )

    def tensors_of(self, batch: Any, device_type: str) -> list[Tensor] | None:
        """The tensors of a batch of the same signature, in the order of the buffers.

        Args:
            batch: any batch.
            device_type: where its tensors have to be.

        Returns:
            The tensors, or None if it is of another signature, or if only a `Signature` can tell.
        """
        return self._pattern.tensors(batch, device_type)

    def copy_from(self, batch: Any) -> None:
        """Copy the tensors of a batch of the same signature into the static buffers."""
        if batch is self.batch:  # whoever handed it on has filled them
            return
        leaves = [leaf for _, leaf in flatten_batch(batch) if isinstance(leaf, Tensor)]
        self.fill(list({id(leaf): leaf for leaf in leaves}.values()))

    def fill(self, tensors: list[Tensor]) -> None:
        """Copy tensors, as `tensors_of` gives them, into the static buffers."""
        with torch.no_grad():
            for buffer, source in zip(self._buffers, tensors, strict=True):
                buffer.copy_(source, non_blocking=True)
