"""Graph breaks of a capture instance: user hooks on the host in the middle of every replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_cudagraph.capture.gradients.external_references import (
    ExternalReferences,
    Gradients,
    gradients_of,
    overlap,
)
from lightning_cudagraph.capture.gradients.gradient_copies import HandedOut
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.tensors.layouts import Layouts

WRITE_INTO_IT = "Write into the gradient instead: `p.grad.copy_(...)`."


@dataclass
class GraphBreak:
    """A graph break: user hooks run on the host in the middle of every replay.

    Attributes:
        hooks: their names, as the subject of a sentence.
        drops: gradients are dropped at this break.
        gradients: the gradients that the step makes, at this break.
    """

    hooks: str
    drops: bool
    gradients: list[tuple[nn.Parameter, Tensor | None]]

    def begin(self) -> None:
        """Give the parameters their gradients at this break."""
        if self.drops and all(gradient is None for _, gradient in self.gradients):
            return  # parameters still have the gradients of the step before
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    @property
    def made(self) -> Gradients:
        """The gradients that hooks find at this break and may change in place."""
        return [] if self.drops else [(p, g) for p, g in self.gradients if g is not None]

    def check(self, handed: HandedOut | None) -> None:
        """Raise if the rest of the graph would ignore what the hooks did to gradients.

        Args:
            handed: the copies that the hooks saw; None if they saw the gradients of the graph.
        """
        for parameter, gradient in self.gradients:
            if gradient is not None and handed is not None:
                gradient = handed.own(gradient)
            if parameter.grad is None if self.drops else parameter.grad is gradient:
                continue
            shape = "x".join(map(str, parameter.shape))
            did = "leaves the gradient" if self.drops else "sets or drops the gradient"
            raise HookError(
                f"{self.hooks} {did} of a parameter ({shape}) in the middle of a step that is replayed;"
                " the graph makes its own gradients, and would ignore that.",
                "Let `optimizer_zero_grad` do nothing but `optimizer.zero_grad(set_to_none=True)`, and"
                " change gradients in `on_after_backward`.",
            )

    @contextmanager
    def watched(self, handed: HandedOut | None, accumulated: Gradients) -> Iterator[None]:
        """Raise if the hooks give parameters other gradients, or gradients other memory."""
        parameters = [parameter for parameter, _ in (*self.gradients, *accumulated)]
        found = [] if handed is not None or self.drops else gradients_of(parameters)
        layouts = Layouts([gradient for _, gradient in found])
        before = [(parameter, id(parameter.grad)) for parameter, _ in accumulated]
        yield
        others = [p for p, was in before if p.grad is not None and id(p.grad) != was]
        if layouts.changed([gradient for _, gradient in found]) or (
            others and (overlap(parameters) or ExternalReferences.is_one_kept(others))
        ):
            raise HookError(
                f"{self.hooks} gives a gradient other memory (`p.grad = ...`, `p.grad.data = ...`) in"
                " the middle of a step that is replayed; the graph would not see it change.",
                WRITE_INTO_IT,
            )
