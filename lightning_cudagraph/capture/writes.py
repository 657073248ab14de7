"""Which tensors an op writes into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

__all__ = ["Writes", "storage_id", "whole", "written_by"]

# Schemas lie. These write running statistics without saying so: arguments 3 and 4
# (aten/src/ATen/native/native_functions.yaml, `native_batch_norm` and its backends' forms).
_RUNNING_STATISTICS = frozenset(
    {
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
    }
)
# This one draws from a state of cuDNN's own, which moves on with each forward pass
# (aten/src/ATen/native/cudnn/RNN.cpp, `DropoutState`).
_DROPOUT_STATE = ("aten::_cudnn_rnn", "dropout_state")
# Collectives declare nothing; what they write is their first argument
# (torch/csrc/distributed/c10d/Ops.cpp).
_COLLECTIVES = "c10d::"


def storage_id(tensor: Tensor) -> int:
    """A number for the memory that a tensor lies in; not used twice while that lives."""
    return int(tensor.untyped_storage()._cdata)


def whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in, in its dtype."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


class Writes:
    """The tensors that the ops of one capture write into, and that are older than it.

    Attributes:
        older: one tensor for each such memory.
    """

    def __init__(self) -> None:
        self._made: set[int] = set()
        self._older: dict[int, Tensor] = {}

    @property
    def older(self) -> list[Tensor]:
        return list(self._older.values())

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take one op, after it has run."""
        inputs = {storage_id(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in written_by(func, args, kwargs):
            key = storage_id(tensor)
            if key not in self._made and key not in self._older:
                self._older[key] = tensor.detach()
        made = {storage_id(t) for t in tree_iter(result) if isinstance(t, Tensor)}
        self._made |= made - inputs - self._older.keys()


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments of an op that it writes into."""
    found: list[Any] = []
    if func._schema.name in _RUNNING_STATISTICS:
        found += [t for t in args[1:] if isinstance(t, Tensor) and not t.requires_grad]
    if func._schema.name.startswith(_COLLECTIVES):
        found += tree_iter(args[0])
    if func._schema.is_mutable or func._schema.name == _DROPOUT_STATE[0]:
        for index, argument in enumerate(func._schema.arguments):
            known = (func._schema.name, argument.name) == _DROPOUT_STATE
            if known or (argument.alias_info is not None and argument.alias_info.is_write):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                found += tree_iter(value)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
