"""Static inputs: the buffers that a graph reads its batches from.

A graph reads fixed addresses. The first batch of a signature determines the shapes of a set of static
buffers; every later batch of that signature is copied into them before the replay. A `HostValue` is the
same for a string or a number: the Python of a later check reads the value of its own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.errors import CaptureError, first_of
from lightning_cudagraph.tensors.batch import PLAIN, comparable, flatten_batch, map_leaves, structure_of
from lightning_cudagraph.tensors.host_values import HostReads, HostValue, held, hold, is_host_value
from lightning_cudagraph.tensors.layouts import (
    alignment_bytes,
    empty_like,
    layout_guard,
    without_repeats,
)
from lightning_cudagraph.tensors.writes import storage_id

_MAX_NAMED = 3


class _Leaf:
    """A fast check that a tensor has the layout of another one, whose device may be of another type."""

    def __init__(self, tensor: Tensor) -> None:
        self._alignment_bytes = alignment_bytes(tensor)
        self._layout = self._layout_of(tensor)
        self._checks: dict[str, Callable[[Tensor], bool] | None] = {}  # by the type of device

    @staticmethod
    def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
        signs = tensor.is_conj(), tensor.is_neg()
        return tensor.shape, tensor.dtype, tensor.stride(), signs, tensor.requires_grad

    def matches(self, value: Tensor, device_type: str, alignment: Callable[[Tensor], int]) -> bool:
        check = self._checks.get(device_type)
        if check is None or not check(value):
            if (
                value.layout is not torch.strided
                or value.device.type != device_type
                or self._layout_of(value) != self._layout
            ):
                return False
            self._checks[device_type] = layout_guard([value])
        return alignment(value) == self._alignment_bytes and not value.__dict__  # quicker than `vars`


class _Pattern:
    """A fast check that a batch has the signature of another one.

    It knows lists, tuples and dictionaries (no subclasses) of Python values and of plain tensors,
    without attributes in Python. A `Signature` knows any batch and names the difference of two, in ten
    times the time.
    """

    def __init__(self, batch: Any, reads: HostReads | None) -> None:
        self._known = True
        self._device_type = ""
        self._seen: set[int] = set()
        self._reads = reads
        self._paths = iter([path for path, _ in flatten_batch(batch)])
        self._root = self._described(batch)

    def _described(self, value: Any) -> tuple[Any, ...]:
        value = held(value)
        kind = type(value)
        if kind is Tensor:
            next(self._paths)
            # One tensor in two places has one buffer: another signature than two tensors.
            self._known &= id(value) not in self._seen and not vars(value)
            self._seen.add(id(value))
            self._device_type = value.device.type
            return (Tensor, _Leaf(value.detach()))
        if kind is list or kind is tuple:
            return (kind, [self._described(member) for member in value])
        if kind is dict:
            self._known &= all(type(key) is str for key in value)  # 1 == 1.0 == True
            return (kind, list(value), [self._described(member) for member in value.values()])
        path = next(self._paths, "")  # of a container in place of a leaf, the pattern is unknown
        self._known &= not hasattr(value, "__dict__")  # a subclass with state of its own
        if self._reads is not None and is_host_value(value):
            return (kind, value, path, self._reads)
        self._known &= kind in PLAIN
        return (kind, comparable(value))

    def leaves(self, batch: Any, device_type: str) -> tuple[list[Tensor], list[Any]] | None:
        """Tensors, all on this type of device, and host values of a batch; None if it is another."""
        found: list[Tensor] = []
        values: list[Any] = []
        alignment = alignment_bytes if device_type == self._device_type else _of_new_memory
        if not (self._known and _matches(self._root, batch, device_type, alignment, found, values)):
            return None
        # One tensor in two places is another signature.
        return (found, values) if len(set(map(id, found))) == len(found) else None


def _of_new_memory(tensor: Tensor) -> int:
    """The alignment of the copy of a tensor that is moved to the device."""
    return 0


def _matches(
    pattern: tuple[Any, ...],
    value: Any,
    device_type: str,
    alignment: Callable[[Tensor], int],
    found: list[Tensor],
    values: list[Any],
) -> bool:
    kind = pattern[0]
    if type(value) is not kind:
        return False
    if kind is Tensor:
        found.append(value)
        return bool(pattern[1].matches(value, device_type, alignment))
    if kind is list or kind is tuple:
        members = value
    elif kind is dict:
        if list(value) != pattern[1]:
            return False
        members = list(value.values())
    elif len(pattern) == 2:
        return bool(comparable(value) == pattern[1])
    else:
        _, expected, path, reads = pattern
        values.append(value)
        if reads.counts(path, kind):
            return bool(comparable(value) == comparable(expected))
        return bool(reads.agree(path, value, expected))
    inner = pattern[-1]
    if len(members) != len(inner):
        return False
    for child, member in zip(inner, members, strict=True):  # quicker than `all`
        if not _matches(child, member, device_type, alignment, found, values):
            return False
    return True


@dataclass(frozen=True)
class BatchChange:
    """The subject of an error for a step that changes its batch.

    Attributes:
        paths: the paths of what the step has taken out of its containers, added or replaced.
    """

    paths: tuple[str, ...] = ()
    written: str = ""


def _changed(what: str, remedy: str, *paths: str) -> CaptureError:
    error = CaptureError(what, remedy)
    error.subject = BatchChange(paths)
    return error


_watched: OfThread[Mapping[int, str]] = OfThread({})


def refuse_writes(written: Iterable[Tensor], refuse: Callable[[CaptureError], None]) -> None:
    """Refuse an op that writes into the batch of the step under way in this thread."""
    paths = _watched.value
    for path in dict.fromkeys(paths[key] for key in map(storage_id, written) if key in paths):
        refuse(_write(path))


def refuse_shared_memory(batch: object, written: Iterable[Tensor]) -> None:
    """Refuse a step that writes memory shared with its batch: a graph reads a copy of the batch."""
    memory = {storage_id(tensor) for tensor in written}
    for path, leaf in flatten_batch(batch) if memory else ():
        if isinstance(leaf, Tensor) and storage_id(leaf) in memory:
            raise CaptureError(
                f"The training step writes into the memory of `{path}` through another tensor; a graph"
                f" reads a copy of `{path}` from before the step.",
                "Pass a copy, `tensor.clone()`, or read in the step the tensor that it writes.",
            )


def _write(path: str) -> CaptureError:
    error = CaptureError(
        f"The training step writes into `{path}` in place.", "Write into a copy: `x = x.clone()`."
    )
    error.subject = BatchChange(written=path)
    return error


def _named(paths: Sequence[str]) -> str:
    return first_of([f"`{path}`" for path in paths], _MAX_NAMED)


def _attributes(tensor: Tensor) -> dict[str, Any]:
    # Torch's compiler keeps notes there.
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_dynamo")}


def dressed(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in the class of another one, with its attributes."""
    found = tensor if type(like) is Tensor else nn.Parameter(tensor, requires_grad=False)
    vars(found).update(vars(like))
    return found


class AliasedBatch:
    """The static batch for one run of the step, in containers and tensor objects of its own.

    So what the step puts into a container or onto a tensor is in no other run, nor in the next capture:
    `x.requires_grad_()`, the gradient that `x` then gets, a hook.

    Args:
        value: returns what the step gets for a leaf that is no tensor.
    """

    def __init__(self, batch: Any, value: Callable[[Any], Any]) -> None:
        aliases: dict[int, Tensor] = {}

        def aliased(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return value(leaf)
            if id(leaf) not in aliases:
                aliases[id(leaf)] = dressed(leaf.detach(), leaf)
            return aliases[id(leaf)]

        self.batch = map_leaves(batch, aliased)
        self._leaves = flatten_batch(self.batch)
        self._structure = structure_of(batch)
        self._aliases = [
            (alias, alias._version, alias.data_ptr(), _attributes(alias)) for alias in aliases.values()
        ]

    def watched(self) -> AbstractContextManager[None]:
        """Let the ops of this thread be refused that write into the batch."""
        paths = {storage_id(leaf): path for path, leaf in self._leaves if isinstance(leaf, Tensor)}
        return setting(_watched, value=paths)

    def refuse_changes(self, written: Sequence[Tensor] = ()) -> None:
        """Refuse a run that has changed the batch, of which hooks would see another than eagerly."""
        if structure_of(self.batch) != self._structure:
            before = [path for path, _ in self._leaves]
            after = [path for path, _ in flatten_batch(self.batch)]
            added = [path for path in after if path not in before]
            taken = [path for path in before if path not in after]
            words = [f"adds {_named(added)} to its batch"] if added else []
            words += [f"takes {_named(taken)} out of its batch"] if taken else []
            raise _changed(
                f"The training step {' and '.join(words) or 'changes the containers of its batch'}.",
                "Copy the container first: `batch = dict(batch)`.",
                *taken,
                *added,
            )
        for (path, alias), (_, leaf) in zip(self._leaves, flatten_batch(self.batch), strict=True):
            if leaf is not alias:
                raise _changed(
                    f"The training step replaces `{path}` in its batch.",
                    f"Give it a name of its own, as in `x = {path}.float()`, or copy the container"
                    " first: `batch = copy.copy(batch)`.",
                    path,
                )
        # Of code that no op shows, such as compiled code; those that bypass autograd raise no version.
        memory = {storage_id(tensor) for tensor in written}
        for alias, version, address, attributes in self._aliases:
            path = next(path for path, leaf in self._leaves if leaf is alias)
            if alias._version != version or storage_id(alias) in memory:
                raise _write(path)
            if alias.data_ptr() != address:
                raise CaptureError(
                    f"The training step gives `{path}` other memory (`.data = ...`).",
                    "Give the result a name of its own: `x = x * 2`.",
                )
            now = _attributes(alias)
            if now.keys() != attributes.keys() or any(now[n] is not attributes[n] for n in now):
                raise CaptureError(
                    f"The training step sets an attribute of `{path}`, which a replay would not do.",
                    "Keep what it computes in a variable, or return it.",
                )


class StaticBatch:
    """A batch whose tensors stay at the same addresses, with the values of `example` at first."""

    def __init__(self, example: Any, reads: HostReads | None = None) -> None:
        buffers: dict[int, Tensor] = {}
        paths = iter([path for path, _ in flatten_batch(example)])
        self._reads = reads
        self._values: list[HostValue] = []
        self._paths: dict[int, str] = {}

        def static(leaf: Any) -> Any:
            path = next(paths)
            if not isinstance(leaf, Tensor):
                if reads is None or not is_host_value(leaf):
                    return leaf
                self._values.append(reads.noting(path, held(leaf)))
                self._paths[id(self._values[-1])] = path
                return self._values[-1]
            if id(leaf) not in buffers:
                buffers[id(leaf)] = dressed(empty_like(leaf), leaf)
            return buffers[id(leaf)]

        self.batch = map_leaves(example, static)
        self._buffers = [*map(without_repeats, buffers.values())]
        self._are_whole = [*map(is_, self._buffers, buffers.values())]
        self.copy_from(example)
        self._pattern = _Pattern(example, reads)

    def aliased(self) -> AliasedBatch:
        """Return aliases of the batch for a capture, which notes its reads of host values."""
        return AliasedBatch(self.batch, self._value_of)

    def aliased_with_values(self) -> AliasedBatch:
        """Return aliases of the batch for an eager run, with the host values themselves."""
        return AliasedBatch(self.batch, held)

    def _value_of(self, leaf: Any) -> Any:
        reads = self._reads
        if reads is None or not isinstance(leaf, HostValue):
            return leaf
        value = held(leaf)
        return value if reads.counts(self._paths[id(leaf)], type(value)) else leaf

    def leaves_of(self, batch: Any, device_type: str) -> tuple[list[Tensor], list[Any]] | None:
        """The tensors and the host values of a batch of the same signature, or None."""
        return self._pattern.leaves(batch, device_type)

    def copy_from(self, batch: Any) -> None:
        """Copy the tensors of a batch of the same signature into the static buffers."""
        if batch is self.batch:  # the caller has filled the buffers
            return
        leaves = [leaf for _, leaf in flatten_batch(batch)]
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        has_values = bool(self._values)
        values = [held(leaf) for leaf in leaves if has_values and is_host_value(leaf)]
        self.fill([*tensors.values()], values)

    def fill(self, tensors: list[Tensor], values: Sequence[Any] = ()) -> None:
        """Copy the tensors and the host values of `leaves_of` into the static buffers."""
        for own, value in zip(self._values, values, strict=True):
            hold(own, value)
        if len(tensors) != len(self._buffers):  # before anything is copied
            raise ValueError(f"{len(tensors)} tensors for {len(self._buffers)} static buffers")
        for buffer, source, is_whole in zip(self._buffers, tensors, self._are_whole, strict=True):
            buffer.copy_(source if is_whole else without_repeats(source), non_blocking=True)
