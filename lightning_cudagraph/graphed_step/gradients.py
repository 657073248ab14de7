"""What a step does to gradients, learned in warm-up.

Lightning says of each batch whether gradients are dropped before it. A function of the user's says
nothing: it may call `zero_grad`, or leave that to the code around it, or add to the gradients of an
earlier call. A graph must know, because it makes gradients at addresses of its own, or adds to those
that are there. So the warm-up steps are watched: which parameters they work on, and for each whether the
gradient that was there before the step is the one that is there after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.sentry.autocast import reaching
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.tensors.writes import storage_id

__all__ = ["GradientHabits"]


class GradientHabits:
    """What a step does to the gradients of parameters.

    Args:
        known: the parameters that the caller knows the step to work on, by name. Asked anew each time.
        device_type: the type of the device that they are on.
    """

    def __init__(self, known: Callable[[], dict[str, nn.Parameter]], device_type: str) -> None:
        self._known = known
        self._device_type = device_type
        # By identity, because tensors compare by value.
        self._drops: set[int] = set()
        self._adds: set[int] = set()
        self._reads: set[int] = set()
        self._makes: set[int] = set()  # found none, so that nobody knows whether they are dropped
        self._works_on: set[int] = set()
        self._seen: list[nn.Parameter] = []
        self._strangers: list[Tensor] = []
        self._alive: dict[int, nn.Parameter] = {}  # so that no number comes twice

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Watch one eager step."""
        known = self._known()
        before = [(p, p.grad, None if p.grad is None else p.grad._version) for p in known.values()]
        self._alive |= {id(parameter): parameter for parameter in known.values()}
        with _Watch(self._device_type) as watch:
            yield
        for parameter, gradient, version in before:
            self._note(parameter, gradient, version, watch.read)
        ids = {id(parameter) for parameter in known.values()}
        self._works_on |= ids & watch.leaves.keys()
        seen = (self._works_on | self._adds) - self._pure_drops - self._unknown
        self._seen = [parameter for parameter in known.values() if id(parameter) in seen]
        self._strangers += [
            leaf for leaf in watch.leaves.values() if id(leaf) not in ids and leaf.grad is not None
        ]

    def _note(
        self, parameter: nn.Parameter, was: Tensor | None, version: int | None, read: set[int]
    ) -> None:
        now, key = parameter.grad, id(parameter)
        if was is None:
            if now is not None:
                self._makes.add(key)
            return
        if storage_id(was) in read:
            self._reads.add(key)
        if now is not was:
            self._drops.add(key)
        elif was._version != version:
            self._adds.add(key)

    def is_settled(self) -> bool:
        """Whether nothing that the step would meet now is unknown."""
        unknown = self._unknown
        return not any(id(p) in unknown and p.grad is not None for p in self._known().values())

    @property
    def _unknown(self) -> set[int]:
        return self._makes - self._drops - self._adds

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those whose gradients it drops and makes anew, and those whose it finds, and adds to or reads.

        One that was made where none was is among the latter: as long as there is none, it is made. So is
        one that never had any: nobody knows what the step would do with it.
        """
        known, pure = self._known().values(), self._pure_drops
        finds = self._adds | self._makes | self._reads
        return (
            [p for p in known if id(p) in pure],
            [p for p in known if id(p) not in pure and (id(p) in finds or p.grad is None)],
        )

    @property
    def _pure_drops(self) -> set[int]:
        """Parameters whose gradient is dropped before anything is done with it, in all calls."""
        return self._drops - self._adds - self._reads

    def finds_gradients(self) -> bool:
        """Whether there is a gradient now that the step can see, of those that it does not drop."""
        return any(parameter.grad is not None for parameter in self._seen)

    def check(self) -> None:
        """Refuse a step that makes gradients of which nobody knows.

        Raises:
            UnsupportedError: saying so.
        """
        for tensor in self._strangers:
            raise UnsupportedError(
                f"The step works on a parameter of shape {tuple(tensor.shape)} that belongs to none of"
                " the modules and optimizers that it was given; its gradient would be lost.",
                "Pass all modules that the step trains: `GraphedStep(step, modules=[...])`.",
            )


def _has_memory(leaf: Any) -> bool:
    """Whether it is a tensor with memory of its own. Sparse ones, which no graph can hold, have none."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


class _Watch(OwnDispatchMode):
    """Notes which trainable leaves ops are given, and which memory they read."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.leaves: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_around_another, types)):
            return NotImplemented  # comes again, as ops on what it is around
        kwargs = kwargs or {}
        inputs = list(filter(_has_memory, tree_iter((args, kwargs))))
        for tensor in inputs:
            self.read.add(storage_id(tensor))
            if tensor.requires_grad and tensor.is_leaf and storage_id(tensor) not in self._made:
                self.leaves[id(tensor)] = tensor
        with reaching(func, self._device_type):
            result = func(*args, **kwargs)
        given = {storage_id(tensor) for tensor in inputs}
        made = set(map(storage_id, filter(_has_memory, tree_iter(result))))
        self._made |= made - given
        return result
