"""Comparison of the actual writes of ops with their declared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from lightning_cudagraph.device.emulator.op_recorder import OpRecorder
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.device.streams.accesses import access_of, all_of, made_by, only_looks, pieces
from lightning_cudagraph.tensors.writes import storage_id, written_by

# Barriers for a capture on several streams; what they write matters to others.
_CHECKED_ALL_THE_SAME = ("aten::_cudnn", "aten::_thnn_fused", "aten::linalg", "aten::_fft")


def _with_memory(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield from pieces(leaf)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: int) -> str:
    """The name of an op's argument that lies in a storage."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(storage_id(tensor) == key for tensor in _with_memory(value)):
            return str(argument.name)
    return "somebody else"


def _by_device(memory: dict[int, Tensor]) -> dict[torch.device, list[int]]:
    keys: dict[torch.device, list[int]] = {}
    for key, data in memory.items():
        keys.setdefault(data.device, []).append(key)
    return keys


def _in_one(memory: dict[int, Tensor]) -> dict[torch.device, Tensor]:
    """A copy of all memory as one tensor for each device, which compares faster than hundreds."""
    return {
        device: torch.cat([memory[key] for key in keys]) for device, keys in _by_device(memory).items()
    }


def _is_equal(before: dict[torch.device, Tensor], after: dict[torch.device, Tensor]) -> bool:
    return all(torch.equal(was, after[device]) for device, was in before.items())


def _each(copies: dict[torch.device, Tensor], memory: dict[int, Tensor]) -> dict[int, Tensor]:
    """The parts of such a copy, one for each memory."""
    found: dict[int, Tensor] = {}
    for device, keys in _by_device(memory).items():
        found |= zip(keys, copies[device].split([memory[key].numel() for key in keys]), strict=True)
    return found


class Declared(OwnDispatchMode):
    """Compares all registered memory before and after each op.

    Attributes:
        ops: the names of all ops seen.
        written: the names of ops that wrote into older memory.
        known: ops with known effects that are no views.
        unknown: ops with unknown effects.
        lies: undeclared writes, and other deviations from the declaration.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()
        self.written: set[str] = set()
        self.known: set[str] = set()
        self.unknown: set[str] = set()
        self.lies: set[str] = set()
        self._met: dict[int, StorageWeakRef] = {}

    def meet(self, tree: Any) -> None:
        """Register the memory of these tensors."""
        for tensor in _with_memory(tree):
            self._met.setdefault(storage_id(tensor), StorageWeakRef(tensor.untyped_storage()))

    def _memory(self) -> dict[int, Tensor]:
        """All registered memory that is still alive, as bytes."""
        found = {}
        for key, weak in list(self._met.items()):
            storage = None if weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self._met[key]
            elif storage.nbytes() > 0 and storage.data_ptr() != 0:
                found[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        compare = self.look(func, args, kwargs)
        result = func(*args, **kwargs)
        compare(result)
        return result

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """Copy memory before an op runs; returns a function that takes its result and compares."""
        name = func.name() if hasattr(func, "_schema") else str(func)
        self.ops.add(name)
        self.meet((args, kwargs))
        memory = self._memory()
        before = _in_one(memory)
        looks = only_looks(func)
        access = access_of(func, args, kwargs)

        def compare(result: Any) -> None:
            self.meet(result)
            if access is not None and not looks:
                self.known.add(func._schema.name)
            if not looks and access is None:
                self.unknown.add(name)
                if not name.startswith(_CHECKED_ALL_THE_SAME):
                    return
                writes = [all_of(tensor) for tensor in written_by(func, args, kwargs)]
            else:
                writes = [] if access is None else access.writes
            if access is not None and access.moved():
                self.lies.add(f"{name} gives a tensor other memory")
            changed = not _is_equal(before, _in_one(memory))
            for key, was in _each(before, memory).items() if changed else ():
                if torch.equal(memory[key], was):
                    continue
                self.written.add(name)
                for start, end in writes:
                    first = max(0, start - memory[key].data_ptr())
                    last = max(first, end - memory[key].data_ptr())
                    was[first:last] = memory[key][first:last]
                if not torch.equal(memory[key], was):
                    self.lies.add(f"{name} writes into memory of {_argument(func, args, kwargs, key)}")
            given = {storage_id(tensor) for tensor in _with_memory((args, kwargs))}
            returned = {storage_id(t) for t in _with_memory(result) if t.untyped_storage().nbytes()}
            if access is None:
                new = set()
            else:
                kinds = ("cpu", "cuda")
                new = {storage_id(t) for kind in kinds for t in made_by(result, access.tensors, kind)}
            if looks and not returned <= given:
                self.lies.add(f"{name} is said to be a view, and makes memory")
            if access is not None and not looks and not returned <= given | new:
                self.lies.add(f"{name} returns memory that is neither new nor was given to it")

        return compare


class Apart:
    """A checker's callable, into which guards and audit do not look: it is no part of the step."""

    __module__ = "lightning_cudagraph.tests"

    def __init__(self, call: Callable[[Declared], None]) -> None:
        self._call = call

    def __call__(self, watch: Declared) -> None:
        self._call(watch)


@contextmanager
def captures_looked_at() -> Iterator[Callable[[], set[str]]]:
    """Check the ops of all captures of the emulator, each by itself.

    Yields:
        A function that returns the ops with undeclared writes since its last call.
    """
    # Not a set: the step would be refused that changes one.
    seen: SimpleQueue[Declared] = SimpleQueue()
    run = OpRecorder.run
    put = Apart(seen.put)

    def looked_at(recorder: OpRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = Declared()
        compare = watch.look(func, args, kwargs)
        result = run(recorder, func, args, kwargs)
        compare(result)
        put(watch)
        return result

    def lies() -> set[str]:
        found: set[str] = set()
        while not seen.empty():
            found |= seen.get().lies
        return found

    OpRecorder.run = looked_at  # type: ignore[method-assign]
    try:
        yield lies
    finally:
        OpRecorder.run = run  # type: ignore[method-assign]
