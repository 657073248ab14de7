"""One captured step: static inputs, outputs, gradients, and the captures that take turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.backend import Backend, Graph
from lightning_cudagraph.capture.static import StaticBatch
from lightning_cudagraph.capture.writes import storage_id

__all__ = ["CapturedStep"]

T = TypeVar("T")


_Gradients = list[tuple[nn.Parameter, Tensor]]


def _references_of_grad() -> int:
    """How many Python references `parameter.grad` is: none, or one, by the version of torch."""
    parameter, gradient = nn.Parameter(torch.zeros(())), torch.zeros(())
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) - before


_REFERENCES_OF_GRAD = _references_of_grad()


class _Take(Generic[T]):
    """One capture of the step, with the gradients that it writes."""

    def __init__(self, graph: Graph, outputs: T, makes: list[nn.Parameter], drops: int) -> None:
        self.graph = graph
        self.outputs = outputs
        self.gradients = _gradients_of(makes)
        # Dropped, and not made anew: not all of them take part in every kind of step.
        self._without = [parameter for parameter in makes[:drops] if parameter.grad is None]
        self._references: list[int] = []

    def replay(self) -> T:
        self.graph.replay()
        # Validation, or an eager batch, may have dropped the gradients; the graph goes on writing
        # its own, and who looks at `param.grad` after the step must find those.
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for parameter in self._without:
            parameter.grad = None
        return self.outputs

    def count_references(self) -> None:
        """Note who refers to the gradients when nobody outside does."""
        self._references = self._counts()

    def give_away(self) -> None:
        """Leave gradients that somebody has kept to him, before they are overwritten."""
        for index, (was, now) in enumerate(zip(self._references, self._counts(), strict=False)):
            if now > was:
                parameter, gradient = self.gradients[index]
                self.gradients[index] = (parameter, gradient.detach())
                gradient.data = gradient.clone()

    def _counts(self) -> list[int]:
        return [
            sys.getrefcount(gradient) - (_REFERENCES_OF_GRAD if parameter.grad is gradient else 0)
            for parameter, gradient in self.gradients
        ]


def _gradients_of(parameters: Iterable[nn.Parameter]) -> _Gradients:
    return [(p, p.grad) for p in parameters if p.grad is not None]


def _adopt(gradients: _Gradients) -> None:
    for parameter, gradient in gradients:
        if parameter.grad is gradient:
            continue
        if parameter.grad is None:  # dropped since, by validation
            gradient.zero_()
        else:
            gradient.copy_(parameter.grad)
        parameter.grad = gradient


def _moved(outputs: T, place: _Gradients) -> T:
    """At the end of a captured step: its gradients, copied to where another take leaves its own."""
    if place:
        made = [parameter.grad for parameter, _ in place if parameter.grad is not None]
        torch._foreach_copy_([gradient for _, gradient in place], made)
        for parameter, gradient in place:
            parameter.grad = gradient
    return outputs


class CapturedStep(Generic[T]):
    """A training step as graphs that read one set of static buffers.

    A step with timing events is captured more than once, so that the events of one replay can be
    read while the next one runs. The captures are equal but for their events and gradients.

    Args:
        backend: where it is captured.
        static: the static buffers of the signature to capture, with the values of a batch in them.
        record: the step, as a function of the static batch. Runs once for each capture.
        drops: the parameters whose gradients the step drops and computes anew.
        adds: the parameters to whose gradients it only adds.
        takes: how many captures take turns.
        one_place: all captures leave their gradients in one place, for steps that add to them.
        kept: code of the user's runs between two replays, and can keep gradients.

    Attributes:
        static: the static buffers that it reads.
        replays: how many steps were replays; counted by who takes them.
        written: tensors older than the step that it writes into.

    Raises:
        CaptureError: if the step did something that no graph can hold; gradients, memory and random
            state are then as before.
    """

    def __init__(
        self,
        backend: Backend,
        static: StaticBatch,
        record: Callable[[Any], T],
        drops: Iterable[nn.Parameter],
        adds: Iterable[nn.Parameter],
        takes: int,
        one_place: bool = False,
        kept: bool = False,
    ) -> None:
        self._backend = backend
        self.static = static
        self._takes: list[_Take[T]] = []
        self._turn = 0
        self._kept = kept and not one_place
        self._last: _Take[T] | None = None
        self.replays = 0
        self.written: list[Tensor] = []
        dropped, added = list(drops), list(adds)
        # The graph adds to these in place, where they are; all takes to the same.
        self._accumulated = _gradients_of(added)
        # Without a gradient to add to, the step makes one, as long as there is none before it.
        self._absent = [parameter for parameter in added if parameter.grad is None]
        makes = [*dropped, *self._absent]
        before = [parameter.grad for parameter in makes]
        try:
            for _ in range(takes):
                # Without a gradient to add to, the backward pass makes new ones in the graph's pool,
                # at no cost; the ones of the take before are kept by it.
                for parameter in makes:
                    parameter.grad = None
                place = self._takes[0].gradients if one_place and self._takes else []
                with self.static.unchanged():
                    graph, outputs = backend.capture(lambda: _moved(record(self.static.batch), place))  # noqa: B023
                self._takes.append(_Take(graph, outputs, makes, len(dropped)))
                self.written += backend.written(graph)
            self._absent = [parameter for parameter in self._absent if parameter.grad is not None]
            own = {storage_id(gradient) for take in self._takes for _, gradient in take.gradients}
            self.written = [tensor for tensor in self.written if storage_id(tensor) not in own]
        except BaseException:
            self.release()
            raise
        finally:
            for parameter, gradient in zip(makes, before, strict=True):
                parameter.grad = gradient

    def stale(self) -> str | None:
        """Why this is not the step any more, in words, or None."""
        if any(parameter.grad is not None for parameter in self._absent):
            return "a parameter that had no gradient before the step has one now"
        return None

    def adopt_gradients(self) -> None:
        """Bring the gradients that the step only adds to back to the place that the graph knows."""
        _adopt(self._accumulated)

    def put_back_gradients(self) -> None:
        """Bring the gradients that the step makes back to where it makes them."""
        _adopt(self._takes[0].gradients)

    def run_eagerly(self, step: Callable[[Any], T], batch: Any) -> T:
        """Run a function of the static batch on a batch of this signature, without a graph."""
        self.static.copy_from(batch)
        return step(self.static.batch)

    def replay(self, batch: Any) -> T:
        """Run the step on a batch of this signature.

        Args:
            batch: the batch; its tensors are copied into the static buffers.

        Returns:
            What `record` returned in the capture whose turn it is. The tensors in it are static, and
            are overwritten by the next replay.
        """
        self.static.copy_from(batch)
        self.adopt_gradients()
        take = self._takes[self._turn]
        self._turn = (self._turn + 1) % len(self._takes)
        outputs = take.replay()
        if self._kept:
            take.count_references()
            self._last = take
        return outputs

    def give_away(self) -> None:
        """Leave the gradients of the last replay to whoever has kept them.

        To be called before any replay: all graphs of a pool may write into the same memory.
        """
        if self._last is not None:
            self._last.give_away()
            self._last = None

    def release(self) -> None:
        """Let go of the graphs and their memory."""
        for take in self._takes:
            self._backend.release(take.graph)
            for parameter, gradient in take.gradients:
                # The gradient lives in the graph's memory. Who still needs it gets a copy.
                if parameter.grad is gradient:
                    parameter.grad = gradient.clone()
        self._takes = []
