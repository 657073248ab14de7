"""A capture instance: one graph of a step, its gradients and its graph breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from lightning_cudagraph.capture.gradient_copies import HandedOut
from lightning_cudagraph.device.backend import Graph
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.tensors.external_references import (
    ExternalReferences,
    Gradients,
    adopt,
    gradients_of,
    overlap,
)
from lightning_cudagraph.tensors.layouts import Layouts

T = TypeVar("T")


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
                "Write into the gradient instead: `p.grad.copy_(...)`.",
            )


class CaptureInstance(Generic[T]):
    """One graph of a step, with the gradients that it writes.

    Args:
        makes: the parameters with gradients from this graph; they have these gradients now.
        drops: number of parameters, from the first of `makes`, that have no gradient after the step if
            it makes none.

    Attributes:
        replayed: True from its first replay on.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: T,
        makes: list[nn.Parameter],
        drops: int,
        breaks: list[GraphBreak],
        is_timed: bool,
    ) -> None:
        self.graph = graph
        self.is_timed = is_timed
        self.replayed = False
        self.outputs = outputs
        self.breaks = breaks
        self.gradients = gradients_of(makes)
        # Dropped and not made again: a parameter may take no part in this kind of step.
        self._without = [parameter for parameter in makes[:drops] if parameter.grad is None]

    def replay(
        self,
        between: Callable[[T, int], None] | None,
        accumulated: Gradients,
        handed: HandedOut | None,
    ) -> T:
        """Replay, give the parameters their gradients, and return the static outputs.

        Args:
            between: called at each graph break; None for a replay without breaks.
            accumulated: the gradients that the step adds to, at the addresses in the graph.
            handed: the copies of gradients that hooks see; None if they see those of the graph.
        """

        def at_break(index: int) -> None:
            assert between is not None
            graph_break = self.breaks[index]
            graph_break.begin()
            if handed is not None:
                handed.give(accumulated)
                handed.give(graph_break.made)
            with graph_break.watched(handed, accumulated):
                between(self.outputs, index)
            graph_break.check(handed)
            if handed is not None:
                handed.take_back(graph_break.made)
            adopt(accumulated)

        self.replayed = True
        if between is None:
            self.graph.replay()
        else:
            if handed is None and any(each.drops for each in self.breaks):
                self._leave()
            self.graph.replay(at_break)
        # Validation or an eager batch may have dropped the gradients. The graph still writes its own,
        # and code that reads `param.grad` after the step must find these.
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:  # to read costs a fourth of to set
                parameter.grad = gradient
        for parameter in self._without:
            if parameter.grad is not None:
                parameter.grad = None
        return self.outputs

    def copy_out(self, accumulated: Gradients, handed: HandedOut) -> None:
        """Copy the gradients of the last replay out of the graph, for the parameters to have."""
        handed.give(accumulated)
        handed.give(self.gradients)
        for parameter in self._without:
            parameter.grad = None

    def _leave(self) -> None:
        """Clone the gradients of the step before, so that hooks in the forward pass can read them.

        Their memory may be reused by the forward pass, even if another instance made them.
        """
        for parameter, _ in self.gradients:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
