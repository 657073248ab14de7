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

    The state that is read can be compared with `same`, without an op of torch.
    """
    kind = type(value)
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return value.getstate, value.setstate
    if issubclass(kind, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    bits = value.bit_generator if issubclass(kind, np.random.Generator) else value
    if issubclass(type(bits), np.random.BitGenerator):
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if issubclass(kind, torch.Generator) and value.device.type == "cpu":
        return lambda: state_seen(value).numpy(), lambda state: set_seen(value, torch.from_numpy(state))
    return None
