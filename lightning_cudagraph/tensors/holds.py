"""Gradients that somebody outside keeps: how that is noticed, and what he is given instead.

A graph writes its gradients at addresses of its own, in every replay. Somebody who has kept one of an
earlier step, or a part of it, would see it change. So before a replay those who refer to the graph's
gradients are counted. From the first that is found on, the parameters are given copies after each
replay, which are what an eager step would have left: new ones where gradients are dropped, and the same
ones where they are added to.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.features import HELD_GRADIENTS
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.tensors.local import address_of, local

__all__ = ["GradientCopies", "Gradients", "HandedOut", "Holds", "adopt", "gradients_of"]

Gradients = list[tuple[nn.Parameter, Tensor]]

# How many tensors, or others, refer to the memory with this number.
_users_of: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _references_of_grad() -> int:
    """How many Python references `parameter.grad` is: none, or one, by the version of torch.

    Where it is one, it is one for all that torch itself refers with, such as the views of buckets that
    `DistributedDataParallel` keeps.
    """
    parameter, gradient = nn.Parameter(torch.zeros(())), torch.zeros(())
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) - before


_REFERENCES_OF_GRAD = _references_of_grad()


def _is_in_torch(parameter: nn.Parameter, gradient: Tensor) -> bool:
    """Whether torch itself refers to a gradient, besides the object in Python."""
    count: Callable[[], int] | None = getattr(gradient, "_use_count", None)
    return parameter.grad is gradient if count is None else count() > 1


_all: WeakSet[Holds] = WeakSet()


class Holds:
    """Who refers to some gradients: to the tensors, and to their memory, as views and arrays do.

    Args:
        gradients: those of a graph.
    """

    def __init__(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        self._gradients = [*{id(gradient): (p, gradient) for p, gradient in gradients}.values()]
        self._storages = [local(gradient).untyped_storage() for _, gradient in self._gradients]
        self._numbers = [int(storage._cdata) for storage in self._storages]
        self._references: list[int] = []
        self._users: list[int] = []
        _all.add(self)

    @staticmethod
    @contextmanager
    def of_captures_apart() -> Iterator[None]:
        """Around a capture: graphs refer to the gradients of each other, and nobody has kept those."""
        kept = [holds for holds in _all if holds.is_any_kept()]
        yield
        for holds in _all:
            if holds not in kept:
                holds.count()

    @staticmethod
    def is_one_kept(parameters: Iterable[nn.Parameter]) -> bool:
        """Whether somebody refers to gradients that may, or may not, be those of a graph."""
        found = gradients_of(parameters)
        of_graphs = {id(g): holds for holds in _all for _, g in holds._gradients}
        fresh = nn.Parameter(torch.zeros(()))
        fresh.grad = torch.zeros(())
        known = {id(holds): holds for _, g in found if (holds := of_graphs.get(id(g))) is not None}
        unknown = [(p, g) for p, g in found if id(g) not in of_graphs]
        del found
        alone = Holds([(fresh, fresh.grad)])
        alone.count()
        others = Holds(unknown)
        del unknown
        others._references = alone._references * len(others._gradients)
        others._users = alone._users * len(others._gradients)
        return others.is_any_kept() or any(holds.is_any_kept() for holds in known.values())

    def count(self) -> None:
        """Note who refers to them when nobody outside does."""
        self._references, self._users = self._referring(), self._using()

    def is_any_kept(self) -> bool:
        """Whether somebody outside refers to one of them."""
        users, references = self._using(), self._referring()
        if any(map(operator.gt, users, self._users)):
            return True
        if any(map(operator.gt, references, self._references)):
            return True
        # Fewer than counted, if some were garbage then.
        self._users, self._references = users, references
        return False

    def move_out(self) -> None:
        """Bring them where no graph writes; for the end, because a graph does not find them there.

        One that somebody has views of stays: they cannot be moved with it. So do those on a CPU, where
        other graphs have other memory, and where an array refers to the tensor itself.
        """
        # Nothing is counted for a capture that was refused: nobody has seen its gradients.
        for now, alone, (_, gradient) in zip(self._using(), self._users, self._gradients, strict=False):
            if now <= alone and gradient.device.type != "cpu":
                gradient.data = gradient.clone()

    def _using(self) -> list[int]:
        return [*map(_users_of, self._numbers)] if _users_of is not None else [0] * len(self._numbers)

    def _referring(self) -> list[int]:
        if not _REFERENCES_OF_GRAD:
            return [sys.getrefcount(gradient) for _, gradient in self._gradients]
        return [
            sys.getrefcount(gradient) - (_REFERENCES_OF_GRAD if _is_in_torch(parameter, gradient) else 0)
            for parameter, gradient in self._gradients
        ]


class HandedOut:
    """The gradients that the parameters have between two steps, apart from those of the graph.

    Args:
        parameters: those that the step works on; they have the gradients of the step before.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._found = [(parameter, parameter.grad) for parameter in parameters]
        # By the identity of the graph's.
        self._own: dict[int, Tensor] = {}

    def add_to_found(self, accumulated: Gradients) -> None:
        """The step adds to these, and so to those that were found."""
        found = {id(p): gradient for p, gradient in self._found if gradient is not None}
        self._own |= {id(g): found[id(p)] for p, g in accumulated if id(p) in found}

    def own(self, gradient: Tensor) -> Tensor:
        """What stands for one of the graph's."""
        if id(gradient) not in self._own:
            self._own[id(gradient)] = torch.empty_like(gradient)
        return self._own[id(gradient)]

    def give(self, gradients: Gradients) -> None:
        """Give the parameters what the graph has made."""
        if gradients:
            own = [self.own(gradient) for _, gradient in gradients]
            _copy(own, [gradient for _, gradient in gradients])
            for (parameter, _), gradient in zip(gradients, own, strict=True):
                parameter.grad = gradient

    def take_back(self, gradients: Gradients) -> None:
        """Bring what the host has made of them to the graph, in the middle of the step."""
        if gradients:
            own = [self.own(gradient) for _, gradient in gradients]
            _copy([gradient for _, gradient in gradients], own)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def put_back(self) -> None:
        """Give the parameters what they had before the step."""
        for parameter, gradient in self._found:
            parameter.grad = gradient


class GradientCopies:
    """Whether the parameters are given copies of the gradients of graphs, and those of one step.

    Attributes:
        are_given: they are, because somebody keeps a gradient; or because nobody could tell.
        handed: the copies of the step at hand, if there are any.
    """

    def __init__(self) -> None:
        self.are_given = not available(HELD_GRADIENTS)
        self.handed: HandedOut | None = None

    def begin(self, parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]]) -> None:
        """A step that works on these parameters begins, and they are given copies after it."""
        self.handed = HandedOut(chain(*parameters()))

    def move_apart(
        self, dropped: list[nn.Parameter], added: list[nn.Parameter], can_be_kept: Callable[[], bool]
    ) -> None:
        """The graph would add to gradients where they are: elsewhere, if somebody keeps those.

        Args:
            dropped: the parameters whose gradients the step drops.
            added: those to whose it adds.
            can_be_kept: whether code of the user's can keep gradients between two steps.
        """
        if not self.are_given and can_be_kept() and Holds.is_one_kept(added):
            self.are_given = True
        if self.are_given:
            self.handed = self.handed or HandedOut([*dropped, *added])
            for parameter in added:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def put_back(self) -> None:
        """The step runs without a graph: give the parameters what they had before it."""
        if self.handed is not None:
            self.handed.put_back()
            self.handed = None


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_([*map(local, targets)], [*map(local, sources)])


def gradients_of(parameters: Iterable[nn.Parameter]) -> Gradients:
    """The gradients that there are."""
    return [(p, p.grad) for p in parameters if p.grad is not None]


def adopt(gradients: Gradients) -> None:
    """Bring gradients back to where graphs know them, with the values that they have now."""
    for parameter, gradient in gradients:
        now = parameter.grad
        # By address: several places of a window know the same one by tensors of their own.
        if now is not None and (now is gradient or address_of(now) == address_of(gradient)):
            continue
        if now is None:  # dropped since, by validation
            gradient.zero_()
        else:
            gradient.copy_(now)
        parameter.grad = gradient
