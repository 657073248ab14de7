"""Gradient effects: those of a user function on gradients, learned in warm-up.

A graph either makes a gradient at an address of its own, or adds to the one that it finds; a capture
must know the case of each parameter. Lightning tells for each batch if gradients are dropped. A user
function may call `zero_grad`, leave that to the code around it, or add to the gradients of an earlier
call. So each warm-up step is watched for the parameters that it uses, and the gradients of these before
and after the step are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.device.sentry.autocast import reaching
from lightning_cudagraph.device.sentry.own_modes import InputsMode
from lightning_cudagraph.errors import CUDAGraphError
from lightning_cudagraph.tensors.local import as_split_as, local
from lightning_cudagraph.tensors.writes import storage_id


class MixedWarmUpError(CUDAGraphError):
    """A capture of a step was on another path than its warm-up."""


class GradientEffects:
    """The effects of a step on the gradients of parameters; `known` returns those it is known to use."""

    def __init__(self, known: Callable[[], dict[str, nn.Parameter]], device_type: str) -> None:
        self._known = known
        self._device_type = device_type
        # By identity, because tensors compare by value.
        self._drops: set[int] = set()
        self._leaves: set[int] = set()  # without a gradient after the step, in some of them
        self._adds: set[int] = set()
        self._reads: set[int] = set()
        self._makes: set[int] = set()  # without a gradient before the step: drops or adds is unknown
        self._had: set[int] = set()  # with a gradient before a step
        self._works_on: set[int] = set()
        self._seen: list[nn.Parameter] = []
        self._alive: dict[int, nn.Parameter] = {}  # so that no id is reused

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Watch one eager step."""
        known = self._known()
        before = [(p, p.grad, _version_of(p.grad)) for p in known.values()]
        self._alive |= {id(parameter): parameter for parameter in known.values()}
        with _Watch(self._device_type) as watch:
            yield
        for parameter, gradient, version in before:
            self._note(parameter, gradient, version, watch.read)
        ids = {id(parameter) for parameter in known.values()}
        self._works_on |= ids & watch.leaves
        seen = (self._works_on | self._adds) - self._pure_drops - self._unknown
        self._seen = [parameter for parameter in known.values() if id(parameter) in seen]

    def _note(
        self, parameter: nn.Parameter, was: Tensor | None, version: int | None, read: set[int]
    ) -> None:
        now, key = parameter.grad, id(parameter)
        if was is None:
            if now is not None:
                self._makes.add(key)
            return
        self._had.add(key)
        if storage_id(was) in read:
            self._reads.add(key)
        if now is not was:
            self._drops.add(key)
            self._leaves |= {key} if now is None else set()
        elif _version_of(was) != version:
            self._adds.add(key)

    def is_settled(self) -> bool:
        """True if the effects on all gradients that exist now are known."""
        known = self._had - self._unknown
        return all(p.grad is None or id(p) in known for p in self._known().values())

    @property
    def _unknown(self) -> set[int]:
        return self._makes - self._drops - self._adds

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with gradients that the step drops and makes, and those that it adds to.

        The latter include parameters with gradients that are read, and those without a gradient before
        the step: the step makes one, or leaves them alone, as long as they have none.
        """
        known, pure = self._known().values(), self._pure_drops
        finds = self._adds | self._makes | self._reads
        return (
            [p for p in known if id(p) in pure],
            [p for p in known if id(p) not in pure and (id(p) in finds or p.grad is None)],
        )

    @property
    def _pure_drops(self) -> set[int]:
        """Parameters with gradients that every call drops before it uses them."""
        return self._drops - self._adds - self._reads

    def finds_gradients(self) -> bool:
        """True if there is a gradient now that the step uses without dropping it first."""
        return any(parameter.grad is not None for parameter in self._seen)

    def are_mixed(self) -> bool:
        """True after a captured step that makes no gradient where each warm-up step has made one."""
        made = self._pure_drops - self._leaves
        return any(id(p) in made and p.grad is None for p in self._known().values())

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Raise `MixedWarmUpError` for a captured step that uses what each warm-up step has dropped.

        A capture finds no gradient, so that the backward pass makes new ones. This one finds gradients
        without memory of their own, which no op may take.
        """
        pure = [p for p in self._known().values() if id(p) in self._pure_drops]
        kinds = [(getattr(p, "grad_dtype", None) or p.dtype, p.device) for p in pure]
        memory = {kind: torch.empty((), dtype=kind[0], device=kind[1]) for kind in dict.fromkeys(kinds)}
        dropped = [
            (p, as_split_as(p, memory[kind].expand_as(local(p))))
            for p, kind in zip(pure, kinds, strict=True)
        ]
        for parameter, gradient in dropped:
            parameter.grad = gradient
        with _Dropped({storage_id(gradient) for _, gradient in dropped}) as watch:
            yield
        if watch.are_used or any(p.grad is gradient for p, gradient in dropped):
            raise MixedWarmUpError


class NoGradients(GradientEffects):
    """The effects of a step that neither reads nor makes gradients."""

    def __init__(self, device_type: str) -> None:
        super().__init__(dict, device_type)

    @contextmanager
    def learning(self) -> Iterator[None]:
        yield


def _version_of(gradient: Tensor | None) -> int | None:
    return None if gradient is None else local(gradient)._version


class _Watch(InputsMode):
    """Mode that records the trainable leaves among the inputs of ops, and the storages that ops read.

    Leaves are recorded by identity.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.leaves: set[int] = set()
        self.read: set[int] = set()

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        for tensor in inputs:
            self.read.add(storage_id(tensor))
            if tensor.requires_grad and tensor.is_leaf and storage_id(tensor) not in self.made:
                self.leaves.add(id(tensor))

    def around(self, func: Any) -> AbstractContextManager[Any]:
        return reaching(func, self._device_type)


class _Dropped(InputsMode):
    """Mode that ends a step in which an op takes one of some storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages
        self.are_used = False

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        if not self._storages.isdisjoint(map(storage_id, inputs)):
            self.are_used = True
            raise MixedWarmUpError
