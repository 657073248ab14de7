"""Values that the host can know while a step is captured, because nothing of the step is in them.

`nn.Transformer` asks whether the mask that it is given is the causal one, and reads the answer back to
the host. If the mask is made of ones and zeros inside the step, the answer is the same in every step,
and does not need the device: the few ops that such values come from are done on the CPU beside the
capture. Only ops whose results are exact take part, so that it does not matter where they are done.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_cudagraph.capture.writes import storage_id, written_by

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
# A mask of a long sequence; what is larger is rather data than a constant.
_MAX_ELEMENTS = 1 << 24


class KnownValues:
    """What is known of the tensors that were made in one capture."""

    def __init__(self) -> None:
        # By the number of the tensor, which may come again when it is gone.
        self._known: dict[int, tuple[ref[Tensor], int, Tensor]] = {}

    def read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The number that an op would read back to the host, or None if it is not known."""
        if func._schema.name not in _READS:
            return None
        known = self._of(args[0])
        return None if known is None else func(known)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take one op, after it has run."""
        if func._schema.is_mutable:
            self._forget({storage_id(tensor) for tensor in written_by(func, args, kwargs)})
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
        self._known[id(result)] = (ref(result), storage_id(result), func(*args, **kwargs))

    def same(self, copy: Tensor, original: Tensor) -> None:
        """Of a copy, as much is known as of its original."""
        if (known := self._of(original)) is not None:
            known = known.to(copy.dtype).expand(copy.shape)
            self._known[id(copy)] = (ref(copy), storage_id(copy), known)

    def _of(self, tensor: Tensor) -> Tensor | None:
        found = self._known.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor else None

    def _forget(self, storages: set[int]) -> None:
        if self._known:
            self._known = {n: held for n, held in self._known.items() if held[1] not in storages}


def _is_rounded(func: Any, result: Tensor) -> bool:
    """Whether the numbers are computed, and can come out differently on another device."""
    return func._schema.name == "aten::arange" and result.dtype.is_floating_point
