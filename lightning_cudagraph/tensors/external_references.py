"""External references to gradients of graphs: their detection, and gradients that are copied out.

A graph writes its gradients at fixed addresses in every replay. Code that holds a gradient of an earlier
step, or a view of it, would see it change; and the graph does not see other memory that code gives a
gradient (`p.grad.data = ...`). So before a replay, references to the graph's gradients are counted, and
their addresses and layouts compared. From the first external reference or other memory on, gradients are
copied out after each replay, as an eager step would leave them: new tensors if the step drops gradients,
the same ones if it adds to them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise, repeat
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.features import HELD_GRADIENTS
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.tensors.layouts import Layouts
from lightning_cudagraph.tensors.local import address_of, local
from lightning_cudagraph.tensors.writes import storage_id

Gradients = list[tuple[nn.Parameter, Tensor]]

# The number of tensors and other objects that refer to the storage with this id.
_users_of: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# The references to a tensor from C++ (saved tensors, DLPack), and one for its Python object.
_use_count: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)
_grad_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")


def _references_of_grad() -> int:
    """The Python references that `parameter.grad` counts for: 0 or 1, by the version of torch.

    If one, it stands for all references from C++, such as the views of buckets that
    `DistributedDataParallel` keeps.
    """
    parameter, gradient = nn.Parameter(torch.zeros(())), torch.zeros(())
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) - before


_REFERENCES_OF_GRAD = _references_of_grad()

_all: WeakSet[ExternalReferences] = WeakSet()


class ExternalReferences:
    """References to the gradients of a graph: to the tensors, and to their storages (views, arrays).

    Args:
        own: gradients in the memory pool of the graph, with their parameters.
        added: gradients that the graph adds to, which may be in that of another.
    """

    def __init__(self, own: Gradients, added: Gradients | None = None) -> None:
        by_id = {id(gradient): (p, gradient) for p, gradient in own}
        self._n_own = len(by_id)
        by_id |= {
            id(gradient): (p, gradient) for p, gradient in added or () if id(gradient) not in by_id
        }
        self._gradients = [*by_id.values()]
        self._parameters = [parameter for parameter, _ in self._gradients]
        self._tensors = [gradient for _, gradient in self._gradients]
        self._storages = [local(gradient).untyped_storage() for _, gradient in self._gradients]
        self._numbers = [int(storage._cdata) for storage in self._storages]
        self._layouts = Layouts(self._tensors)
        self._counts: list[list[int]] = []
        _all.add(self)

    @staticmethod
    @contextmanager
    def of_captures_apart() -> Iterator[None]:
        """Recount after a capture, because graphs refer to each other's gradients."""
        kept = [holds for holds in _all if holds.is_any_kept()]
        yield
        for holds in _all:
            if holds not in kept:
                holds.count()

    @staticmethod
    def is_one_kept(parameters: Iterable[nn.Parameter]) -> bool:
        """True if there are external references to gradients of parameters, of a graph or not."""
        found = gradients_of(parameters)
        of_graphs = {id(g): holds for holds in _all for _, g in holds._gradients}
        fresh = nn.Parameter(torch.zeros(()))
        fresh.grad = torch.zeros(())
        known = {id(holds): holds for _, g in found if (holds := of_graphs.get(id(g))) is not None}
        unknown = [(p, g) for p, g in found if id(g) not in of_graphs]
        del found
        alone = ExternalReferences([(fresh, fresh.grad)])
        alone.count()
        others = ExternalReferences(unknown)
        del unknown
        others._counts = [count * len(others._gradients) for count in alone._counts]
        return others.is_any_kept() or any(holds.is_any_kept() for holds in known.values())

    def count(self) -> None:
        """Count the references without external ones, and note where the gradients are."""
        self._layouts = Layouts(self._tensors)
        self._counts = self._counted()

    def is_any_kept(self) -> bool:
        """True if there is an external reference to a gradient, or one has other memory."""
        counts = self._counted()
        if any(
            any(map(operator.gt, now, then)) for now, then in zip(counts, self._counts, strict=False)
        ):
            return True
        if self._layouts.changed(self._tensors):
            return True
        # The count may have fallen: some references were garbage when they were counted.
        self._counts = counts
        return False

    def move_out(self) -> None:
        """Move the graph's own gradients to memory that no graph writes; it cannot be replayed after it.

        A gradient with external views stays, because views cannot move with it. So do gradients on a
        CPU, where graphs share no memory, and where an array refers to the tensor itself.
        """
        # A capture that was refused has no counts: no code has seen its gradients.
        then_of = zip(*self._counts[:2], strict=True)
        alone = {
            storage.data_ptr(): users <= users_then and uses <= uses_then
            for storage, users, uses, (users_then, uses_then) in zip(
                self._storages, *self._counted()[:2], then_of, strict=False
            )
        }
        with ExternalReferences.of_captures_apart():
            for _, gradient in self._gradients[: self._n_own]:
                place = local(gradient).untyped_storage().data_ptr()
                # Memory that user code has given a gradient is not of the graph.
                if alone.get(place, False) and gradient.device.type != "cpu":
                    gradient.data = gradient.clone()

    def _counted(self) -> list[list[int]]:
        """Count tensors on the storage, references from C++, from Python, and to the storage object."""
        none = [0] * len(self._tensors)
        users = none if _users_of is None else [*map(_users_of, self._numbers)]
        storages = [*map(sys.getrefcount, self._storages)]
        references = [*map(sys.getrefcount, self._tensors)]
        are_set = [*map(operator.is_, map(_grad_of, self._parameters), self._tensors)]
        if _use_count is None:
            uses, of_torch = none, are_set
        else:
            counts = [*map(_use_count, self._tensors)]
            uses = [*map(operator.sub, counts, are_set)]
            of_torch = [*map(operator.gt, counts, repeat(1))]
        if _REFERENCES_OF_GRAD:
            # One reference less where C++ code refers to the gradient, besides the Python object.
            references = [*map(operator.sub, references, of_torch)]
        return [users, uses, references, storages]


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
        are_others: True once user code has replaced gradients that a step adds to in place.
        in_place: parameters with gradients of user code in the last capture.
        handed: the copies of the present step, if there are any.
    """

    def __init__(self) -> None:
        self.are_given = not available(HELD_GRADIENTS)
        self.are_others = False
        self.in_place: list[nn.Parameter] = []
        self._known: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # those of user code
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by the last eager step
        self.handed: HandedOut | None = None

    def begin(self, parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]]) -> None:
        """Prepare copies for the parameters of a step that begins: dropped and added to."""
        self.handed = HandedOut(chain(*parameters()))

    def of_user_code(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters with gradients that user code refers to, and that are not of a graph."""
        of_graphs = {number for holds in _all for number in holds._numbers}
        found = []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            is_ours = _copies.get(id(parameter.grad)) is parameter.grad
            if self._is_known(parameter) or not (
                is_ours
                or storage_id(parameter.grad) in of_graphs
                or not ExternalReferences.is_one_kept([parameter])
            ):
                found.append(parameter)
        return found

    def _is_known(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        return gradient is not None and self._known.get(id(gradient)) is gradient

    @contextmanager
    def noting_made(
        self, parameters: Callable[[], tuple[list[nn.Parameter], list[nn.Parameter]]]
    ) -> Iterator[None]:
        """Note the gradients that an eager step makes: user code may keep them, but has not made them."""
        before = [(p, id(p.grad)) for p in chain(*parameters())]
        yield
        made = [p.grad for p, was in before if p.grad is not None and id(p.grad) != was]
        self._made = WeakValueDictionary({id(gradient): gradient for gradient in made})

    def are_made(self, parameters: list[nn.Parameter]) -> bool:
        """True if the last eager step has made the gradients of parameters."""
        return all(p.grad is not None and self._made.get(id(p.grad)) is p.grad for p in parameters)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that parameters have gradients of user code."""
        self._known |= {id(gradient): gradient for _, gradient in gradients_of(parameters)}

    def are_copies(self, parameters: list[nn.Parameter]) -> bool:
        """True if parameters have copies that were handed out, each its own."""
        ids = {
            id(p.grad) for p in parameters if _copies.get(id(p.grad)) is p.grad and not self._is_known(p)
        }
        return len(ids) == len(parameters)

    def clash(self, added: list[nn.Parameter]) -> bool:
        """True if gradients overlap, of which one at least is to be copied."""
        if not overlap(added):
            return False
        in_place = [] if self.are_others else self._to_be_in_place(added)
        return len(in_place) < len(added)

    def is_in_place(self, added: list[nn.Parameter]) -> bool:
        """True if a step adds to gradients of user code in their memory."""
        return not self.are_others and bool(self._to_be_in_place(added))

    def _to_be_in_place(self, added: list[nn.Parameter]) -> list[nn.Parameter]:
        if not self.are_given:
            return self.of_user_code(added)
        # User code keeps gradients of steps: that alone does not make a gradient one of its own.
        return [parameter for parameter in added if self._is_known(parameter)]

    def move_apart(
        self, dropped: list[nn.Parameter], added: list[nn.Parameter], can_be_kept: Callable[[], bool]
    ) -> None:
        """Copy gradients that the step adds to before a capture, if there are external references.

        Args:
            can_be_kept: True if user code can hold gradients between two steps.
        """
        self.in_place = []
        if can_be_kept():
            if not self.are_others:
                self.in_place = self._to_be_in_place(added)
                self.note(self.in_place)
            in_place = {*map(id, self.in_place)}
            added = [parameter for parameter in added if id(parameter) not in in_place]
            self.are_given = self.are_given or ExternalReferences.is_one_kept(added)
        if self.are_given:
            self.handed = self.handed or HandedOut([*dropped, *added, *self.in_place])
            for parameter in added:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def put_back(self) -> None:
        """Restore the gradients from before the step, which runs without a graph."""
        if self.handed is not None:
            self.handed.put_back()
            self.handed = None


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_([*map(local, targets)], [*map(local, sources)])


def gradients_of(parameters: Iterable[nn.Parameter]) -> Gradients:
    """The parameters with a gradient, and their gradients."""
    return [(p, p.grad) for p in parameters if p.grad is not None]


def overlap(parameters: list[nn.Parameter]) -> bool:
    """True if gradients overlap each other or parameters."""
    found = [*map(local, parameters), *(local(g) for _, g in gradients_of(parameters))]
    places = sorted((t.data_ptr(), t.data_ptr() + _extent_bytes(t)) for t in found if t.numel())
    return any(second < end for (_, end), (second, _) in pairwise(places))


def _extent_bytes(tensor: Tensor) -> int:
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def in_memory_of(gradient: Tensor, other: Tensor) -> bool:
    """True if two gradients have the same address and layout."""
    return gradient is other or (
        address_of(gradient) == address_of(other)
        and gradient.shape == other.shape
        and gradient.stride() == other.stride()
        and gradient.dtype == other.dtype
    )


def adopt(gradients: Gradients) -> None:
    """Move the present gradients into the graph's tensors, and bind those again."""
    # By address: several accumulation phases have tensors of their own for the same gradient.
    moved = [
        (parameter, gradient, parameter.grad)
        for parameter, gradient in gradients
        if parameter.grad is None or not in_memory_of(parameter.grad, gradient)
    ]
    if len(moved) > 1:
        targets = {storage_id(gradient) for _, gradient, _ in moved}
        moved = [
            (p, gradient, now.clone() if now is not None and storage_id(now) in targets else now)
            for p, gradient, now in moved
        ]
    for parameter, gradient, now in moved:
        if now is None:  # dropped since, by validation
            gradient.zero_()
        else:
            gradient.copy_(now)
        parameter.grad = gradient
