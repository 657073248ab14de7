"""One take of a captured step: its graph, the gradients it writes, and the turns of the host in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.backend import Graph
from lightning_cudagraph.errors import HookError

__all__ = ["Gradients", "Take", "Turn", "adopt", "gradients_of"]

T = TypeVar("T")

Gradients = list[tuple[nn.Parameter, Tensor]]


@dataclass
class Turn:
    """A turn of the host in the middle of a step.

    Attributes:
        whose: hooks, in words.
        drops: gradients are dropped in it.
        gradients: those that the step makes, as they are at this point.
    """

    whose: str
    drops: bool
    gradients: list[tuple[nn.Parameter, Tensor | None]]

    def begin(self) -> None:
        """Let the host find the gradients of this point."""
        if self.drops and all(gradient is None for _, gradient in self.gradients):
            return  # still those of the step before
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def check(self) -> None:
        """Raise if the rest of the step cannot go on from what the host has left."""
        for parameter, gradient in self.gradients:
            if parameter.grad is None if self.drops else parameter.grad is gradient:
                continue
            shape = "x".join(map(str, parameter.shape))
            did = "leaves the gradient" if self.drops else "sets or drops the gradient"
            raise HookError(
                f"{self.whose} {did} of a parameter ({shape}) in the middle of a step that is replayed;"
                " the graph makes the gradients anew, and would not see it.",
                "Let `optimizer_zero_grad` do nothing but `optimizer.zero_grad(set_to_none=True)`, and"
                " change gradients in `on_after_backward`.",
            )


def _references_of_grad() -> int:
    """How many Python references `parameter.grad` is: none, or one, by the version of torch."""
    parameter, gradient = nn.Parameter(torch.zeros(())), torch.zeros(())
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) - before


_REFERENCES_OF_GRAD = _references_of_grad()


class Take(Generic[T]):
    """One capture of the step, with the gradients that it writes.

    Args:
        graph: what was captured.
        outputs: what the step returned: static tensors.
        makes: the parameters whose gradients it makes, which are in place.
        drops: how many of these, from the first, have none if the step makes none.
        turns: of the host, in the order of the step.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: T,
        makes: list[nn.Parameter],
        drops: int,
        turns: list[Turn],
    ) -> None:
        self.graph = graph
        self.outputs = outputs
        self.turns = turns
        self.gradients = gradients_of(makes)
        # Dropped, and not made anew: not all of them take part in every kind of step.
        self._without = [parameter for parameter in makes[:drops] if parameter.grad is None]
        self._references: list[int] = []

    def replay(self, between: Callable[[T, int], None] | None, accumulated: Gradients) -> T:
        """Replay it, and leave its gradients with the parameters.

        Args:
            between: called where the host has a turn, or None for a replay without these.
            accumulated: gradients that the step adds to, in the place that the graph knows.

        Returns:
            The static outputs.
        """

        def turn(index: int) -> None:
            assert between is not None
            self.turns[index].begin()
            between(self.outputs, index)
            self.turns[index].check()
            adopt(accumulated)

        if between is None:
            self.graph.replay()
        else:
            if any(turn.drops for turn in self.turns):
                self._leave()
            self.graph.replay(turn)
        # Validation, or an eager batch, may have dropped the gradients; the graph goes on writing
        # its own, and who looks at `param.grad` after the step must find those.
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for parameter in self._without:
            parameter.grad = None
        return self.outputs

    def _leave(self) -> None:
        """Keep the gradients of the step before readable while the forward pass of this one runs.

        They lie in memory that a forward pass may write into, be they another take's.
        """
        for parameter, _ in self.gradients:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def count_references(self) -> None:
        """Note who refers to the gradients when nobody outside does."""
        self._references = self._counts()

    def give_away(self, but: frozenset[int]) -> bool:
        """Leave gradients that somebody has kept to him, before they are overwritten.

        Args:
            but: addresses of gradients that are added to, which who has kept them is to see.

        Returns:
            Whether that was all of them.
        """
        every = True
        for index, (was, now) in enumerate(zip(self._references, self._counts(), strict=False)):
            if now <= was:
                continue
            parameter, gradient = self.gradients[index]
            if gradient.data_ptr() in but:
                every = False
                continue
            self.gradients[index] = (parameter, gradient.detach())
            gradient.data = gradient.clone()
        return every

    def _counts(self) -> list[int]:
        return [
            sys.getrefcount(gradient) - (_REFERENCES_OF_GRAD if parameter.grad is gradient else 0)
            for parameter, gradient in self.gradients
        ]


def gradients_of(parameters: Iterable[nn.Parameter]) -> Gradients:
    """The gradients that there are."""
    return [(p, p.grad) for p in parameters if p.grad is not None]


def adopt(gradients: Gradients) -> None:
    """Bring gradients back to where graphs know them, with the values that they have now."""
    for parameter, gradient in gradients:
        now = parameter.grad
        # By address: it may have been left to somebody who has kept it, and be somewhere else now.
        if now is not None and (now is gradient or now.data_ptr() == gradient.data_ptr()):
            continue
        if now is None:  # dropped since, by validation
            gradient.zero_()
        else:
            gradient.copy_(now)
        parameter.grad = gradient
