"""Random generators besides the default one of the device.

A CUDA graph must know a generator before its capture begins, so that every replay draws new numbers from
it. The generators of a step are found in its first warm-up step. Those on the host are found in the
capture, as nothing has to know them before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.device.refusals.forbidden_ops import GENERATOR
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode


class Generators:
    """The generators of a device that steps draw from, the default one included."""

    def __init__(self, device_type: str, default: torch.Generator) -> None:
        self._device_type = device_type
        # By address: an op is handed another Python object for the same generator.
        self._known: dict[int, torch.Generator] = {_address(default): default}
        self._on_host: dict[int, torch.Generator] = {}  # of another device type than `_known`

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
        with _NotingMode(self._note):
            yield

    @contextmanager
    def unknown_refused(self) -> Iterator[None]:
        """Refuse draws from unknown generators of the device in the `with` block.

        Where refusals are gathered, the block draws all the same: the generators are put back behind it.
        """
        drawn: dict[int, tuple[torch.Generator, Tensor]] = {}

        def refuse(generator: torch.Generator | None) -> None:
            if self._is_new(generator):
                drawn.setdefault(_address(generator), (generator, generator.get_state()))
                forbid(*GENERATOR, user_location())

        try:
            with _NotingMode(refuse):
                yield
        finally:
            for generator, before in drawn.values():
                generator.set_state(before)

    def _note(self, generator: torch.Generator | None) -> None:
        if self._is_new(generator):
            self._known[_address(generator)] = generator

    def _is_new(self, generator: torch.Generator | None) -> TypeGuard[torch.Generator]:
        """True for a generator of the device that is not known."""
        if generator is None or generator.device.type != self._device_type:
            return False
        return not self.knows(generator)

    def add_on_host(self, generator: torch.Generator) -> None:
        """Add a generator of the host that a graph for another device draws from."""
        self._on_host[_address(generator)] = generator

    def repeated(self) -> AbstractContextManager[None]:
        """Hide draws of an eager pass from generators of the host that graphs draw from, too."""
        return setting(_hidden_draws, value=_RepeatedDraws(self._on_host))

    @property
    def _besides(self) -> list[torch.Generator]:
        return [*self.extra, *self._on_host.values()]

    def state(self, default_state: Tensor) -> Tensor:
        """The states of all generators, concatenated; that of the default one is given."""
        return torch.cat([default_state, *(generator.get_state() for generator in self._besides)])

    def set_extra_states(self, state: Tensor) -> Tensor:
        """Set the other generators to what `state` returned; return the state of the default one."""
        sizes = [generator.get_state().numel() for generator in self._besides]
        default_state: Tensor
        default_state, *states = state.split([state.numel() - sum(sizes), *sizes])
        for generator, own in zip(self._besides, states, strict=True):
            generator.set_state(own.clone())
        return default_state.clone()


@dataclass
class _Drawn:
    """A generator, with its states before the first draw of a capture and after the last one."""

    generator: torch.Generator
    before: Tensor
    after: Tensor

    def is_moved(self) -> bool:
        """True if other code has drawn from it, or set it, since the last draw."""
        return not _are_same(self.generator.get_state(), self.after)


class _RepeatedDraws:
    """The draws of an eager pass of a check, which repeats those of a graph.

    Args:
        generators: of the host, by address; graphs draw from them.
    """

    def __init__(self, generators: Mapping[int, torch.Generator]) -> None:
        self._before = {address: generator.get_state() for address, generator in generators.items()}

    def hides(self, generator: torch.Generator) -> bool:
        return _address(generator) in self._before

    def before(self, generator: torch.Generator) -> Tensor:
        """The state before the pass."""
        return self._before[_address(generator)]


_hidden_draws: OfThread[HostDraws | _RepeatedDraws | None] = OfThread(None)


class HostDraws:
    """The draws of one capture from generators on the host, which each replay repeats.

    The audit of the step, which refuses draws on the host, does not see them.

    Attributes:
        are_shown: it does, because replays cannot repeat what the step does with them.
        are_moved: the step has set a generator between two draws, or drawn from it in another way.
    """

    def __init__(self) -> None:
        self._drawn: dict[int, _Drawn] = {}
        self.are_shown = self.are_moved = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the draws of this thread from `state_seen` in the `with` block, and undo them then."""
        try:
            with setting(_hidden_draws, value=self):
                yield
        finally:
            for drawn in self._drawn.values():
                drawn.generator.set_state(drawn.before)

    @contextmanager
    def noted(self, generator: torch.Generator) -> Iterator[None]:
        """Note a draw from a generator in the `with` block."""
        now = generator.get_state()
        drawn = self._drawn.setdefault(_address(generator), _Drawn(generator, now, now))
        self.look()
        yield
        drawn.after = generator.get_state()

    def look(self) -> None:
        """Find out if a generator was moved by other code."""
        self.are_moved |= any(drawn.is_moved() for drawn in self._drawn.values())

    def hides(self, generator: torch.Generator) -> bool:
        self.look()
        return _address(generator) in self._drawn and not (self.are_shown or self.are_moved)

    def before(self, generator: torch.Generator) -> Tensor:
        """The state before the first draw."""
        return self._drawn[_address(generator)].before

    @property
    def generators(self) -> list[torch.Generator]:
        return [drawn.generator for drawn in self._drawn.values()]


def state_seen(generator: torch.Generator) -> Tensor:
    """The state of a generator on the host, without the draws that replays repeat."""
    draws = _hidden_draws.value
    if draws is None or not draws.hides(generator):
        return generator.get_state()
    return draws.before(generator)


def set_seen(generator: torch.Generator, state: Tensor) -> None:
    """Set a generator on the host; not one with draws that `state_seen` hides: it is put back later."""
    draws = _hidden_draws.value
    if draws is None or not draws.hides(generator):
        generator.set_state(state)


def _are_same(state: Tensor, other: Tensor) -> bool:
    return bool(state.numpy().tobytes() == other.numpy().tobytes())  # no op: a capture is under way


def _address(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


_Note = Callable[[torch.Generator | None], None]


class _NotingMode(OwnFunctionMode):
    def __init__(self, note: _Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._note(kwargs.get("generator"))
        return func(*args, **kwargs)
