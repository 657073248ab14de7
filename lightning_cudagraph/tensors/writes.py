"""Writes of ops: the arguments that an op writes into, and those of a whole capture."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_cudagraph.tensors.local import local

# Arguments that ops write although their schemas do not declare it. The test of `accesses` compares each
# op's writes with its schema, and finds those that are missing here.
_RUNNING_STATISTICS = ("running_mean", "running_var")
UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    # aten/src/ATen/native/native_functions.yaml, `native_batch_norm` and its backends' forms.
    "aten::native_batch_norm": _RUNNING_STATISTICS,
    "aten::cudnn_batch_norm": _RUNNING_STATISTICS,
    "aten::miopen_batch_norm": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": _RUNNING_STATISTICS,
    "aten::batch_norm_update_stats": _RUNNING_STATISTICS,
    # cuDNN may write into the memory that the forward pass has saved.
    "aten::cudnn_batch_norm_backward": ("reserveSpace",),
    # These draw from a random state of cuDNN, which advances with each pass
    # (aten/src/ATen/native/cudnn/RNN.cpp, `DropoutState`).
    "aten::_cudnn_rnn": ("dropout_state",),
    # The backward pass works in the memory that the forward pass has saved.
    "aten::_cudnn_rnn_backward": ("dropout_state", "reserve"),
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
    # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
# Collectives declare no writes; they write their first argument
# (torch/csrc/distributed/c10d/Ops.cpp).
_COLLECTIVES = "c10d::"


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among the arguments or results of an op: single, or in lists.

    The same as pytrees find, without the function calls for each leaf, each of which the audit of a
    capture looks at: fits of a small model on the emulator took 84 to 100 ms with pytrees, and 64 to 77
    so.

    It runs for each op, and knows no other containers, nor one that contains itself: with these, as the
    hooks on layers need it (`timing/layers/layer_marks.py`), it took 2.4 to 2.9 times as long. Captured
    modules take the leaves of a batch, each once, because others are put in their places. Rebound
    attributes are tensors and tuples of them, or none.
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


def has_memory(leaf: Any) -> bool:
    """True for a strided tensor; sparse ones, which no graph can hold, have no storage."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def storage_id(tensor: Tensor) -> int:
    """An id of the storage of a tensor, unique while the storage lives."""
    return int(local(tensor).untyped_storage()._cdata)


# The number of tensors and other objects that refer to the storage with this id, if torch can tell.
users_of: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def whole(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as a flat tensor of its dtype."""
    part = local(tensor)
    flat = torch.empty(0, dtype=part.dtype, device=part.device)
    return flat.set_(part.untyped_storage())


def storages_held() -> dict[int, StorageWeakRef]:
    """The storages of all Python tensors, by id; no id is used again while the result is kept."""
    found: dict[int, StorageWeakRef] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in (each for each in gc.get_objects() if issubclass(type(each), Tensor)):
            # Tensors without a storage (sparse ones, wrappers) raise.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                found.setdefault(storage_id(tensor), StorageWeakRef(tensor.untyped_storage()))
    return found


class Writes:
    """The tensors older than a capture that its ops write into.

    Args:
        held: ids of all older storages. Needed with compiled code, which allocates without the
            dispatcher, so that its memory would seem to be older.
    """

    def __init__(self, held: Container[int] | None = None) -> None:
        self._held = held
        self._made: set[int] = set()
        self._older: dict[int, Tensor] = {}

    @property
    def older(self) -> list[Tensor]:
        return list(self._older.values())

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an op that has run."""
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
