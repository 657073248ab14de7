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

__all__ = ["StepMarks"]

FORWARD_TAG = "layer_forward_ms/"
BACKWARD_TAG = "layer_backward_ms/"
STEP_TAG = "step_ms/"


def _gradient_nodes(tree: Any) -> list[Any]:
    return [leaf.grad_fn for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.grad_fn]


class StepMarks:
    """The events of one captured step.

    The step calls `forward_ended`, `backward_ended` and the end of `recording`; layers are marked by
    hooks that `recording` puts on them.

    Args:
        backend: where the step runs.
        layers: the modules to time, by name.
        has_optimizer: the step ends with that of the optimizer, and not with the backward pass.

    Attributes:
        tags: what is timed, after `recording`: ``step_ms/{forward,backward,optimizer,total}`` (the last
            two only with the optimizer), ``layer_forward_ms/{module}`` and
            ``layer_backward_ms/{module}``.
    """

    def __init__(
        self, backend: Backend, layers: Mapping[str, nn.Module], has_optimizer: bool = True
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._has_optimizer = has_optimizer
        self.tags: tuple[str, ...] = ()
        self._spans: tuple[list[tuple[Event, Event]], ...] = ()
        self._start = backend.event()
        self._forward_end = backend.event()
        self._backward_end = backend.event()
        self._end = backend.event()
        self._forward_spans: dict[str, list[tuple[Event, Event]]] = {}
        self._backward_spans: dict[str, list[tuple[Event, Event]]] = {}
        # Neighbouring layers meet at the same node, and share its event. Keeps the nodes alive.
        self._at_node: dict[Any, Event] = {}
        # Nodes need not run: an output may be detached, or recomputed by activation checkpointing.
        self._reached: set[int] = set()
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
            self._backend.mark(self._start)
            yield
            self._backend.mark(self._end)
        self._at_node.clear()
        self._flatten()

    def forward_ended(self) -> None:
        """Mark the end of the forward pass, which is the beginning of the backward pass."""
        # What is called after this is recomputed by activation checkpointing, in autograd's thread, and
        # belongs to the backward pass.
        self._forward_done = True
        self._backend.mark(self._forward_end)

    def backward_ended(self) -> None:
        """Mark the end of the backward pass, which is the beginning of the optimizer's part."""
        self._backend.mark(self._backward_end)

    def _hook(self, name: str, layer: nn.Module) -> list[Any]:
        entries: list[tuple[Event, list[Any]]] = []  # a stack: a layer may be called inside itself

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._forward_done:
                return
            start = self._backend.event()
            # The nodes of the inputs, taken now: an in-place layer changes its input's node.
            entries.append((start, _gradient_nodes((args, kwargs))))
            self._backend.mark(start)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._forward_done:
                return
            start, input_nodes = entries.pop()
            end = self._backend.event()
            self._backend.mark(end)
            self._forward_spans.setdefault(name, []).append((start, end))
            output_nodes = [node for node in _gradient_nodes(output) if node not in input_nodes]
            if output_nodes:
                begins = self._event_at(output_nodes[0])
                ends = self._event_at(input_nodes[0]) if input_nodes else self._backward_end
                self._backward_spans.setdefault(name, []).append((begins, ends))

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, with_kwargs=True),
        ]

    def _event_at(self, node: Any) -> Event:
        """The event that is marked when `node` is about to run in the backward pass."""
        if node not in self._at_node:
            event = self._at_node[node] = self._backend.event()

            def about_to_run(gradients: Any) -> None:
                self._backend.mark(event)
                self._reached.add(id(event))

            node.register_prehook(about_to_run)
        return self._at_node[node]

    def _flatten(self) -> None:
        """Lay out what `read` goes through after every replay."""
        spans: dict[str, list[tuple[Event, Event]]] = {
            f"{STEP_TAG}forward": [(self._start, self._forward_end)],
            f"{STEP_TAG}backward": [(self._forward_end, self._backward_end)],
        }
        if self._has_optimizer:
            spans[f"{STEP_TAG}optimizer"] = [(self._backward_end, self._end)]
            spans[f"{STEP_TAG}total"] = [(self._start, self._end)]
        for name in self._layers:
            if name in self._forward_spans:
                spans[FORWARD_TAG + name] = self._forward_spans[name]
            backward = [
                (begins, ends)
                for begins, ends in self._backward_spans.get(name, [])
                if id(begins) in self._reached
                and (ends is self._backward_end or id(ends) in self._reached)
            ]
            if backward:
                spans[BACKWARD_TAG + name] = backward
        self.tags = tuple(spans)
        self._spans = tuple(spans.values())

    def read(self) -> list[float]:
        """The times of the last replay, waiting for its end if need be.

        Returns:
            Milliseconds, one for each of `tags`. Layers called several times in a step have the sum
            of their calls.
        """
        self._end.synchronize()
        return [
            spans[0][0].elapsed_time(spans[0][1])
            if len(spans) == 1
            else sum(start.elapsed_time(end) for start, end in spans)
            for spans in self._spans
        ]
