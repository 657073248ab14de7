"""Events inside a captured step: what they mark, and the times between them.

The forward pass of a layer is marked by module hooks. Its backward pass is marked on autograd's own
nodes: it begins when the gradient of its output is ready, and ends when that of its input is. Full
backward hooks would do the same, but break models with in-place activations. The hooks are there
for the time of a capture only; what stays is event nodes in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from lightning_cudagraph.capture.backend import Backend, Event
from lightning_cudagraph.timing.spans import (
    BACKWARD_TAG,
    FORWARD_TAG,
    STEP_TAG,
    Lane,
    Span,
    SpanLayout,
)

__all__ = ["StepMarks"]

_LANES: tuple[tuple[str, Lane], ...] = ((FORWARD_TAG, "forward"), (BACKWARD_TAG, "backward"))


def _gradient_nodes(tree: Any) -> list[Any]:
    return [leaf.grad_fn for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.grad_fn]


class _Point:
    """A point in the step that is marked when it is passed, if it is.

    Attributes:
        number: that of its mark, or None as long as the step has not come to it.
    """

    number: int | None = None


class StepMarks:
    """The events of one captured step.

    The step calls `forward_ended`, `backward_ended` and the end of `recording`; layers are marked by
    hooks that `recording` puts on them.

    Args:
        backend: where the step runs.
        layers: the modules to time, by name.
        has_optimizer: the step ends with that of the optimizer, and not with the backward pass.

    Attributes:
        layout: what is timed, after `recording`: ``step_ms/{forward,backward,optimizer,total}`` (the
            last two only with the optimizer), ``layer_forward_ms/{module}`` and
            ``layer_backward_ms/{module}``. Marks are numbered in the order of the step.
    """

    layout: SpanLayout

    def __init__(
        self, backend: Backend, layers: Mapping[str, nn.Module], has_optimizer: bool = True
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._has_optimizer = has_optimizer
        self._events: list[Event] = []
        self._start = _Point()
        self._forward_end = _Point()
        self._backward_end = _Point()
        self._end = _Point()
        self._calls: dict[str, list[tuple[_Point, _Point]]] = {}
        # Neighbouring layers meet at the same node, and share its point. Keeps the nodes alive.
        self._at_node: dict[Any, _Point] = {}
        self._forward_done = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Mark the beginning and the end of the step, and its layers in between."""
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                if isinstance(layer, torch.jit.ScriptModule):
                    continue  # takes no hooks
                for handle in self._hook(name, layer):
                    stack.callback(handle.remove)
            self._pass(self._start)
            yield
            self._pass(self._end)
        self._at_node.clear()
        self._lay_out()

    def forward_ended(self) -> None:
        """Mark the end of the forward pass, which is the beginning of the backward pass."""
        # What is called after this is recomputed by activation checkpointing, in autograd's thread, and
        # belongs to the backward pass.
        self._forward_done = True
        self._pass(self._forward_end)

    def backward_ended(self) -> None:
        """Mark the end of the backward pass, which is the beginning of the optimizer's part."""
        self._pass(self._backward_end)

    @property
    def start(self) -> Event:
        """The first of the events."""
        return self._events[0]

    def read(self) -> list[float]:
        """When the last replay passed its marks, waiting for its end if need be.

        Returns:
            Milliseconds after the first mark, one for each of the layout's.
        """
        events = self._events
        events[-1].synchronize()
        return [0.0, *map(events[0].elapsed_time, events[1:])]

    def _pass(self, point: _Point) -> None:
        event = self._backend.event()
        self._backend.mark(event)
        point.number = len(self._events)
        self._events.append(event)

    def _hook(self, name: str, layer: nn.Module) -> list[Any]:
        entries: list[tuple[_Point, list[Any]]] = []  # a stack: a layer may be called inside itself

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._forward_done:
                return
            start = _Point()
            # The nodes of the inputs, taken now: an in-place layer changes its input's node.
            entries.append((start, _gradient_nodes((args, kwargs))))
            self._pass(start)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._forward_done:
                return
            start, input_nodes = entries.pop()
            end = _Point()
            self._pass(end)
            self._calls.setdefault(FORWARD_TAG + name, []).append((start, end))
            output_nodes = [node for node in _gradient_nodes(output) if node not in input_nodes]
            if output_nodes:
                begins = self._point_at(output_nodes[0])
                ends = self._point_at(input_nodes[0]) if input_nodes else self._backward_end
                self._calls.setdefault(BACKWARD_TAG + name, []).append((begins, ends))

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, with_kwargs=True),
        ]

    def _point_at(self, node: Any) -> _Point:
        """The point at which `node` is about to run in the backward pass."""
        if node not in self._at_node:
            point = self._at_node[node] = _Point()

            def about_to_run(gradients: Any) -> None:
                self._pass(point)

            node.register_prehook(about_to_run)
        return self._at_node[node]

    def _lay_out(self) -> None:
        """Say what the marks mean; points that the step has not come to mean nothing."""
        timed: list[tuple[str, Lane, list[tuple[_Point, _Point]]]] = [
            (f"{STEP_TAG}forward", "forward", [(self._start, self._forward_end)]),
            (f"{STEP_TAG}backward", "backward", [(self._forward_end, self._backward_end)]),
        ]
        if self._has_optimizer:
            timed += [
                (f"{STEP_TAG}optimizer", "optimizer", [(self._backward_end, self._end)]),
                (f"{STEP_TAG}total", "host", [(self._start, self._end)]),
            ]
        for name in self._layers:
            for tag, lane in _LANES:
                timed.append((tag + name, lane, self._calls.get(tag + name, [])))
        spans = []
        for tag, lane, points in timed:
            calls = tuple(
                (begin.number, end.number)
                for begin, end in points
                # Nodes need not run: an output may be detached.
                if begin.number is not None and end.number is not None
            )
            if calls:
                spans.append(Span(tag, lane, calls))
        self.layout = SpanLayout(tuple(spans), len(self._events))
