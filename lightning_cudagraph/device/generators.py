"""Random generators besides the default one of the device.

A CUDA graph must know a generator before its capture begins, so that every replay draws new numbers from
it. The generators of a step are found in its first warm-up step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode


class Generators:
    """The generators of a device that steps draw from, the default one included."""

    def __init__(self, device_type: str, default: torch.Generator) -> None:
        self._device_type = device_type
        # By address: an op is handed another Python object for the same generator.
        self._known: dict[int, torch.Generator] = {_address(default): default}

    @property
    def extra(self) -> list[torch.Generator]:
        return list(self._known.values())[1:]

    def knows(self, generator: torch.Generator) -> bool:
        """True if a graph may draw from a generator."""
        return _address(generator) in self._known

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Record the generators of random ops inside the `with` block."""
        # Not a dispatch mode, which would see more: under one, composite ops run with autocast off, and
        # some backward passes take another path (TensorSubclassLikeUtils.h).
        with _Spotter(self._note):
            yield

    def _note(self, generator: torch.Generator | None) -> None:
        if generator is not None and generator.device.type == self._device_type:
            self._known.setdefault(_address(generator), generator)

    def state(self, default_state: Tensor) -> Tensor:
        """The states of all generators, concatenated; that of the default one is given."""
        return torch.cat([default_state, *(generator.get_state() for generator in self.extra)])

    def set_extra_states(self, state: Tensor) -> Tensor:
        """Set the extra generators to what `state` returned; return the state of the default one."""
        sizes = [generator.get_state().numel() for generator in self.extra]
        default_state: Tensor
        default_state, *states = state.split([state.numel() - sum(sizes), *sizes])
        for generator, own in zip(self.extra, states, strict=True):
            generator.set_state(own.clone())
        return default_state.clone()


def _address(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


_Note = Callable[[torch.Generator | None], None]


class _Spotter(OwnFunctionMode):
    def __init__(self, note: _Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._note((kwargs or {}).get("generator"))
        return func(*args, **(kwargs or {}))
