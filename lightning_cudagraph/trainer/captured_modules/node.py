"""The nodes of a replay in the autograd graph of the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_cudagraph.errors import CUDAGraphError, UnsupportedError
from lightning_cudagraph.trainer.captured_modules.calls import LEAVE_OUT
from lightning_cudagraph.trainer.captured_modules.passes import Group

_Gradients = Sequence[Tensor | None]
# The gradients of the inputs, given those of the outputs.
Backward = Callable[[_Gradients], list[Tensor | None]]
# What a graph cannot do: its gradients have no autograd graph.
NO_SECOND = (
    "Gradients of gradients are asked for (`create_graph=True`), and go through a captured module.",
    LEAVE_OUT,
)
_TOKEN = torch.empty(0)


class Use:
    """A forward replay whose backward pass may come. Autograd alone holds it, as a saved tensor."""


def attached(
    backward: Backward, outputs: Sequence[Tensor], inputs: Sequence[Tensor], groups: Sequence[Group]
) -> tuple[list[Tensor], weakref.ref[Use]]:
    """Attach the outputs of a replay to the autograd graph of its inputs.

    A backward pass comes to the inputs that the outputs at hand depend on, and to no others, as without
    a graph: so there is a node for each group of inputs, and one for each output in front of these.

    Args:
        outputs: those that gradients can come to.
        inputs: an input for each gradient that `backward` returns.
        groups: groups of inputs, in the order in which a forward pass uses them.

    Returns:
        The outputs, and a reference that is dead once torch has let go of what it has saved for the
        backward pass: after that, or with the last tensor that leads there.
    """
    use = Use()
    apply: Callable[..., Any] = _Node.apply
    with saved_tensors_hooks(lambda token: use, lambda use: _TOKEN):
        if len(groups) == 1:
            found = apply(backward, outputs, *inputs)
        else:
            passes = _Passes(backward, len(outputs))
            tokens = [
                apply(
                    partial(passes.taken, group.inputs),
                    [outputs[0].new_empty(0)],
                    *(inputs[index] for index in group.inputs),
                )[0]
                for group in groups
            ]
            found = [
                apply(
                    partial(passes.note, index),
                    [output],
                    *(t for t, group in zip(tokens, groups, strict=True) if index in group.outputs),
                )[0]
                for index, output in enumerate(outputs)
            ]
    return list(found), weakref.ref(use)


class _Passes:
    """The backward passes through a replay: each brings gradients to some of its outputs.

    Torch runs nodes in the reverse order of their creation: all `note` of a pass come before `taken`.
    """

    def __init__(self, backward: Backward, count: int) -> None:
        self._backward = backward
        self._count = count
        self._given: dict[int, list[Tensor | None]] = {}
        self._found: dict[int, list[Tensor | None]] = {}

    def note(self, index: int, gradients: _Gradients) -> _Gradients:
        """Note the gradient of an output; the tokens in front of it get none."""
        number = torch._C._current_graph_task_id()
        if number in self._found:
            raise CUDAGraphError(
                "A gradient came to an output of a captured module after those of its inputs were taken."
                " Call `backward()` inside of the training step."
            )
        self._given.setdefault(number, [None] * self._count)[index] = gradients[0]
        return ()

    def taken(self, indices: Sequence[int], gradients: _Gradients) -> _Gradients:
        """Take the gradients of some inputs."""
        number = torch._C._current_graph_task_id()
        if number not in self._found:
            self._found[number] = self._backward(self._given.pop(number))
        found = self._found[number]
        taken = [found[index] for index in indices]
        for index in indices:
            found[index] = None  # for torch alone to hold
        return taken


class _Node(torch.autograd.Function):
    """A node with gradients by a function of those of its outputs; its inputs get none if it has none.

    As it saves a tensor, torch itself tells a second backward pass that the graph has been freed.
    """

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., Any], outputs: Sequence[Tensor], *inputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_TOKEN)
        ctx.gradients, ctx.count = backward, len(inputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018
        if torch.is_grad_enabled():
            raise UnsupportedError(*NO_SECOND)
        return None, None, *(ctx.gradients(gradients) or [None] * ctx.count)
