"""Gradients that are copied out of graphs, and gradients of user code, to which steps add in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.gradients.external_references import (
    ExternalReferences,
    Gradients,
    gradients_of,
    overlap,
)
from lightning_cudagraph.compat.features import HELD_GRADIENTS
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.tensors.batch import copied_leaf
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.writes import storage_id

# The gradients that were handed out and are still alive, by id.
_copies: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


class HandedOut:
    """The gradients of the parameters between two steps, copied out of the graph.

    Args:
        parameters: the parameters of the step, with the gradients of the step before.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._found = [(parameter, parameter.grad) for parameter in parameters]
        # By id of the graph's gradient.
        self._own: dict[int, Tensor] = {}

    def add_to_found(self, accumulated: Gradients) -> None:
        """Use the gradients from before the step as the copies of those that the step adds to."""
        found = {id(p): gradient for p, gradient in self._found if gradient is not None}
        taken = {id(g): found[id(p)] for p, g in accumulated if id(p) in found}
        self._own |= taken
        _copies.update({id(gradient): gradient for gradient in taken.values()})

    def own(self, gradient: Tensor) -> Tensor:
        """The copy of a gradient of the graph."""
        if id(gradient) not in self._own:
            copy = self._own[id(gradient)] = torch.empty_like(gradient)
            _copies[id(copy)] = copy
        return self._own[id(gradient)]

    def give(self, gradients: Gradients) -> None:
        """Copy the gradients of the graph out, and give the copies to the parameters."""
        if gradients:
            own = [self.own(gradient) for _, gradient in gradients]
            _copy(own, [gradient for _, gradient in gradients])
            for (parameter, _), gradient in zip(gradients, own, strict=True):
                parameter.grad = gradient

    def take_back(self, gradients: Gradients) -> None:
        """Copy gradients back into the graph at a graph break: the host may have changed them."""
        if gradients:
            own = [self.own(gradient) for _, gradient in gradients]
            _copy([gradient for _, gradient in gradients], own)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def put_back(self) -> None:
        """Restore the gradients from before the step."""
        for parameter, gradient in self._found:
            parameter.grad = gradient


class GradientCopies:
    """The decision to copy gradients out, and the copies of one step.

    A step that adds to gradients of user code is captured in place, on their memory: views of one flat
    buffer, a tensor that user code keeps. If user code gives it others later, gradients are copied.

    Attributes:
        are_given: True once there was an external reference to a gradient, or if they cannot be counted.
        are_replaced: True once user code has replaced gradients that a step adds to in place.
        in_place: parameters with gradients of user code in the last capture.
        handed: the copies of the present step, if there are any.
    """

    def __init__(self) -> None:
        self.are_given = not available(HELD_GRADIENTS)
        self.are_replaced = False
        self.in_place: list[nn.Parameter] = []
        self._known: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # those of user code
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by eager steps
        self.handed: HandedOut | None = None

    def begin(self, parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]]) -> None:
        """Prepare copies for the parameters of a step that begins: dropped and added to."""
        self.handed = HandedOut(chain(*parameters()))

    def of_user_code(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters with gradients that user code refers to, and that are not of a graph."""
        of_graphs = ExternalReferences.storages_of_graphs()
        others = [
            p
            for p in parameters
            if p.grad is not None
            and not self._is_known(p)
            and _copies.get(id(p.grad)) is not p.grad
            and storage_id(p.grad) not in of_graphs
        ]
        return [*filter(self._is_known, parameters), *ExternalReferences.kept(others)]

    def _is_known(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        return gradient is not None and self._known.get(id(gradient)) is gradient

    @contextmanager
    def noting_made(
        self, parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]]
    ) -> Iterator[None]:
        """Note the gradients that an eager step makes; user code may keep them.

        Args:
            parameters: of the step, with the gradients that it drops and those that it adds to.
        """
        # Weakly: a gradient that the step drops leaves its id to one that it makes.
        before = _by_id(chain(*parameters()))
        yield
        # Only a step that has run once knows its parameters.
        after = _by_id(chain(*parameters()))
        self._made |= {
            key: gradient for key, gradient in after.items() if before.get(key) is not gradient
        }

    def are_made(self, parameters: list[nn.Parameter]) -> bool:
        """True if eager steps have made the gradients of parameters."""
        return all(p.grad is not None and self._made.get(id(p.grad)) is p.grad for p in parameters)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that parameters have gradients of user code."""
        self._known |= _by_id(parameters)

    def are_copies(self, parameters: list[nn.Parameter]) -> bool:
        """True if parameters have copies that were handed out, each its own."""
        ids = {
            id(p.grad) for p in parameters if _copies.get(id(p.grad)) is p.grad and not self._is_known(p)
        }
        return len(ids) == len(parameters)

    def has_overlaps(self, added: list[nn.Parameter]) -> bool:
        """True if gradients overlap, of which one at least is to be copied."""
        if not overlap(added):
            return False
        in_place = [] if self.are_replaced else self._to_be_in_place(added)
        return len(in_place) < len(added)

    def is_in_place(self, added: list[nn.Parameter]) -> bool:
        """True if a step adds to gradients of user code in their memory."""
        return not self.are_replaced and bool(self._to_be_in_place(added))

    def _to_be_in_place(self, added: list[nn.Parameter]) -> list[nn.Parameter]:
        if not self.are_given:
            return self.of_user_code(added)
        # User code keeps gradients of steps: that alone does not make a gradient one of its own.
        return [parameter for parameter in added if self._is_known(parameter)]

    def copy_before_capture(
        self, dropped: list[nn.Parameter], added: list[nn.Parameter], can_be_kept: Callable[[], bool]
    ) -> None:
        """Copy gradients that the step adds to before a capture, if there are external references.

        Args:
            can_be_kept: True if user code can hold gradients between two steps.
        """
        self.in_place = []
        if can_be_kept():
            if not self.are_replaced:
                self.in_place = self._to_be_in_place(added)
                self.note(self.in_place)
            in_place = {*map(id, self.in_place)}
            added = [parameter for parameter in added if id(parameter) not in in_place]
            self.are_given = self.are_given or ExternalReferences.is_one_kept(added)
        if self.are_given:
            self.handed = self.handed or HandedOut([*dropped, *added, *self.in_place])
            for parameter in added:
                if parameter.grad is not None:
                    parameter.grad = copied_leaf(parameter.grad)

    def put_back(self) -> None:
        """Restore the gradients from before the step, which runs without a graph."""
        if self.handed is not None:
            self.handed.put_back()
            self.handed = None


def _by_id(parameters: Iterable[nn.Parameter]) -> WeakValueDictionary[int, Tensor]:
    return WeakValueDictionary({id(gradient): gradient for _, gradient in gradients_of(parameters)})


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_([*map(local, targets)], [*map(local, sources)])
