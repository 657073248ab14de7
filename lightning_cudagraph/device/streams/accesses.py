"""The memory that an op reads and writes, by addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.streams.dataflow import Span
from lightning_cudagraph.tensors.writes import written_by

__all__ = ["Access", "access_of", "made_by", "only_looks", "pieces"]

# Ops that were seen to write what they declare and nothing else, in one of their overloads at least
# (`python -m tests.checked` looks, and writes the list). For all others, everything waits.
_CHECKED = frozenset(Path(__file__).with_name("checked_ops.txt").read_text().split())
# They launch nothing: they return what they are given, though their schemas do not say so, or look at no
# more than shapes and dtypes.
_LOOKING = frozenset(
    {
        "aten::is_same_size",
        "aten::result_type",
        "aten::_unsafe_view",
        "aten::_reshape_alias",
        "aten::lift_fresh",
        "aten::detach",
        "aten::alias",
    }
)
# Families that may use what is not among their arguments: handles, plans and scratch memory that
# libraries keep for themselves, streams of their own, memory of another device, or another storage than
# the one that they were given.
_APART = (
    "aten::_cudnn",
    "aten::_thnn_fused",
    "aten::_linalg",
    "aten::addbmm",
    "aten::linalg",
    "aten::_cholesky",
    "aten::cholesky",
    "aten::lu_",
    "aten::ormqr",
    "aten::geqrf",
    "aten::triangular",
    "aten::_fft",
    "aten::_sparse",
    "aten::sparse",
    "aten::_pin_memory",
    "aten::record_stream",
    "aten::resize",
    "aten::set_",
    "aten::_resize",
)
# Of these families, but plain kernels.
_PLAIN = frozenset({"aten::linalg_vector_norm", "aten::linalg_cross"})
# What an op costs besides the bytes that it moves, in small kernels, and how many bytes make one more.
_BYTES_A_KERNEL = 8e6


@dataclass
class Access:
    """The use that an op makes of memory that is there already.

    Attributes:
        reads: what it reads.
        writes: what it writes.
        tensors: its arguments that are tensors.
        cost: how long it takes, as a rough guess, in small kernels.
        places: where the storages of the arguments are that it writes, each with the address.
    """

    reads: list[Span]
    writes: list[Span]
    tensors: list[Tensor]
    cost: float
    places: list[tuple[torch.UntypedStorage, int]]

    def moved(self) -> bool:
        """Tell if the op has given an argument other memory; what it had may be in use elsewhere."""
        return any(storage.data_ptr() != address for storage, address in self.places)


@cache
def only_looks(func: Any) -> bool:
    """Tell if an op launches nothing and allocates nothing: it returns its argument, or a view of it."""
    schema = func._schema
    is_range = func.namespace == "profiler"  # of a time line of the host
    if func.is_view or is_range or schema.name in _LOOKING:
        return True
    # Of torch's own: another's, without tensors, may launch what writes into memory that it keeps.
    types = (each.type for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and not any("Tensor" in str(kind) for kind in types)


def access_of(func: Any, args: Any, kwargs: Any) -> Access | None:
    """The use that an op is about to make of memory, or None if that is not known for sure."""
    name = func._schema.name
    if name not in _CHECKED or (name.startswith(_APART) and name not in _PLAIN):
        return None
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if not all(map(_is_plain, tensors)):
        return None
    written = written_by(func, args, kwargs)
    if func._schema.is_mutable and not written:
        return None
    reads, writes = [*map(_span, tensors)], [*map(_span, written)]
    if any(argument.is_out for argument in func._schema.arguments):
        if not all(tensor.numel() for tensor in written):
            return None  # it is given memory for the result
        writes = [_all_of(tensor) for tensor in written]  # its size may change
    moved_bytes = sum(end - start for start, end in (*reads, *writes))
    cost = 1.0 + moved_bytes / _BYTES_A_KERNEL
    return Access(reads, writes, tensors, cost, [*map(_place, written)])


def made_by(result: Any, tensors: list[Tensor], device_type: str) -> list[Tensor]:
    """The results of an op that lie in memory of their own, one for each.

    Args:
        result: what it returned.
        tensors: its arguments, as they were when it was called.
        device_type: only memory of this kind of device counts.
    """
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    made: dict[int, Tensor] = {}
    for leaf in tree_iter(result):
        for piece in pieces(leaf) if isinstance(leaf, Tensor) else ():
            storage = piece.untyped_storage()
            if piece.device.type == device_type and storage._cdata not in known and storage.nbytes():
                made[storage._cdata] = piece
    return list(made.values())


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with one storage that a tensor consists of: several if it is sparse."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _is_plain(tensor: Tensor) -> bool:
    """Tell if its numbers lie in one storage, and ops on it are what they say."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _place(tensor: Tensor) -> tuple[torch.UntypedStorage, int]:
    storage = tensor.untyped_storage()
    return storage, storage.data_ptr()


def _all_of(tensor: Tensor) -> Span:
    storage, start = _place(tensor)
    return start, start + storage.nbytes()


def _span(tensor: Tensor) -> Span:
    if not tensor.numel():
        return 0, 0
    start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start), int(start + (reach + 1) * tensor.itemsize)
