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

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_cudagraph.capture.writes import storage_id
from lightning_cudagraph.errors import UnsupportedError

__all__ = ["GradientHabits"]


class GradientHabits:
    """What a step does to the gradients of parameters.

    Args:
        known: the parameters that the caller knows the step to work on, by name. Asked anew each time.
    """

    def __init__(self, known: Callable[[], dict[str, nn.Parameter]]) -> None:
        self._known = known
        # By identity, because tensors compare by value.
        self._drops: dict[int, str] = {}
        self._adds: dict[int, str] = {}
        self._makes: dict[int, str] = {}  # found none, so that nobody knows whether they are dropped
        self._reads: dict[int, str] = {}
        self._works_on: set[int] = set()
        self._seen: list[nn.Parameter] = []
        self._strangers: list[Tensor] = []

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Watch one eager step."""
        known = self._known()
        before = {
            name: (p, p.grad, None if p.grad is None else p.grad._version) for name, p in known.items()
        }
        with _Watch() as watch:
            yield
        for name, (parameter, gradient, version) in before.items():
            self._note(name, parameter, gradient, version, watch.read)
        ids = {id(parameter) for parameter in known.values()}
        self._works_on |= ids & watch.leaves.keys()
        seen = (self._works_on | self._adds.keys()) - self._drops.keys() - self._unknown
        self._seen = [parameter for parameter in known.values() if id(parameter) in seen]
        self._strangers += [
            leaf for leaf in watch.leaves.values() if id(leaf) not in ids and leaf.grad is not None
        ]

    def _note(
        self, name: str, parameter: nn.Parameter, was: Tensor | None, version: int | None, read: set[int]
    ) -> None:
        now, key = parameter.grad, id(parameter)
        if was is None:
            if now is not None:
                self._makes[key] = name
        elif now is was:
            if was._version != version:
                self._adds[key] = name
        else:
            self._drops[key] = name
            if storage_id(was) in read:
                self._reads[key] = name

    def is_settled(self) -> bool:
        """Whether nothing that the step would meet now is unknown."""
        unknown = self._unknown
        return not any(id(p) in unknown and p.grad is not None for p in self._known().values())

    @property
    def _unknown(self) -> set[int]:
        return self._makes.keys() - self._drops.keys() - self._adds.keys()

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those whose gradients it drops and makes anew, and those to whose it only adds."""
        known = self._known().values()
        drops = [p for p in known if id(p) in self._drops]
        # A gradient that was made where none was is made again, as long as there is none.
        return drops, [p for p in known if id(p) not in self._drops and self._touches(p)]

    def finds_gradients(self) -> bool:
        """Whether there is a gradient now that the step can see, of those that it does not drop."""
        return any(parameter.grad is not None for parameter in self._seen)

    def accumulates(self) -> bool:
        """Whether it adds to gradients of an earlier call."""
        return bool(self._adds)

    def _touches(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._adds or id(parameter) in self._makes

    def check(self) -> None:
        """Refuse what no graph can do to gradients.

        Raises:
            UnsupportedError: naming the parameter.
        """
        for tensor in self._strangers:
            raise UnsupportedError(
                f"The step works on a parameter of shape {tuple(tensor.shape)} that belongs to none of"
                " the modules and optimizers that it was given; its gradient would be lost.",
                "Pass all modules that the step trains: `GraphedStep(step, modules=[...])`.",
            )
        if self._reads:
            name = next(iter(self._reads.values()))
            raise UnsupportedError(
                f"The step reads the gradient that an earlier call has left at `{name}`, and puts"
                " another in its place.",
                "Drop it with `zero_grad()`, or add to it in place (`p.grad.add_(...)`).",
            )
        if both := self._drops.keys() & self._adds.keys():
            name = self._drops[next(iter(both))]
            raise UnsupportedError(
                f"The step drops the gradient of `{name}` in one call, and adds to it in another.",
                "Make a `GraphedStep` of each, or call `zero_grad()` outside.",
            )


class _Watch(TorchDispatchMode):
    """Notes which trainable leaves ops are given, and which memory they read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves: dict[int, Tensor] = {}
        self.read: set[int] = set()
        self._made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self.read.add(storage_id(tensor))
            if tensor.requires_grad and tensor.is_leaf and storage_id(tensor) not in self._made:
                self.leaves[id(tensor)] = tensor
        result = func(*args, **kwargs)
        given = {storage_id(tensor) for tensor in inputs}
        made = {storage_id(leaf) for leaf in tree_iter(result) if isinstance(leaf, Tensor)}
        self._made |= made - given
        return result
