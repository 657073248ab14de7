"""The part that a process has of a tensor that is split between processes.

A `DTensor` is a description around a tensor, the local part. The memory that a graph reads and writes is
that of the local part; the description itself has none, and says that it begins at address 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["address_of", "addresses_of", "is_around_another", "is_split", "local"]

_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr


def is_split(kind: type) -> bool:
    """Whether tensors of a type are split between processes."""
    # Its package takes long to import; who has not imported it has no such tensor.
    package: Any = sys.modules.get("torch.distributed.tensor")
    return package is not None and issubclass(kind, package.DTensor)


def is_around_another(kind: type) -> bool:
    """Whether tensors of a type have no memory, but are something around a tensor that has.

    Those that are split, and what a functional collective returns, which is waited for when it is used.
    Ops on one are ops on what it is around, and come to a mode as these, if it leaves the first to them.
    """
    package: Any = sys.modules.get("torch.distributed._functional_collectives")
    return is_split(kind) or (package is not None and issubclass(kind, package.AsyncCollectiveTensor))


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: all of it, if it is not split."""
    if type(tensor) is Tensor or not is_split(type(tensor)):
        return tensor
    part: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part


def address_of(tensor: Tensor) -> int:
    """Where what this process has of a tensor begins."""
    return local(tensor).data_ptr()


def addresses_of(tensors: Iterable[Tensor]) -> Callable[[Tensor], int]:
    """What gives the addresses of some tensors: a C function, where none of them is split."""
    return address_of if any(is_split(type(tensor)) for tensor in tensors) else _data_ptr
