"""The address ranges that an op reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.streams.dataflow import AddressRange
from lightning_cudagraph.tensors.layouts import extent
from lightning_cudagraph.tensors.writes import tensors_in, written_by

# Ops that write what they declare and nothing else, as seen in at least one overload
# (`python -m tests.checked` writes the list). All other ops are barriers.
_CHECKED = frozenset(Path(__file__).with_name("checked_ops.txt").read_text().split())
# Wraps a tensor so that its first use waits for it.
WRAP = "_c10d_functional::_wrap_tensor_autograd"
# They launch nothing: they return their argument, although their schemas do not say so, or read only
# shapes and dtypes.
_LOOKING = frozenset(
    {
        WRAP,
        "aten::is_same_size",
        "aten::result_type",
        "aten::_unsafe_view",
        "aten::_reshape_alias",
        "aten::lift_fresh",
        "aten::detach",
        "aten::alias",
    }
)
# Families of ops that may use more than their arguments: handles, plans and scratch memory of
# libraries, streams of their own, memory of another device, or another storage of an argument.
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
# Plain kernels in these families.
_PLAIN = frozenset({"aten::linalg_vector_norm", "aten::linalg_cross"})
# Estimated cost in small kernels: one, and one more for so many bytes moved.
_BYTES_A_KERNEL = 8e6


@dataclass
class Access:
    """The accesses of an op to memory that exists before it.

    Attributes:
        cost: rough estimate of its time, in small kernels.
    """

    reads: list[AddressRange]
    writes: list[AddressRange]
    tensors: list[Tensor]
    cost: float
    places: list[tuple[torch.UntypedStorage, int]]
    sizes: list[tuple[Tensor, torch.Size]]

    def moved(self) -> str:
        """Return in words how the op has used other memory; empty if it has not."""
        if any(storage.data_ptr() != address for storage, address in self.places):
            return "gave a tensor other memory, and what it had may be in use elsewhere"
        if any(tensor.shape != size for tensor, size in self.sizes):
            return "resized its `out` argument"
        return ""


@cache
def only_looks(func: Any) -> bool:
    """True if an op launches and allocates nothing: it returns its argument, or a view of it."""
    schema = func._schema
    is_range = func.namespace == "profiler"  # a range of the host's profile
    if func.is_view or is_range or schema.name in _LOOKING:
        return True
    # Only for torch's ops: others without tensors may launch kernels that write into memory they keep.
    types = (each.type for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and not any("Tensor" in str(kind) for kind in types)


def access_of(func: Any, args: Any, kwargs: Any) -> Access | None:
    """The memory accesses of an op that is about to run; None if they are not known for certain."""
    name = func._schema.name
    if name not in _CHECKED or (name.startswith(_APART) and name not in _PLAIN):
        return None
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if not all(map(_is_plain, tensors)):
        return None
    written = written_by(func, args, kwargs)
    if func._schema.is_mutable and not written:
        return None
    reads, writes = [*map(span_of, tensors)], [*map(span_of, written)]
    is_out = any(argument.is_out for argument in func._schema.arguments)
    if is_out and not all(tensor.numel() for tensor in written):
        return None  # the op allocates memory for it
    moved_bytes = sum(end - start for start, end in (*reads, *writes))
    cost = 1.0 + moved_bytes / _BYTES_A_KERNEL
    sizes = [(tensor, tensor.shape) for tensor in written if is_out]
    return Access(reads, writes, tensors, cost, [*map(_place, written)], sizes)


def made_by(result: Any, tensors: list[Tensor], device_type: str) -> list[Tensor]:
    """The results of an op in storages that it has allocated on this type of device, one for each."""
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    made: dict[int, Tensor] = {}
    for leaf in tree_iter(result):
        for piece in pieces(leaf) if isinstance(leaf, Tensor) and has_address(leaf) else ():
            storage = piece.untyped_storage()
            if piece.device.type == device_type and storage._cdata not in known and storage.nbytes():
                made[storage._cdata] = piece
    return list(made.values())


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The strided tensors that a tensor consists of: several if it is sparse."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def launches_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a call of an op launches nothing: it only looks, or its arguments have no memory."""
    return only_looks(func) or any(map(is_fake, tensors_in(args, kwargs)))


def has_address(tensor: Tensor) -> bool:
    """False for fake tensors, and for wrappers around other tensors."""
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not is_wrapper and not is_fake(tensor)


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor without memory, with which `DTensor` infers the result of an op."""
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta"


def _is_plain(tensor: Tensor) -> bool:
    """True for a strided tensor without a dispatch of its own."""
    return has_address(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def _place(tensor: Tensor) -> tuple[torch.UntypedStorage, int]:
    storage = tensor.untyped_storage()
    return storage, storage.data_ptr()


def all_of(tensor: Tensor) -> AddressRange:
    """The addresses of the storage of a tensor."""
    storage, start = _place(tensor)
    return start, start + storage.nbytes()


def span_of(tensor: Tensor) -> AddressRange:
    """The addresses of the elements of a tensor, with those in between."""
    if not tensor.numel():
        return 0, 0
    start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
    return int(start), int(start + extent(tensor.shape, tensor.stride()) * tensor.itemsize)
