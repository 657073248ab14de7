"""Gradients that a captured step uses or makes, and that no replay would find or make.

Lightning calls `training_step` before it drops the gradients of the step before, whose memory the graph
reuses. And a graph knows the parameters of the module and of its optimizer: a replay gives no other
tensor the gradient that the capture has made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid, refuse
from lightning_cudagraph.device.sentry.own_modes import InputsMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.writes import has_memory, storage_id

T = TypeVar("T")
_KEEP_IT = (
    "Write what you need of it into a registered buffer in `on_before_optimizer_step`"
    " (`self.norm.copy_(...)`), and read the buffer."
)
_REGISTER = (
    "Make it a parameter of the module, `self.name = nn.Parameter(...)`, or register the layer that it"
    " is of; it may have an optimizer of its own."
)


class LostGradients:
    """The gradients of one captured step.

    Args:
        module: the module; all of its parameters are known to the graph.
        stepped: the parameters of the optimizer.
        dropped: the parameters with gradients from the step before, which this step drops.
        batch: the static batch, whose gradients are those of a batch alone.
    """

    def __init__(
        self,
        module: nn.Module,
        stepped: Iterable[nn.Parameter],
        dropped: Sequence[nn.Parameter],
        batch: Any,
    ) -> None:
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._dropped = dropped
        self._known = {*self._names, *map(id, stepped)}
        leaves = (leaf for _, leaf in flatten_batch(batch))
        self._own_memory = {storage_id(leaf) for leaf in leaves if has_memory(leaf)}
        self._given: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by identity of the gradient
        self._places: set[int] = set()  # storages of these gradients
        self._others: dict[int, tuple[ref[Tensor], Tensor | None]] = {}

    def unused_in(self, step: Callable[[], T]) -> Callable[[], T]:
        """Return a step that is refused if it uses gradients of the step before."""

        def run() -> T:
            # Without memory of their own: no op can take a value of them.
            kinds = [(getattr(p, "grad_dtype", None) or p.dtype, p.device) for p in self._dropped]
            memory = {kind: torch.empty((), dtype=kind[0], device=kind[1]) for kind in {*kinds}}
            for parameter, kind in zip(self._dropped, kinds, strict=True):
                if parameter.grad is None:
                    gradient = parameter.grad = memory[kind].expand_as(parameter)
                    self._given[id(gradient)] = parameter, gradient
                    self._places.add(storage_id(gradient))
            try:
                with _Watch(self):
                    return step()
            finally:
                self.take_away()

        return run

    def take_away(self) -> None:
        """Let the parameters have no gradients, as the graph finds them."""
        for parameter, gradient in self._given.values():
            if parameter.grad is gradient:
                parameter.grad = None

    def note(self, inputs: Collection[Tensor], made: set[int]) -> None:
        """Look at the inputs of an op; `made` are the storages that the step has made so far."""
        self.refuse_use(inputs)
        for tensor in inputs:
            if not (tensor.requires_grad and tensor.is_leaf) or id(tensor) in self._known:
                continue
            if id(tensor) not in self._others and storage_id(tensor) not in made | self._own_memory:
                self._others[id(tensor)] = ref(tensor), tensor.grad

    def refuse_use(self, tensors: Iterable[Tensor]) -> None:
        """Refuse the step if one of some tensors is a gradient of the step before."""
        for tensor in tensors:
            if storage_id(tensor) in self._places:
                parameter, _ = self._given.get(id(tensor), (None, None))
                name = self._names.get(id(parameter))
                whose = f"`{name}`" if name else "a parameter"
                what = f"the gradient of {whose} from the step before, whose memory it reuses"
                forbid(what, _KEEP_IT, user_location())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give other tensors the gradients that they had before, if the enclosed step fails."""
        try:
            yield
        except BaseException:
            for leaf, before in self._moved():
                leaf.grad = before
            raise

    def check(self) -> None:
        """Refuse the step if it has made the gradient of a tensor that the graph does not know.

        Call it when nothing holds the autograd graph of the step any more: what lives then is held by
        code that may read its gradient.
        """
        moved = [*self._moved()]
        for leaf, before in moved:
            leaf.grad = before
        for shape in (tuple(leaf.shape) for leaf, _ in moved):
            error = CaptureError(
                f"The training step makes the gradient of a tensor of shape {shape} that is no parameter"
                " of the module: replays would not give it one.",
                _REGISTER,
            )
            refuse(error, ("gradient", shape))

    def _moved(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The other tensors that have a new gradient, with the one from before the step."""
        for other, before in self._others.values():
            if (leaf := other()) is not None and leaf.grad is not None and leaf.grad is not before:
                yield leaf, before


class _Watch(InputsMode):
    """Shows the inputs of ops to `LostGradients`."""

    def __init__(self, gradients: LostGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def look(self, inputs: list[Tensor]) -> None:
        self._gradients.note(inputs, self.made)
