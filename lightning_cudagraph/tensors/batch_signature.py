"""The signature of a batch: what a graph is specialised on.

A batch that differs from the captured one in anything but tensor values has another signature, and is
never copied into its static buffers (`static.py`): `copy_` would silently broadcast it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cudagraph.errors import AS_NUMBER, BatchError, Location, see
from lightning_cudagraph.tensors.batch import (
    PLAIN,
    comparable,
    flatten_batch,
    members_of,
    refuse_hidden_tensors,
    structure_of,
)
from lightning_cudagraph.tensors.host_values import HostAttribute, HostReads, held, is_host_value
from lightning_cudagraph.tensors.layouts import alignment_bytes

_INSTEAD_OF_VALUES = (
    "What the step reads of numbers and texts has a graph for each value: let there be few, or pass a"
    f" tensor ({AS_NUMBER})."
)
# A path, what counts of its value in words, and the type and a form of it.
_Counted = tuple[str, str, tuple[Any, ...]]


class Signature:
    """The properties of a batch that a graph is specialised on, as one comparable, hashable value.

    Containers by type, keys and plain values of their attributes; tensors by shape, stride, alignment,
    dtype, device, lazy conjugation and negation, class, plain values of their attributes, and identity
    with each other; other leaves by value, because a capture freezes them. Of two signatures, host
    values are compared that captured steps have read by then: equality gets stricter with each read,
    and the hash stays the same.

    Args:
        device: the device of the training step; a tensor elsewhere would be read by the host.
        specialization: further values that are part of the signature, by names for the user.
        reads: what captured steps read of host values; None if all are part of the signature. An
            attribute too.
        numbers: integers beside the batch, by name; what captured steps read of them counts.

    Raises:
        BatchError: for an object that hides tensors, a tensor on another device, and one that requires
            a gradient.
    """

    __slots__ = ("_attributes", "_counted", "_hash", "_key", "_numbers", "_paths", "_values", "reads")

    def __init__(
        self,
        batch: Any,
        device: torch.device,
        specialization: Mapping[str, Hashable] | None = None,
        reads: HostReads | None = None,
        numbers: Mapping[str, int] | None = None,
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
                layout = (tuple(leaf.shape), leaf.stride(), alignment_bytes(leaf))
                kind = (leaf.dtype, leaf.device.type, leaf.is_conj(), leaf.is_neg(), type(leaf))
                described.append((*layout, *kind, same_as))
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
        for name in numbers or ():
            paths.append(name)
            described.append((int,))
        self._key = (structure_of(batch), tuple(described))
        self._paths = tuple(paths)
        self.reads, self._values, self._numbers = reads, values, numbers or {}
        attributes = [] if reads is None else reads.attributes.values()
        self._attributes = {attribute: attribute.read() for attribute in attributes}
        self._counted: tuple[int, list[_Counted]] = (-1, [])
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
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
            kind = f"tensor of layout {leaf.layout}"
            kind = (
                "nested tensor" if leaf.is_nested else "quantized tensor" if leaf.is_quantized else kind
            )
            raise BatchError(
                f"`{path}` is a {kind}, and only plain strided tensors have static buffers.",
                "Pass its parts as strided tensors (indices and values, or padded values and lengths).",
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
            if not (attributes := getattr(leaf, "__dict__", None)):
                return comparable(leaf)
            state = [
                (name, type(v), Signature._value_of(f"{path}.{name}", v))
                for name, v in attributes.items()
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
            and self._what_counts() == other._what_counts()
            and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def _what_counts(self) -> list[_Counted]:
        """The parts of host values that count now."""
        if (reads := self.reads) is None:
            return []
        version, counted = self._counted
        if version != reads.version:
            counted = []
            for path, (kind, value) in self._values.items():
                if reads.counts(path, kind):
                    counted.append((path, path, (kind, value)))
                else:
                    counted += _computed(reads, path, value)
            for name, value in self._numbers.items():
                counted += _computed(reads, name, value)
            for attribute in dict.fromkeys((*self._attributes, *reads.attributes.values())):
                counted.append((attribute.name, attribute.name, self._value_in(attribute)))
            self._counted = reads.version, counted
        return counted

    def _value_in(self, attribute: HostAttribute) -> tuple[type, Any]:
        return self._attributes.get(attribute, attribute.before)

    def agrees(self, numbers: Mapping[str, int]) -> bool:
        """True if all that counts beside a batch, of integers and attributes, is the same as here."""
        reads = self.reads
        if reads is None or not reads.is_any:  # in every replay
            return True
        if any(attribute.read() != self._value_in(attribute) for attribute in reads.attributes.values()):
            return False
        return all(reads.agree(name, value, self._numbers[name]) for name, value in numbers.items())

    def _described(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The paths and properties of all leaves, with what counts now of host values."""
        counted: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}
        for path, text, value in self._what_counts():
            counted.setdefault(path, []).append((text, value))
        leaves = zip(self._paths, self._key[1], strict=True)
        attributes = [] if self.reads is None else self.reads.attributes.values()
        return [
            *(each for path, leaf in leaves for each in counted.get(path, [(path, leaf)])),
            *((each.name, self._value_in(each)) for each in attributes),
        ]

    def sizes(self) -> dict[tuple[str, int | None], Any]:
        """The sizes of tensors by path and dimension, and host values that count by text and None."""
        found: dict[tuple[str, int | None], Any] = {
            (text, None): value for _, text, value in self._what_counts()
        }
        for path, leaf in zip(self._paths, self._key[1], strict=True):
            if len(leaf) > 2:
                found |= {(path, dimension): size for dimension, size in enumerate(leaf[0])}
        return found

    def another(self, other: Signature, word: str) -> str:
        """Describe another signature by its first difference; `word` is what users know it by."""
        return f"another {self.word_for(other, word)}: {self.difference(other)}"

    def word_for(self, other: Signature, word: str) -> str:
        """Return "path" if another signature differs by what the step reads alone, else `word`."""

        def without_path(each: Signature) -> list[_Counted]:
            attributes = [] if each.reads is None else each.reads.attributes.values()
            beside = {*each._numbers, *(attribute.name for attribute in attributes)}
            return [counted for counted in each._what_counts() if counted[0] not in beside]

        is_path = self._key == other._key and without_path(self) == without_path(other)
        return "path" if is_path else word

    def difference(self, other: Signature) -> str:
        """Describe the first difference of `other` from this one: the leaf, expected and found."""
        if self._key[0] != other._key[0]:
            return self._other_containers(other)
        if (first := self._first_difference(other)) is None:
            return "nothing changed"
        path, mine, theirs = first
        if len(mine) > 2 and mine[:-1] == theirs[:-1]:
            one, other_one = self._same_as(mine, path), self._same_as(theirs, path)
            return f"`{path}` changed: expected {one}, found {other_one}"
        where = "" if self.reads is None else self.reads.described(path)
        return f"`{path}`{where} changed: expected {_in_words(mine)}, found {_in_words(theirs)}"

    def line_of_difference(self, other: Signature) -> Location | None:
        """The line that reads the first difference of `other` from this one, if it is a value."""
        if self.reads is None or self._key[0] != other._key[0]:
            return None
        first = self._first_difference(other)
        return None if first is None else self.reads.line_of(first[0])

    def _first_difference(self, other: Signature) -> tuple[str, Any, Any] | None:
        """The first leaf that differs in equal containers: its path, what is expected, and found."""
        for (path, mine), (_, theirs) in zip(self._described(), other._described(), strict=True):
            if mine != theirs:
                return path, mine, theirs
        return None

    def remedy(self, other: Signature) -> str:
        """One thing to do about the first difference of `other` from this one."""
        for (_, mine), (_, theirs) in zip(self._described(), other._described(), strict=False):
            if mine != theirs and len(mine) == len(theirs) == 2:
                return _INSTEAD_OF_VALUES + see("names_in_batches").removesuffix(".")
            is_tensor = len(mine) == len(theirs) > 2
            if is_tensor and mine[:2] == theirs[:2] and mine[2] != theirs[2]:
                return "Pass a copy of the view, which is always aligned: `x.clone()`"
        return "Pad to one shape or a few (`pad_to` of the callback; docs/recipes/buckets.md)"

    def _other_containers(self, other: Signature) -> str:
        """Describe the first difference of containers."""
        # In order, unlike the members of a set.
        mine, theirs = dict.fromkeys(self._paths), dict.fromkeys(other._paths)
        if missing := next((path for path in mine if path not in theirs), ""):
            return f"containers changed: `{missing}` is missing"
        if added := next((path for path in theirs if path not in mine), ""):
            return f"containers changed: `{added}` is new"
        return "containers changed: the same parts are in containers of other types"

    def _same_as(self, described: tuple[Any, ...], path: str) -> str:
        first = self._paths[described[-1]]
        return "a tensor of its own" if first == path else f"the same tensor as `{first}`"

    def __str__(self) -> str:
        return ", ".join(f"{path} {_in_words(leaf)}" for path, leaf in self._described())


def _computed(reads: HostReads, path: str, value: Any) -> Iterator[_Counted]:
    for text, found in reads.computed(path, value):
        yield path, text, (type(found), comparable(found))


def _values_beside(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The plain values in attributes of containers and tensors, which are neither items nor fields.

    Attributes that cannot be compared, such as the encodings of a tokenizer, are left out: a replay uses
    those of the captured batch.
    """
    children = members_of(value, path)
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


def _in_words(described: tuple[Any, ...]) -> str:
    if len(described) == 1:
        return f"a {described[0].__qualname__} that the step does not read"
    if len(described) == 2:
        kind, value = described
        return str(value) if issubclass(kind, (float, complex)) else repr(value)
    shape, stride, past_bytes, dtype, device, is_conj, is_neg, kind, _ = described
    lazily = [word for word, is_so in (("conjugated", is_conj), ("negated", is_neg)) if is_so]
    of_class = "" if kind is Tensor else f" in a `{kind.__qualname__}`"
    signs = f", lazily {' and '.join(lazily)}" if lazily else ""
    address = f", {past_bytes} bytes past an aligned address" if past_bytes else ""
    dtype = str(dtype).removeprefix("torch.")
    return f"{shape} {dtype} {device} with strides {stride}{signs}{address}{of_class}"
