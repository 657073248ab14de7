"""External references to gradients of graphs, and gradients in other memory.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_cudagraph.tensors.layouts import Layouts, are_alike, extent
from lightning_cudagraph.tensors.local import address_of, is_split, local
from lightning_cudagraph.tensors.writes import storage_id, users_of

Gradients = list[tuple[nn.Parameter, Tensor]]
# By kind, a count for each gradient: equal ones, if no reference was made or dropped in between.
_Counts = list[list[int]]

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
        self._counts: _Counts = []
        _all.add(self)

    @staticmethod
    @contextmanager
    def recounted_after_capture() -> Iterator[None]:
        """Recount after a capture, because graphs refer to each other's gradients."""
        kept = [holds for holds in _all if holds.is_any_kept()]
        yield
        for holds in _all:
            if holds not in kept:
                holds.count()

    @staticmethod
    def is_one_kept(parameters: Iterable[nn.Parameter]) -> bool:
        """True if there are external references to gradients of parameters, of a graph or not."""
        return bool(ExternalReferences.kept(parameters))

    @staticmethod
    def kept(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters to whose gradients there are external references."""
        found = gradients_of(parameters)
        of_graphs = {id(g): holds for holds in _all for _, g in holds._gradients}
        fresh = nn.Parameter(torch.zeros(()))
        fresh.grad = torch.zeros(())
        known = {id(holds): holds for _, g in found if (holds := of_graphs.get(id(g))) is not None}
        kept_of = {number for number, holds in known.items() if holds.is_any_kept()}
        named = [p for p, g in found if id(of_graphs.get(id(g))) in kept_of]
        unknown = [(p, g) for p, g in found if id(g) not in of_graphs]
        del found
        alone = ExternalReferences([(fresh, fresh.grad)])
        alone.count()
        others = ExternalReferences(unknown)
        del unknown
        # The backward pass of `torch.cat` leaves several gradients in one storage. Local tensors of
        # `DTensor`s are views.
        sharing = Counter(others._numbers)
        more = [
            sys.maxsize if is_split(type(gradient)) else sharing[number] - 1
            for gradient, number in zip(others._tensors, others._numbers, strict=True)
        ]
        none = [0] * len(more)
        expected = [
            [count[0] + extra for extra in extras]
            for count, extras in zip(_references(alone._counts), (more, none, none, more), strict=True)
        ]
        rising = [
            any(map(operator.gt, now, then))
            for now, then in zip(
                zip(*_references(others._counted()), strict=True),
                zip(*expected, strict=True),
                strict=True,
            )
        ]
        return named + [p for p, is_kept in zip(others._parameters, rising, strict=True) if is_kept]

    @staticmethod
    def storages_of_graphs() -> set[int]:
        """The ids of the storages of all gradients that graphs write."""
        return {number for holds in _all for number in holds._numbers}

    def count(self) -> None:
        """Count the references without external ones, and note where the gradients are."""
        self._layouts = Layouts(self._tensors)
        self._counts = self._counted()

    def is_any_kept(self) -> bool:
        """True if there is an external reference to a gradient, or one has other memory."""
        counts = self._counted()
        if counts != self._counts and any(
            any(map(operator.gt, now, then))
            for now, then in zip(_references(counts), _references(self._counts), strict=False)
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
        then_of = zip(*_references(self._counts)[:2], strict=True)
        alone = {
            storage.data_ptr(): users <= users_then and uses <= uses_then
            for storage, users, uses, (users_then, uses_then) in zip(
                self._storages, *_references(self._counted())[:2], then_of, strict=False
            )
        }
        with ExternalReferences.recounted_after_capture():
            for _, gradient in self._gradients[: self._n_own]:
                place = local(gradient).untyped_storage().data_ptr()
                # Memory that user code has given a gradient is not of the graph.
                if alone.get(place, False) and _is_in_pool(gradient):
                    gradient.data = gradient.clone()

    def _counted(self) -> _Counts:
        return [
            [] if users_of is None else [*map(users_of, self._numbers)],
            [] if _use_count is None else [*map(_use_count, self._tensors)],
            [*map(sys.getrefcount, self._tensors)],
            [*map(sys.getrefcount, self._storages)],
            [*map(operator.is_, map(_grad_of, self._parameters), self._tensors)],
        ]


def _is_in_pool(gradient: Tensor) -> bool:
    """True if the memory of a graph's gradient is that of other graphs, too; not on the emulator."""
    return gradient.device.type != "cpu"


def _references(counts: _Counts) -> _Counts:
    """Tensors on each storage, and references from C++, from Python, and to the storage object."""
    if not counts:
        return []
    users, uses, references, storages, are_set = counts
    of_torch = are_set
    if uses:
        of_torch = [*map(operator.gt, uses, repeat(1))]
        uses = [*map(operator.sub, uses, are_set)]
    if _REFERENCES_OF_GRAD:
        # One reference less where C++ code refers to the gradient, besides the Python object.
        references = [*map(operator.sub, references, of_torch)]
    none = [0] * len(references)
    return [users or none, uses or none, references, storages]


def gradients_of(parameters: Iterable[nn.Parameter]) -> Gradients:
    """The parameters with a gradient, and their gradients."""
    return [(p, p.grad) for p in parameters if p.grad is not None]


def overlap(parameters: list[nn.Parameter]) -> bool:
    """True if gradients overlap each other or parameters."""
    gradients = [local(gradient) for _, gradient in gradients_of(parameters)]
    places = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), is_gradient)
        for tensors, is_gradient in ((map(local, parameters), False), (gradients, True))
        for tensor in tensors
        if tensor.numel()
    )
    end = end_of_gradients = 0
    for start, its_end, is_gradient in places:
        if start < (end if is_gradient else end_of_gradients):
            return True
        end = max(end, its_end)
        end_of_gradients = max(end_of_gradients, its_end if is_gradient else 0)
    return False


def _extent_bytes(tensor: Tensor) -> int:
    return extent(tensor.shape, tensor.stride()) * tensor.itemsize


def in_memory_of(gradient: Tensor, other: Tensor) -> bool:
    """True if two gradients have the same address and layout."""
    return gradient is other or (
        address_of(gradient) == address_of(other) and are_alike(gradient, other)
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
