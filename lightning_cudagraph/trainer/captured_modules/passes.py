"""A forward pass of a module with its autograd graph, and the gradients that come out of it.

Autograd adds the gradients of a tensor in the order in which they come, and sums of floats depend on the
order. A weight that a module uses twice, and that gets a third gradient from elsewhere, would get other
bits if the two came as their sum. So each use of a tensor has a gradient of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.batch import refuse_odd_outputs
from lightning_cudagraph.tensors.writes import storage_id
from lightning_cudagraph.trainer.captured_modules.calls import tensors_of
from lightning_cudagraph.trainer.captured_modules.refusals import hooks_refused, refuse_made_otherwise

# Each use has a static gradient of its own.
_MAX_USES = 64


class _Use(NamedTuple):
    """A use of an input: the node of autograd that hands it a gradient, as one of its results."""

    node: Node
    result: int
    name: str
    tensor: Tensor


class Group(NamedTuple):
    """Uses of inputs whose gradients come together, from the same outputs; both by their indices."""

    inputs: list[int]
    outputs: list[int]


class Pass:
    """A forward pass, run by `forward`, and the autograd graph that it leaves.

    Args:
        inputs: the tensors whose gradients a caller may want, by name: arguments and parameters.
        state: the parameters and buffers of the module.

    Attributes:
        returned: what the module returned.
        outputs: the tensors in it, each once.
        with_grad: those of the outputs that a gradient can come to.
        saved: those of the `state` that the backward pass reads.
        uses: the uses of inputs that can get a gradient, in the order of a backward pass.
        groups: groups of the `uses`, in the order in which the pass uses them.

    Raises:
        UnsupportedError: if a replay cannot return this, or gradients go elsewhere too.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        inputs: Sequence[tuple[str, Tensor]],
        state: Iterable[Tensor],
    ) -> None:
        memory: set[object] = set()

        def saved(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided:
                memory.add(storage_id(tensor))
            return tensor.detach()  # which has no reference to the graph: that would be a cycle

        # Torch's check of version counters is left out with hooks: replays write without counting.
        with saved_tensors_hooks(saved, _unchanged), hooks_refused(t for _, t in inputs):
            self.returned = forward()
        self.saved = [tensor for tensor in state if storage_id(tensor) in memory]
        refuse_odd_outputs(self.returned, "the output of the module")
        self.outputs = tensors_of(self.returned)
        refuse_made_otherwise(self.outputs)
        self.with_grad = [output for output in self.outputs if output.requires_grad]
        outputs_before = _reached(self.with_grad)
        self.uses = _uses(outputs_before, inputs)
        self.groups = _groups(self.uses, outputs_before)

    def gradients(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of each of the `uses`.

        Args:
            given: the gradients of `with_grad`.
        """
        pairs = [(o, g) for o, g in zip(self.with_grad, given, strict=True) if g is not None]
        found: list[Tensor | None] = [None] * len(self.uses)
        if not pairs:
            return found
        places: dict[Node, list[tuple[int, int]]] = {}
        for place, use in enumerate(self.uses):
            places.setdefault(use.node, []).append((place, use.result))
        inputs = list({id(use.tensor): use.tensor for use in self.uses}.values())
        hooks = [node.register_hook(partial(_note, found, each)) for node, each in places.items()]
        try:
            with _without_hooks(inputs):
                torch.autograd.grad(
                    [output for output, _ in pairs],
                    inputs,
                    [gradient for _, gradient in pairs],
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            for hook in hooks:
                hook.remove()
        return found


@contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks of tensors from running: they run when the sum of all gradients comes."""
    tables = [table for tensor in tensors if (table := tensor._backward_hooks)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _note(
    found: list[Tensor | None], places: Sequence[tuple[int, int]], out: Sequence[Any], given: Any
) -> None:
    for place, index in places:
        found[place] = out[index]


def _reached(outputs: Sequence[Tensor]) -> dict[Node, set[int]]:
    """The nodes of autograd behind some outputs, with the indices of the outputs that lead to each."""
    found: dict[Node, set[int]] = {}
    for index, output in enumerate(outputs):
        waiting = [output.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and index not in found.setdefault(node, set()):
                found[node].add(index)
                waiting += [following for following, _ in node.next_functions]
    return found


def _uses(nodes: Iterable[Node], inputs: Sequence[tuple[str, Tensor]]) -> list[_Use]:
    """The uses of inputs behind these nodes, in the order of a backward pass: the latest one first."""
    names = {id(tensor): name for name, tensor in inputs}
    found = [
        _Use(node, index, *_known(following, names))
        for node in sorted(nodes, key=lambda node: -node._sequence_nr())
        for index, (following, _) in enumerate(node.next_functions)
        if following is not None and following.name() == "torch::autograd::AccumulateGrad"
    ]
    for name, count in Counter(use.name for use in found).items():
        if count > _MAX_USES:
            raise CaptureError(
                f"The module uses {name} {count} times, and each use has a gradient of its own; expected"
                f" at most {_MAX_USES}.",
                "Name a smaller module in `modules`, such as the body of the loop.",
            )
    return found


def _groups(uses: Sequence[_Use], outputs_before: Mapping[Node, set[int]]) -> list[Group]:
    """Group uses by the outputs that lead to their inputs, those first that a forward pass has first.

    With hooks, which run when all gradients of an input have come, each node has a group of its own.
    """
    has_hooks = any(use.tensor._backward_hooks or use.tensor._post_accumulate_grad_hooks for use in uses)
    outputs: dict[int, set[int]] = {}
    for use in uses:
        outputs.setdefault(id(use.tensor), set()).update(outputs_before[use.node])
    groups: dict[Hashable, Group] = {}
    for place, use in enumerate(uses):
        before = outputs_before[use.node] if has_hooks else outputs[id(use.tensor)]
        key = use.node if has_hooks else frozenset(before)
        groups.setdefault(key, Group([], sorted(before))).inputs.append(place)
    return [*groups.values()][::-1]


def _known(node: Any, names: Mapping[int, str]) -> tuple[str, Tensor]:
    tensor: Tensor = node.variable
    if (name := names.get(id(tensor))) is None:
        raise CaptureError(
            f"The module computes with a tensor {tuple(tensor.shape)} that requires a gradient, and is"
            " neither an argument of the call nor a parameter of the module.",
            "Pass it as an argument, or name a smaller module in `modules`.",
        )
    return name, tensor
