"""Random generators and iterators of the host: their state, and draws from them."""

from __future__ import annotations

import random
from collections.abc import Callable
from inspect import unwrap
from io import IOBase
from types import CodeType, WrapperDescriptorType
from typing import Any, NoReturn
from weakref import ProxyTypes

import numpy as np
import torch

from lightning_cudagraph.checks.audit.host_objects import cached_by_class, lineage, namespace_of
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbidden, refused
from lightning_cudagraph.errors import see

SEEDED = (
    "in the step, which a replay would not repeat",
    "Leave the seed out of the step: draw numbers that shall be the same in each step before `fit`, and"
    " keep them in a buffer (`register_buffer`)." + see("host_random"),
)
_SET = (
    "in the step, on the CPU emulator",
    "On a GPU this can be captured. On a CPU, leave it out: the step then draws with the numbers of its"
    " own generator, others in each replay." + see("host_random"),
)
_SEEDS: dict[str, Any] = {
    "torch.manual_seed": torch.manual_seed,
    "torch.seed": torch.seed,
    "torch.cuda.manual_seed": torch.cuda.manual_seed,
    "torch.cuda.manual_seed_all": torch.cuda.manual_seed_all,
    "torch.cuda.seed": torch.cuda.seed,
    "torch.cuda.seed_all": torch.cuda.seed_all,
}
_SETTERS: dict[str, Any] = {
    "torch.set_rng_state": torch.set_rng_state,
    "torch.random.fork_rng": torch.random.fork_rng,
}


def seeds(device_type: str) -> dict[CodeType, tuple[str, str, str]]:
    """Functions of torch that set the generators of a step: their names, and the words of a refusal.

    A graph of a GPU can set back a state that it has read, a tape of the emulator cannot.
    """
    found = [(function, name, SEEDED) for name, function in _SEEDS.items()]
    if device_type == "cpu":
        found += [(function, name, _SET) for name, function in _SETTERS.items()]
    return {unwrap(function).__code__: (name, *words) for function, name, words in found}


_State = tuple[Callable[[], Any], Callable[[Any], None]]


def generator_state(value: Any) -> _State | None:
    """Functions that read and write the state of a host random generator; None for other objects.

    The state that is read can be compared with `==`.
    """
    kind = type(value)
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return value.getstate, value.setstate
    if issubclass(kind, np.random.RandomState):
        # Not the legacy tuple: comparing it would copy its numbers into Python one by one.
        return _packed(lambda: value.get_state(legacy=False), value.set_state)
    bits = value.bit_generator if issubclass(kind, np.random.Generator) else value
    if issubclass(type(bits), np.random.BitGenerator):
        return _packed(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if issubclass(kind, torch.Generator) and value.device.type == "cpu":
        return _packed(value.get_state, value.set_state)
    return None


class _Packed:
    """A state with an image of it in bytes, for comparison."""

    def __init__(self, state: Any, image: Any) -> None:
        self.state = state
        self._image = image

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Packed) and bool(self._image == other._image)

    __hash__ = None  # type: ignore[assignment]


def _packed(read: Callable[[], Any], write: Callable[[Any], None]) -> _State:
    def packed() -> _Packed:
        state = read()
        return _Packed(state, _image(state))

    return packed, lambda packed: write(packed.state)


def _image(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _image(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()  # compared on the host: a capture is under way
    return state.tobytes() if isinstance(state, np.ndarray) else state


@cached_by_class
def _is_iterator_type(kind: Any) -> bool:
    # Not by `getattr`, which makes a mock answer.
    found = (namespace_of(base).get("__next__") for base in lineage(kind))
    of_c = type(next(filter(None, found), None)) is WrapperDescriptorType
    # A weak proxy has all methods, and answers for another object.
    return of_c and not issubclass(kind, (IOBase, *ProxyTypes))


def is_iterator(value: Any) -> bool:
    """True for an iterator or generator that is written in C: its position cannot be restored."""
    kind: Any = type(value)
    return _is_iterator_type(kind)


def holds_iterator(value: Any) -> bool:
    """True for an iterator, and for a tuple with iterators."""
    return is_iterator(value) or (isinstance(value, tuple) and any(map(holds_iterator, value)))


class HeldIterator:
    """Replacement for an iterator during a capture, which refuses draws.

    Args:
        of: its holder, in words.
    """

    __slots__ = ("_iterator", "_name", "_of")

    def __init__(self, iterator: Any, name: str, of: str) -> None:
        self._iterator = iterator
        self._name = name
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __iter__(self) -> HeldIterator:
        return self

    def __next__(self, *args: Any) -> NoReturn:
        error = forbidden(
            f"a draw from the iterator `{self._name}` of {self._of}, which a replay would not repeat",
            "Draw in `on_train_batch_start`, and hand the result to the step in a registered buffer,"
            " written with `copy_` or `fill_`; or draw in the dataloader. If it may stay what it is,"
            f' allow it: `CUDAGraphCallback(harmless=["{self._name}"])`.',
            user_location(),
        )
        error.subject = self._name, self._of
        raise refused(error)  # also where refusals are gathered: a draw cannot be undone

    send = throw = close = __next__
