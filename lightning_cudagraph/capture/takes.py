"""One take of a captured step: its graph, the gradients it writes, and the turns of the host in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from lightning_cudagraph.device.backend import Graph
from lightning_cudagraph.errors import HookError
from lightning_cudagraph.tensors.holds import Gradients, HandedOut, adopt, gradients_of

__all__ = ["Take", "Turn"]

T = TypeVar("T")


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

    @property
    def made(self) -> Gradients:
        """Those of the gradients that the host finds at this point, and may change in place."""
        return [] if self.drops else [(p, g) for p, g in self.gradients if g is not None]

    def check(self, handed: HandedOut | None) -> None:
        """Raise if the rest of the step cannot go on from what the host has left.

        Args:
            handed: what the host was given in their place, or None.
        """
        for parameter, gradient in self.gradients:
            if gradient is not None and handed is not None:
                gradient = handed.own(gradient)
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


class Take(Generic[T]):
    """One capture of the step, with the gradients that it writes.

    Args:
        graph: what was captured.
        outputs: what the step returned: static tensors.
        makes: the parameters whose gradients it makes, which are in place.
        drops: how many of these, from the first, have none if the step makes none.
        turns: of the host, in the order of the step.

    Attributes:
        replayed: whether it has ever been.
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
        self.replayed = False
        self.outputs = outputs
        self.turns = turns
        self.gradients = gradients_of(makes)
        # Dropped, and not made anew: not all of them take part in every kind of step.
        self._without = [parameter for parameter in makes[:drops] if parameter.grad is None]

    def replay(
        self,
        between: Callable[[T, int], None] | None,
        accumulated: Gradients,
        handed: HandedOut | None,
    ) -> T:
        """Replay it, and leave its gradients with the parameters.

        Args:
            between: called where the host has a turn, or None for a replay without these.
            accumulated: gradients that the step adds to, in the place that the graph knows.
            handed: what the host finds in place of the graph's gradients, or None if it finds those.

        Returns:
            The static outputs.
        """

        def turn(index: int) -> None:
            assert between is not None
            turn = self.turns[index]
            turn.begin()
            if handed is not None:
                handed.give(accumulated)
                handed.give(turn.made)
            between(self.outputs, index)
            turn.check(handed)
            if handed is not None:
                handed.take_back(turn.made)
            adopt(accumulated)

        self.replayed = True
        if between is None:
            self.graph.replay()
        else:
            if handed is None and any(turn.drops for turn in self.turns):
                self._leave()
            self.graph.replay(turn)
        # Validation, or an eager batch, may have dropped the gradients; the graph goes on writing
        # its own, and who looks at `param.grad` after the step must find those.
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for parameter in self._without:
            parameter.grad = None
        return self.outputs

    def hand_out(self, accumulated: Gradients, handed: HandedOut) -> None:
        """After a replay: give the parameters copies, which no replay overwrites."""
        handed.give(accumulated)
        handed.give(self.gradients)
        for parameter in self._without:
            parameter.grad = None

    def _leave(self) -> None:
        """Keep the gradients of the step before readable while the forward pass of this one runs.

        They lie in memory that a forward pass may write into, be they another take's.
        """
        for parameter, _ in self.gradients:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
