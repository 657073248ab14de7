"""Batches: the walk over their leaves, and their signatures.

A batch that differs from the captured one in anything but tensor values has another signature, and is
never copied into its static buffers (`static.py`): `copy_` would silently broadcast it.

The walk covers what Lightning can move to a device: tensors in lists, tuples, named tuples, mappings and
dataclasses. An object that hides tensors from the walk is refused, with its path.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cudagraph.errors import BatchError
from lightning_cudagraph.tensors.host_values import HostReads, held, is_host_value

__all__ = [
    "OF_THE_HOST",
    "PLAIN",
    "Signature",
    "comparable",
    "compared_outputs",
    "copied_leaf",
    "flatten_batch",
    "map_leaves",
    "refuse_hidden_tensors",
    "refuse_odd_outputs",
    "structure_of",
]

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
# Elements; kernels read several at once if the address is aligned to as many.
_ALIGNED = 16


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _children(value: Any, path: str) -> list[tuple[str, Any]] | None:
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

    Args:
        batch: any nesting of lists, tuples, named tuples, mappings and dataclasses.

    Returns:
        Pairs of path, such as ``batch['image'][0]``, and leaf.
    """
    leaves: _Leaves = []
    _add_leaves(batch, "batch", leaves)
    return leaves


# Not a nested function: a recursive closure is a reference cycle, and would hold the leaves, and with
# them the autograd graph of a step, until the next garbage collection.
def _add_leaves(value: Any, path: str, leaves: _Leaves) -> None:
    children = _children(value, path)
    if children is None:
        leaves.append((path, value))
        return
    for child_path, child in children:
        _add_leaves(child, child_path, leaves)


def structure_of(value: Any) -> Any:
    """The types and keys of the containers of a batch, as one comparable value."""
    children = _children(value, "")
    if children is None:
        return None
    keys: Any = len(children)
    if isinstance(value, Mapping):
        keys = tuple((type(key), comparable(key)) for key in value)
    return (type(value), keys, tuple(structure_of(child) for _, child in children))


def map_leaves(value: Any, new_leaf: Callable[[Any], Any]) -> Any:
    """Copy containers, with `new_leaf(leaf)` for each leaf."""
    children = _children(value, "")
    if children is None:
        return new_leaf(value)
    return _rebuild(value, [map_leaves(child, new_leaf) for _, child in children])


def copied_leaf(leaf: Any) -> Any:
    """Copy a tensor with its strides and alignment, so that kernels sum over it in the same order."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout is not torch.strided or leaf.numel() == 0:
        return leaf.clone()
    shift = leaf.storage_offset() % _ALIGNED
    if leaf.is_contiguous() and shift == 0:
        return leaf.clone()
    size, stride = leaf.shape, leaf.stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + shift
    memory = leaf.as_strided((extent,), (1,), leaf.storage_offset() - shift)
    return memory.clone().as_strided(size, stride, shift)


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
    """Refuse a tree with tensors that the walk misses, in attributes of leaves or containers.

    Raises:
        BatchError: naming the path and the type of the object.
    """

    def walk(value: Any, path: str) -> None:
        children = _children(value, path)
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


def refuse_odd_outputs(tree: Any, what: str) -> None:
    """Refuse outputs of a step that a replay cannot return.

    Raises:
        BatchError: for an object that hides tensors, and for a leaf that is neither a tensor nor an
            immutable value: each replay would return the object of the captured step, which may have
            been changed or used up since.
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


def compared_outputs(returned: Any, what: str) -> dict[str, Tensor]:
    """The outputs of a step that a check compares: tensors, and Python numbers as tensors.

    Args:
        returned: the outputs.
        what: prefix of the names.

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
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


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


def _values_beside(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The plain values in attributes of containers and tensors, which are neither items nor fields.

    Attributes that cannot be compared, such as the encodings of a tokenizer, are left out: a replay uses
    those of the captured batch.
    """
    children = _children(value, path)
    if children is None and not isinstance(value, Tensor):
        return
    if isinstance(value, (list, tuple)):  # subclasses are refused
        for child_path, child in children or ():
            yield from _values_beside(child, child_path)
        return
    walked = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for name, member in getattr(value, "__dict__", {}).items():
        if name not in walked:
            for inner, leaf in flatten_batch(member):
                if isinstance(leaf, (*PLAIN, np.ndarray, np.generic, Enum, PurePath, range)):
                    yield f"{path}.{name}{inner.removeprefix('batch')}", leaf
    for child_path, child in children or ():
        yield from _values_beside(child, child_path)


class Signature:
    """The properties of a batch that a graph is specialised on, as one comparable, hashable value.

    Containers by type, keys and plain values of their attributes; tensors by shape, stride, dtype,
    device, plain values of their attributes, and identity with each other; other leaves by value,
    because a capture freezes them. Of two signatures, host values are compared that captured steps have
    read by then: equality gets stricter with each read, and the hash stays the same.

    Args:
        batch: the batch to describe.
        device: the device of the training step; a tensor elsewhere would be read by the host.
        specialization: further values that are part of the signature, by names for the user.
        reads: the host values that captured steps read; None if all are part of the signature. An
            attribute too.

    Raises:
        BatchError: for an object that hides tensors, a tensor on another device, and one that requires
            a gradient.
    """

    __slots__ = ("_counted", "_hash", "_key", "_paths", "_values", "reads")

    def __init__(
        self,
        batch: Any,
        device: torch.device,
        specialization: Mapping[str, Hashable] | None = None,
        reads: HostReads | None = None,
    ) -> None:
        described: list[Any] = []
        values: dict[str, Any] = {}
        paths: list[str] = []
        first_seen: dict[int, int] = {}
        refuse_hidden_tensors(batch, "batch")
        for position, (path, leaf) in enumerate(flatten_batch(batch)):
            paths.append(path)
            leaf = held(leaf)  # of a static batch
            if isinstance(leaf, Tensor):
                self._check_tensor(path, leaf, device)
                same_as = first_seen.setdefault(id(leaf), position)
                described.append(
                    (
                        tuple(leaf.shape),
                        leaf.stride(),
                        leaf.dtype,
                        leaf.device.type,
                        same_as,
                    )
                )
            elif reads is not None and is_host_value(leaf):
                described.append((type(leaf),))
                values[path] = (type(leaf), self._value_of(path, leaf))
            else:
                described.append((type(leaf), self._value_of(path, leaf)))
        for path, leaf in _values_beside(batch, "batch"):
            paths.append(path)
            described.append((type(leaf), self._value_of(path, leaf)))
        for name, value in (specialization or {}).items():
            paths.append(name)
            described.append((type(value), value))
        self._key = (structure_of(batch), tuple(described))
        self._paths = tuple(paths)
        self.reads, self._values = reads, values
        self._counted: tuple[Any, tuple[Any, ...]] = (None, ())
        try:
            self._hash = hash(self._key)
        except TypeError:
            # A leaf that can be compared and not hashed.
            self._hash = hash(self._key[0])

    @staticmethod
    def _check_tensor(path: str, leaf: Tensor, device: torch.device) -> None:
        if leaf.device.type != device.type:
            raise BatchError(
                f"`{path}` is on {leaf.device} and the training step on {device}: its values would be"
                " read by the host, once, at capture.",
                f"Move it to {device.type} with the batch.",
            )
        if type(leaf) not in (Tensor, torch.nn.Parameter):
            raise BatchError(
                f"`{path}` is a `{type(leaf).__qualname__}`, a subclass of `torch.Tensor`; expected a"
                " plain tensor, since its static buffer would be one.",
                "Pass `tensor.as_subclass(torch.Tensor)`.",
            )
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise BatchError(
                f"`{path}` is a tensor of layout {leaf.layout}, and only strided tensors have static"
                " buffers.",
                "Pass its indices and values as strided tensors.",
            )
        if leaf.requires_grad:
            raise BatchError(
                f"`{path}` requires a gradient; a graph reads a copy of it, and the gradient would end"
                " there.",
                "Pass `tensor.detach()`, and call `requires_grad_()` in the step, or compute it in"
                " the step.",
            )

    @staticmethod
    def _value_of(path: str, leaf: Any) -> Any:
        if isinstance(leaf, PLAIN) and not isinstance(leaf, Enum):
            if not (beside := getattr(leaf, "__dict__", None)):
                return comparable(leaf)
            state = [
                (name, type(v), Signature._value_of(f"{path}.{name}", v)) for name, v in beside.items()
            ]
            return (comparable(leaf), *state)
        if isinstance(leaf, PurePath):
            return comparable(leaf)
        if isinstance(leaf, (np.ndarray, np.generic)):
            # Arrays compare element by element; their bytes compare as one value.
            return (str(leaf.dtype), leaf.shape, leaf.tobytes())
        if isinstance(leaf, (set, frozenset)) and all(isinstance(x, PLAIN) for x in leaf):
            return frozenset((type(x), comparable(x)) for x in leaf)
        if isinstance(leaf, slice):
            ends = (leaf.start, leaf.stop, leaf.step)
            return tuple((type(end), Signature._value_of(path, end)) for end in ends)
        if isinstance(leaf, (Enum, range)):
            return leaf
        raise BatchError(
            f"`{path}` is a `{type(leaf).__qualname__}`, whose value cannot be compared from batch to"
            " batch; a graph would keep the one of the captured batch.",
            "Pass what the step needs of it as tensors or plain Python values.",
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Signature)
            and self._hash == other._hash
            and self._values_read() == other._values_read()
            and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def _values_read(self) -> tuple[Any, ...]:
        """The host values that count now."""
        if self.reads is None or not self._values:
            return ()
        version, counted = self._counted
        if version != self.reads.version:
            counts = self.reads.counts
            counted = tuple(value for path, value in self._values.items() if counts(path, value[0]))
            self._counted = self.reads.version, counted
        return counted

    def _described(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The paths and properties of all leaves, with the host values that count now."""
        reads = self.reads
        return [
            (path, self._values[path])
            if len(leaf) == 1 and reads is not None and reads.counts(path, leaf[0])
            else (path, leaf)
            for path, leaf in zip(self._paths, self._key[1], strict=True)
        ]

    def sizes(self) -> dict[tuple[str, int | None], Any]:
        """The sizes of tensors by path and dimension, and host values that count by path and None."""
        reads, found = self.reads, dict[tuple[str, int | None], Any]()
        for path, leaf in zip(self._paths, self._key[1], strict=True):
            if len(leaf) > 2:
                found |= {(path, dimension): size for dimension, size in enumerate(leaf[0])}
            elif len(leaf) == 1 and reads is not None and reads.counts(path, leaf[0]):
                found[path, None] = self._values[path]
        return found

    def difference(self, other: Signature) -> str:
        """Describe the first difference of `other` from this one: the leaf, expected and found."""
        if self._key[0] != other._key[0]:
            return f"containers changed: expected {len(self._paths)} leaves of the captured structure"
        for (path, mine), (_, theirs) in zip(self._described(), other._described(), strict=True):
            if mine != theirs:
                if len(mine) > 2 and mine[:-1] == theirs[:-1]:
                    one, other_one = self._same_as(mine, path), self._same_as(theirs, path)
                    return f"`{path}` changed: expected {one}, found {other_one}"
                where = "" if self.reads is None else self.reads.described(path)
                return f"`{path}`{where} changed: expected {_in_words(mine)}, found {_in_words(theirs)}"
        return "nothing changed"

    def _same_as(self, described: tuple[Any, ...], path: str) -> str:
        first = self._paths[described[-1]]
        return "a tensor of its own" if first == path else f"the same tensor as `{first}`"

    def __str__(self) -> str:
        return ", ".join(f"{path} {_in_words(leaf)}" for path, leaf in self._described())


def _in_words(described: tuple[Any, ...]) -> str:
    if len(described) == 1:
        return f"a {described[0].__qualname__} that the step does not read"
    if len(described) == 2:
        kind, value = described
        return str(value) if issubclass(kind, (float, complex)) else repr(value)
    shape, stride, dtype, device, _ = described
    return f"{shape} {str(dtype).removeprefix('torch.')} {device} with strides {stride}"
