"""The state of random generators on the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_cudagraph.device.generators import set_seen, state_seen

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
        return _packed(lambda: state_seen(value), lambda state: set_seen(value, state))
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
