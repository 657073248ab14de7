"""The local tensors of `DTensor`s, which are sharded over processes.

A `DTensor` is a wrapper around a local tensor. Graphs read and write the memory of the local tensor; the
wrapper has none, and its `data_ptr()` is 0.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_split(kind: type) -> bool:
    """True for `DTensor` and its subclasses."""
    # The package is slow to import; without it there is no such tensor.
    package: Any = sys.modules.get("torch.distributed.tensor")
    return package is not None and issubclass(kind, package.DTensor)


def is_around_another(kind: type) -> bool:
    """True for types of tensors that wrap another tensor and have no memory.

    These are `DTensor`s, and results of functional collectives, which wait at their first use. A
    dispatch mode that returns `NotImplemented` for an op on one sees the ops on the inner tensor.
    """
    package: Any = sys.modules.get("torch.distributed._functional_collectives")
    return is_split(kind) or (package is not None and issubclass(kind, package.AsyncCollectiveTensor))


def local(tensor: Tensor) -> Tensor:
    """The local part of a `DTensor`; any other tensor itself."""
    if type(tensor) is Tensor or not is_split(type(tensor)):
        return tensor
    part: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part


def address_of(tensor: Tensor) -> int:
    """The address of the local part of a tensor."""
    return local(tensor).data_ptr()


def as_split_as(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor that is split over the processes as another, from its local part."""
    if local(tensor) is tensor:
        return part
    split: Any = tensor
    made: Tensor = type(split).from_local(
        part,
        split.device_mesh,
        split.placements,
        run_check=False,
        shape=split.shape,
        stride=split.stride(),
    )
    return made
