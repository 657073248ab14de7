"""Constant propagation in a capture, for host reads in torch's own layers.

`nn.Transformer` checks if its mask is the causal one, and reads the result back to the host. If the step
makes the mask of ones and zeros, the result is the same in every step and does not need the device: the
few ops that make such tensors are repeated on the CPU during the capture. Only ops with exact results
take part, so that the device makes no difference.

Only reads by torch's own layers are answered; a branch in the user's code is refused as always: a write
without an op (by an extension's kernel, given the address) is not seen here, and a mask of a layer is
the least likely tensor to be written so. A tensor is no longer known once Python has asked for its
address.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.compat.names.torch_names import tree_iter, tree_map_only
from lightning_cudagraph.device.lines.user_lines import DYNAMO, MODES
from lightning_cudagraph.tensors.writes import storage_id, written_by

_MAKES = "ones zeros full eye arange scalar_tensor"
_LIKE = "ones_like zeros_like full_like new_ones new_zeros new_full"
_SHAPES = """
    view _unsafe_view expand slice select unsqueeze squeeze transpose permute t clone detach alias
    _to_copy cat stack triu tril diagonal
"""
_LOGIC = """
    eq ne lt le gt ge all any logical_not logical_and logical_or logical_xor bitwise_not bitwise_and
    bitwise_or bitwise_xor masked_fill where isinf isnan
"""
_EXACT = frozenset(f"aten::{name}" for name in f"{_MAKES} {_LIKE} {_SHAPES} {_LOGIC}".split())
# Reads of one value of a tensor.
READS = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"})
_LAYERS = "torch.nn."
# torch calls modes anywhere, and Dynamo wraps them so as not to trace them.
WRAPPERS = (*DYNAMO, "torch._ops")
# A mask of a long sequence; larger tensors are rather data than constants.
_MAX_ELEMENTS = 1 << 24


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The layout of a tensor in its storage, which `tensor.data = ...` changes without an op."""
    return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


@dataclass
class _Shadow:
    """The known value of one tensor, with its storage, which may be exchanged, and its place there."""

    tensor: ref[Tensor]
    storage: StorageWeakRef
    place: tuple[Any, ...]
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor, value: Tensor) -> _Shadow:
        return cls(ref(tensor), StorageWeakRef(tensor.untyped_storage()), _place(tensor), value)

    def is_of(self, tensor: Tensor) -> bool:
        return (
            self.tensor() is tensor
            and not self.storage.expired()
            and self.storage.cdata == storage_id(tensor)
            and self.place == _place(tensor)
        )


class KnownValues:
    """The known values of tensors that were made in one capture."""

    def __init__(self) -> None:
        # By id, which another tensor may have once this one is gone: see `_Shadow.is_of`.
        self._known: dict[int, _Shadow] = {}

    def read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The number that an op would read back to the host; None if it is unknown."""
        if func._schema.name not in READS or not _is_asked_by_a_layer():
            return None
        known = self._of(args[0])
        return None if known is None else func(known)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        written = written_by(func, args, kwargs)
        if written or func._schema.is_mutable:
            self._forget({*map(storage_id, written)})
            return
        if func._schema.name not in _EXACT or not isinstance(result, Tensor):
            return
        if result.numel() > _MAX_ELEMENTS or _is_rounded(func, result):
            return
        if any(self._of(leaf) is None for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)):
            return
        args, kwargs = tree_map_only(Tensor, self._of, (args, kwargs))
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        self._known[id(result)] = _Shadow.of(result, func(*args, **kwargs))

    def same(self, copy: Tensor, original: Tensor) -> None:
        """Give a copy the known value of its original."""
        if (known := self._of(original)) is not None:
            self._known[id(copy)] = _Shadow.of(copy, known.to(copy.dtype).expand(copy.shape))

    def give_out(self, tensor: Tensor) -> None:
        """Forget a tensor whose address is given to code that may write there unseen."""
        self._forget({storage_id(tensor)})

    def _of(self, tensor: Tensor) -> Tensor | None:
        found = self._known.get(id(tensor))
        return found.value if found is not None and found.is_of(tensor) else None

    def _forget(self, storages: set[int]) -> None:
        if self._known:
            self._known = {
                n: held for n, held in self._known.items() if held.storage.cdata not in storages
            }


def _is_asked_by_a_layer() -> bool:
    """True if the op being dispatched was called by one of torch's own layers."""
    for frame in frames(sys._getframe(2)):
        module = module_of(frame)
        if frame.f_code.co_name not in MODES and not module.startswith(WRAPPERS):
            return module.startswith(_LAYERS)
    return False


def _is_rounded(func: Any, result: Tensor) -> bool:
    """True if the values are rounded, and so may differ between devices."""
    return func._schema.name == "aten::arange" and result.dtype.is_floating_point
