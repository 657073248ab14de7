"""The gradients of a captured step: those that it drops and makes, and those that it adds to."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_cudagraph.capture.gradients.external_references import adopt, gradients_of, in_memory_of
from lightning_cudagraph.tensors.layouts import Layouts
from lightning_cudagraph.tensors.writes import storage_id


class StepGradients:
    """The gradients of parameters before and after a captured step.

    Args:
        dropped: the parameters with gradients that the step drops and makes.
        added: those with gradients that it only adds to.
        in_place: parameters with gradients of user code, which the step adds to in their memory.

    Attributes:
        makes: the parameters with gradients that the step makes.
        accumulated: the gradients that it adds to, at the addresses in the graph.
        only_reads: the parameters with gradients among these that it does not write.
    """

    def __init__(
        self, dropped: list[nn.Parameter], added: list[nn.Parameter], in_place: Iterable[nn.Parameter]
    ) -> None:
        self.dropped = dropped
        self._in_place = {*map(id, in_place)}
        # All instances add to these gradients in place. Kept as aliases: a reference to the gradient
        # itself would count as an external one.
        self.accumulated = [(parameter, grad.detach()) for parameter, grad in gradients_of(added)]
        self._added_layouts = Layouts([gradient for _, gradient in self.accumulated])
        # Parameters without a gradient to add to: the step makes one, or leaves the parameter alone. The
        # graph is valid only as long as they have none before the step.
        self.absent = [parameter for parameter in added if parameter.grad is None]
        self.makes = [*dropped, *self.absent]
        self.only_reads: list[nn.Parameter] = []

    def note_written(self, storages: Container[int]) -> None:
        """Note the memory that the step writes: zeros do not serve as a gradient that it only reads."""
        self.only_reads = [p for p, gradient in self.accumulated if storage_id(gradient) not in storages]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the gradients that the step drops on exit."""
        kept = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in self.makes
        ]
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def stale(self, is_varied: bool = False) -> str | None:
        """Return the reason why the graph does not match the step, or None.

        Args:
            is_varied: micro-batches of other signatures come before it. Without them, only a drop of all
                gradients can take one to which the step adds, and zeros serve as well. With them, no
                micro-batch may have used the parameter, and optimizers skip one without a gradient.
        """
        if any(parameter.grad is not None for parameter in self.absent):
            return "a parameter that had no gradient before the step has one now"
        strict = self.adds if is_varied and not self.dropped else self.only_reads
        if any(parameter.grad is None for parameter in strict):
            return "a parameter that had a gradient before the step has none now"
        return None

    def replaced(self) -> tuple[list[nn.Parameter], bool]:
        """Find parameters with gradients in other memory than those that the step adds to.

        Returns:
            The parameters, and True if user code has replaced one to which the step adds in place.
        """
        if self._are_in_place():
            return [], False
        moved = [p for p, g in self.accumulated if p.grad is not None and not in_memory_of(p.grad, g)]
        missing = self._in_place and any(
            p.grad is None for p, _ in self.accumulated if id(p) in self._in_place
        )
        return moved, bool(missing) or any(id(p) in self._in_place for p in moved)

    def has_other_layouts(self) -> bool:
        """True if gradients that the step adds to have other strides or alignments than in the graph."""
        now = [g if p.grad is None else p.grad for p, g in self.accumulated]
        return self._added_layouts.changed_but_for_addresses(now)

    @property
    def adds(self) -> list[nn.Parameter]:
        """The parameters with gradients that the step only adds to."""
        return [parameter for parameter, _ in self.accumulated]

    def adopt(self) -> None:
        """Move the gradients that the step only adds to back to the addresses in the graph."""
        if not self._are_in_place():
            adopt(self.accumulated)

    def _are_in_place(self) -> bool:
        """True if all gradients that the step adds to are at the addresses in the graph."""
        added = self.accumulated
        return not added or not self._added_layouts.changed([p.grad for p, _ in added])
