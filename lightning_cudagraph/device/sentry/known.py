"""Values that the host can know while a step is captured, because nothing of the step is in them.

`nn.Transformer` asks whether the mask that it is given is the causal one, and reads the answer back to
the host. If the mask is made of ones and zeros inside the step, the answer is the same in every step,
and does not need the device: the few ops that such values come from are done on the CPU beside the
capture. Only ops whose results are exact take part, so that it does not matter where they are done.

Nothing in Python's memory says what a tensor on the device holds, so that no comparison of objects and
of ops can answer in its place.

Only torch's own layers are answered. A branch in the user's code is refused as ever: what writes into a
tensor without an op (a kernel of an extension, given its address) is not seen here, and a mask for a
layer is the last place where somebody would do so. Of a tensor whose address Python has asked for,
nothing is known any more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_cudagraph.compat.names.torch_names import tree_iter, tree_map_only
from lightning_cudagraph.tensors.writes import storage_id, written_by

__all__ = ["KnownValues"]

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
_READS = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"})
_LAYERS = "torch.nn."
_WRAPPERS = ("torch._compile", "torch._dynamo.", "torch._ops")
_MODES = frozenset({"__torch_dispatch__", "__torch_function__"})
# A mask of a long sequence; what is larger is rather data than a constant.
_MAX_ELEMENTS = 1 << 24


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where the numbers of a tensor lie in its storage; `tensor.data = ...` changes it without an op."""
    return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


@dataclass
class _Shadow:
    """What is known of one tensor.

    Attributes:
        tensor: which one.
        storage: its memory, so that no other can come in its place unseen.
        place: where it lies in that.
        value: the same on the CPU.
    """

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
    """What is known of the tensors that were made in one capture."""

    def __init__(self) -> None:
        # By the number of the tensor, which may come again when it is gone.
        self._known: dict[int, _Shadow] = {}

    def read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The number that an op would read back to the host, or None if it is not known."""
        if func._schema.name not in _READS or not _is_asked_by_a_layer():
            return None
        known = self._of(args[0])
        return None if known is None else func(known)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take one op, after it has run."""
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
        """Of a copy, as much is known as of its original."""
        if (known := self._of(original)) is not None:
            self._known[id(copy)] = _Shadow.of(copy, known.to(copy.dtype).expand(copy.shape))

    def give_out(self, tensor: Tensor) -> None:
        """Somebody is told the address of a tensor, and can write there unseen."""
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
    """Whether the op now being dispatched was called in a layer of torch's own."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        # Modes are called in the middle of everything, and Dynamo wraps them so as not to look inside.
        if frame.f_code.co_name not in _MODES and not module.startswith(_WRAPPERS):
            return module.startswith(_LAYERS)
        frame = frame.f_back
    return False


def _is_rounded(func: Any, result: Tensor) -> bool:
    """Whether the numbers are computed, and can come out differently on another device."""
    return func._schema.name == "aten::arange" and result.dtype.is_floating_point
