"""Which tensors an op writes into."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_cudagraph.tensors.local import local

__all__ = [
    "UNDECLARED_WRITES",
    "Writes",
    "storage_id",
    "storages_held",
    "tensors_in",
    "whole",
    "written_by",
]

# Schemas lie: what these ops write without saying so, by the names of their arguments. The test of
# `accesses` compares what each op declares with what it does, and finds those that are missing here.
_RUNNING_STATISTICS = ("running_mean", "running_var")
UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    # aten/src/ATen/native/native_functions.yaml, `native_batch_norm` and its backends' forms.
    "aten::native_batch_norm": _RUNNING_STATISTICS,
    "aten::cudnn_batch_norm": _RUNNING_STATISTICS,
    "aten::miopen_batch_norm": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": _RUNNING_STATISTICS,
    "aten::batch_norm_update_stats": _RUNNING_STATISTICS,
    # cuDNN is given the memory that the forward pass kept as memory that it may write.
    "aten::cudnn_batch_norm_backward": ("reserveSpace",),
    # These draw from a state of cuDNN's own, which moves on with each pass
    # (aten/src/ATen/native/cudnn/RNN.cpp, `DropoutState`).
    "aten::_cudnn_rnn": ("dropout_state",),
    # The backward pass works in the memory that the forward pass kept.
    "aten::_cudnn_rnn_backward": ("dropout_state", "reserve"),
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
    # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
# Collectives declare nothing; what they write is their first argument
# (torch/csrc/distributed/c10d/Ops.cpp).
_COLLECTIVES = "c10d::"


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among arguments of an op, or what it returns: single, or in lists.

    As pytrees find them. Those call a few functions for each leaf, on which the audit of a capture looks
    in turn: fits of a small model on the emulator took 84 to 100 ms, and 64 to 77 since.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def storage_id(tensor: Tensor) -> int:
    """A number for the memory that a tensor lies in; not used twice while that lives."""
    return int(local(tensor).untyped_storage()._cdata)


def whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in, in its dtype."""
    part = local(tensor)
    flat = torch.empty(0, dtype=part.dtype, device=part.device)
    return flat.set_(part.untyped_storage())


def storages_held() -> dict[int, StorageWeakRef]:
    """The memory that tensors of Python lie in, by number; none is used again while this is kept."""
    found: dict[int, StorageWeakRef] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in (each for each in gc.get_objects() if issubclass(type(each), Tensor)):
            # Those that have no memory of their own (sparse ones, wrappers) say so by raising.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                found.setdefault(storage_id(tensor), StorageWeakRef(tensor.untyped_storage()))
    return found


class Writes:
    """The tensors that the ops of one capture write into, and that are older than it.

    Attributes:
        older: one tensor for each such memory.

    Args:
        held: the numbers of all older memory, where not all that is made shows: compiled code takes
            memory past all dispatch, and what an op writes there would seem to be older.
    """

    def __init__(self, held: Container[int] | None = None) -> None:
        self._held = held
        self._made: set[int] = set()
        self._older: dict[int, Tensor] = {}

    @property
    def older(self) -> list[Tensor]:
        return list(self._older.values())

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take one op, after it has run."""
        inputs = {storage_id(t) for t in tensors_in(args, kwargs)}
        for tensor in written_by(func, args, kwargs):
            key = storage_id(tensor)
            if key in self._made or (self._held is not None and key not in self._held):
                continue
            if key not in self._older:
                self._older[key] = tensor.detach()
        made = {storage_id(t) for t in tensors_in(result)}
        self._made |= made - inputs - self._older.keys()


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments of an op that it writes into."""
    schema = func._schema
    found: list[Tensor] = []
    if schema.name.startswith(_COLLECTIVES):
        found += tensors_in(args[0])
    undeclared = UNDECLARED_WRITES.get(schema.name, ())
    if schema.is_mutable or undeclared:
        for index, argument in enumerate(schema.arguments):
            declared = argument.alias_info is not None and argument.alias_info.is_write
            if declared or argument.name in undeclared:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                found += tensors_in(value)
    return found
