"""The walk over the leaves of a batch, or of the outputs of a step.

It covers what Lightning can move to a device: tensors in lists, tuples, named tuples, mappings and
dataclasses. An object that hides tensors from the walk is refused, with its path.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cudagraph.errors import AskedFor, BatchError, CaptureError, see
from lightning_cudagraph.tensors.layouts import empty_strided, extent, has_strides, with_lazy_signs
from lightning_cudagraph.tensors.local import is_split

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_Leaves = list[tuple[str, Any]]
# Suffix of the names of compared numbers that the host has computed: they are compared bit for bit.
OF_THE_HOST = ", a number"
# The dtypes in which numbers are compared, by numpy's kinds.
_NUMBERS: dict[str, Any] = {
    "b": np.bool_,
    "i": np.int64,
    "u": np.int64,
    "f": np.float64,
    "c": np.complex128,
}


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def members_of(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """Path and value of each member of a container, or None for a leaf."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return [(f"{path}[{_shown(key, i)}]", value[key]) for i, key in enumerate(value)]
    if _is_namedtuple(value):
        return [(f"{path}.{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"{path}[{i}]", member) for i, member in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _shown(key: Any, place: int) -> str:
    """The text of a key, the same for the same key of the next batch."""
    plain = (*PLAIN, Enum, PurePath, tuple, frozenset)
    return repr(key) if isinstance(key, plain) else f"<{type(key).__qualname__}, key {place}>"


def _rebuild(value: Any, members: list[Any]) -> Any:
    """A container of the same type as `value`, with other members."""
    if isinstance(value, MutableMapping):
        # A copy keeps the attributes of a subclass (defaultdict, BatchEncoding).
        new = copy.copy(value)
        for key, member in zip(list(value), members, strict=True):
            original = value[key]
            new[key] = member
            if value[key] is not original:
                value[key] = original
                raise BatchError(
                    f"The batch holds a `{type(value).__qualname__}` that cannot be copied with other"
                    " items: its shallow copy shares them with the original.",
                    "Give the class a `__copy__`, or pass a plain dictionary.",
                )
        return new
    if isinstance(value, Mapping):
        return type(value)(dict(zip(value, members, strict=True)))  # type: ignore[call-arg]
    if _is_namedtuple(value):
        return type(value)(*members)
    if isinstance(value, (list, tuple)):
        if type(value) in (list, tuple):
            return type(value)(members)
        raise BatchError(
            f"The batch holds a `{type(value).__qualname__}`, a subclass of"
            f" `{'list' if isinstance(value, list) else 'tuple'}` that may be made in its own way.",
            "Pass a plain list or tuple.",
        )
    new = copy.copy(value)
    for field, member in zip(dataclasses.fields(value), members, strict=True):
        object.__setattr__(new, field.name, member)  # frozen dataclasses too
    return new


def flatten_batch(batch: Any) -> _Leaves:
    """The leaves of a batch with their paths, depth first, in a fixed order.

    Returns:
        Pairs of path, such as ``batch['image'][0]``, and leaf.
    """
    leaves: _Leaves = []
    _add_leaves(batch, "batch", leaves)
    return leaves


# Not a nested function: a recursive closure is a reference cycle, and would hold the leaves, and with
# them the autograd graph of a step, until the next garbage collection.
def _add_leaves(value: Any, path: str, leaves: _Leaves) -> None:
    children = members_of(value, path)
    if children is None:
        leaves.append((path, value))
        return
    for child_path, child in children:
        _add_leaves(child, child_path, leaves)


def structure_of(value: Any) -> Any:
    """The types and keys of the containers of a batch, as one comparable value."""
    children = members_of(value, "")
    if children is None:
        return None
    keys: Any = len(children)
    if isinstance(value, Mapping):
        keys = tuple((type(key), comparable(key)) for key in value)
    return (type(value), keys, tuple(structure_of(child) for _, child in children))


def map_leaves(value: Any, new_leaf: Callable[[Any], Any]) -> Any:
    """Copy containers, with `new_leaf(leaf)` for each leaf."""
    children = members_of(value, "")
    if children is None:
        return new_leaf(value)
    return _rebuild(value, [map_leaves(child, new_leaf) for _, child in children])


def copied_leaf(leaf: Any) -> Any:
    """Copy a tensor with its strides and alignment, so that kernels sum over it in the same order."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not has_strides(leaf) or leaf.numel() == 0 or is_split(type(leaf)):
        return leaf.clone()
    return with_lazy_signs(_copied_memory(with_lazy_signs(leaf, leaf)), leaf)


def _copied_memory(leaf: Tensor) -> Tensor:
    if leaf.is_contiguous() and leaf.storage_offset() == 0:
        return leaf.clone()
    size, stride = leaf.shape, leaf.stride()
    flat = (extent(size, stride),), (1,)
    memory = empty_strided(*flat, leaf).copy_(leaf.as_strided(*flat))
    return memory.as_strided(size, stride, memory.storage_offset())


def comparable(value: Any) -> Any:
    """A form of a value for comparisons: it tells 0.0 from -0.0, and has no `__eq__` of the user's."""
    if isinstance(value, np.generic):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, PurePath):
        return str(value)  # those of Windows ignore the case
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, complex):
        return complex.__repr__(value)
    if type(value) is not str and isinstance(value, str):
        return str.__str__(value)
    if type(value) not in (int, bool) and isinstance(value, int):
        return int.__int__(value)
    return value


def refuse_hidden_tensors(tree: Any, what: str) -> None:
    """Refuse a tree with tensors that the walk misses, in attributes of leaves or containers."""

    def walk(value: Any, path: str) -> None:
        children = members_of(value, path)
        if isinstance(value, PLAIN):
            return
        is_plain = type(value) in (list, tuple, dict) or (isinstance(value, Tensor) and not vars(value))
        if not is_plain and (hidden := _hides_tensor(value, walked=children is not None)):
            raise BatchError(
                f"`{path}` is a `{type(value).__qualname__}`, which holds a tensor at `{path}{hidden}`;"
                " expected tensors in lists, tuples, named tuples, mappings or dataclasses.",
                "Pass the tensors beside it."
                if isinstance(value, Tensor)
                else "Make the class a dataclass, or pass the tensors beside it.",
            )
        for child_path, child in children or ():
            walk(child, child_path)

    walk(tree, what)


# What to do instead of `retain_grad()`.
KEEP_GRADIENT = (
    "Keep the gradient by a hook in its place, `h.register_hook(lambda grad: setattr(self, 'grad_of_h',"
    " grad))`, and read it in `on_train_batch_end`." + see("kept_tensors")
)


def retains_gradient(what: str) -> CaptureError:
    """The error for a tensor that has a gradient which the one of a replay does not have."""
    error = CaptureError(what, KEEP_GRADIENT)
    error.subject = AskedFor("retain_grad")
    return error


def has_gradient(tensor: Tensor) -> bool:
    """True for a tensor with a gradient that a copy of it does not have."""
    return tensor.retains_grad or (tensor.is_leaf and tensor.grad is not None)


def refuse_odd_outputs(tree: Any, what: str) -> None:
    """Refuse outputs of a step that a replay cannot return.

    Raises:
        BatchError: for an object that hides tensors, and for a leaf that is neither a tensor nor an
            immutable value: each replay would return the object of the captured step, which may have
            been changed or used up since.
        CaptureError: for a tensor that retains its gradient.
    """
    refuse_hidden_tensors(tree, what)
    for path, leaf in flatten_batch(tree):
        if not isinstance(leaf, (Tensor, *PLAIN, Enum, PurePath, range, slice, np.generic)):
            raise BatchError(
                f"{what}{path.removeprefix('batch')} is a `{type(leaf).__qualname__}`, and every replay"
                " would return that of the captured step; expected tensors and plain values in lists,"
                " tuples, named tuples, mappings or dataclasses.",
                "Return a list of tensors, or make the object in `on_train_batch_end`.",
            )
        if isinstance(leaf, Tensor) and leaf.retains_grad:
            raise retains_gradient(
                f"{what}{path.removeprefix('batch')} retains its gradient (`retain_grad()`), which the"
                " tensor that a replay returns does not have."
            )


def compared_outputs(returned: Any, what: str) -> dict[str, Tensor]:
    """The outputs of a step that a check compares: tensors, and Python numbers as tensors.

    Returns:
        Tensors by name, such as ``the output['image'][0]``, in the order of `flatten_batch`. Sparse,
        nested and meta tensors are left out.
    """
    found: dict[str, Tensor] = {}
    for path, leaf in flatten_batch(returned):
        name = f"{what}{path.removeprefix('batch')}"
        if isinstance(leaf, (int, float, complex, np.generic)):
            number = np.asarray(leaf)
            if kind := _NUMBERS.get(number.dtype.kind):
                found[name + OF_THE_HOST] = torch.from_numpy(number.astype(kind))
        elif isinstance(leaf, Tensor) and _is_whole(leaf):
            found[name] = leaf
    return found


def _is_whole(tensor: Tensor) -> bool:
    return has_strides(tensor) and not tensor.is_meta


def _hides_tensor(value: Any, depth: int = 3, walked: bool = False) -> str | None:
    """The attribute path to a tensor in an object that the walk does not see; None if there is none."""
    if depth == 0:
        return None
    members = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                members[name] = getattr(value, name)
    if walked:
        seen = {id(leaf) for _, leaf in flatten_batch(value) if isinstance(leaf, Tensor)}
    else:
        seen = set()
    for name, member in members.items():
        for path, leaf in flatten_batch(member):
            inner = path.removeprefix("batch")
            if isinstance(leaf, Tensor):
                if id(leaf) not in seen:
                    return f".{name}{inner}"
            elif not isinstance(leaf, PLAIN) and (below := _hides_tensor(leaf, depth - 1)):
                return f".{name}{inner}{below}"
    return None
