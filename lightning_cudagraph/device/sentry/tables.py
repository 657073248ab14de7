"""Tables that torch's `DistributedDataParallel` has on the host, with a copy on the device.

With `find_unused_parameters=True` or `static_graph=True` there is an `int` for each parameter. The C++
code of the wrapper sets and reads it in every backward pass. No kernel of a step reads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.device.sentry.known import READS
from lightning_cudagraph.tensors.writes import tensors_in

_TORCH = os.path.dirname(torch.__file__) + os.sep
_BACKWARD = torch.autograd.graph.__file__
_lengths: list[int] = []


@contextmanager
def table_of_a_wrapper(n_parameters: int) -> Iterator[None]:
    """Take tensors of so many integers for tables, where no Python code calls the op."""
    _lengths.append(n_parameters)
    try:
        yield
    finally:
        _lengths.remove(n_parameters)


def is_table(tensor: Tensor) -> bool:
    """True for a table or one element of it, in an op that the wrapper calls."""
    return _has_its_length(tensor) and _is_called_by_autograd()


def is_on_tables(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for an op that the wrapper calls on tables alone: a write, a view or the read of a number."""
    if func.namespace == "c10d":
        return False  # which waits for the other processes
    if not (_lengths and (func._schema.is_mutable or func.is_view or func._schema.name in READS)):
        return False
    tensors = tensors_in(args, kwargs)
    return bool(tensors) and all(map(_has_its_length, tensors)) and _is_called_by_autograd()


def _is_called_by_autograd() -> bool:
    """True if user code has called a backward pass, and no op in it, or if there is none at all."""
    files = (frame.f_code.co_filename for frame in frames(sys._getframe()))
    ours = (PACKAGE_DIR, _TORCH)
    return next((f for f in files if f == _BACKWARD or not f.startswith(ours)), _BACKWARD) == _BACKWARD


def _has_its_length(tensor: Tensor) -> bool:
    return (
        bool(_lengths)
        and tensor.dtype is torch.int
        and tensor.ndim <= 1
        and tensor.untyped_storage().nbytes() // tensor.itemsize in _lengths
    )
