"""Calls that a replay cannot stand for: outputs, gradients and writes that it would not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.writes import storage_id
from lightning_cudagraph.trainer.common.captured_run import gradients_kept


@contextmanager
def own_gradients_refused(module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Refuse a module that leaves gradients at tensors, by a backward pass of its own."""
    error = CaptureError(
        "The module calls `backward()`, which leaves gradients that a replay would not leave.",
        "Use `torch.autograd.grad`, or name a smaller module in `modules`.",
    )
    leaves = {name: each for name, each in module.named_parameters() if each.is_leaf}
    with gradients_kept(leaves, lambda name: error):
        yield
        if any(each.grad is not None for each in inputs):
            raise error


@contextmanager
def hooks_refused(inputs: Iterable[Tensor]) -> Iterator[None]:
    """Refuse a module that registers hooks with its arguments or weights: those of a call are others."""
    before = [(tensor, len(tensor._backward_hooks or ())) for tensor in inputs]
    yield
    if any(len(tensor._backward_hooks or ()) != count for tensor, count in before):
        raise CaptureError(
            "The module registers a hook with an argument or a weight, which a replay would not do.",
            "Register it outside of the module, or with a tensor that the module computes: `x = x * 1`.",
        )


def refuse_made_otherwise(outputs: Iterable[Tensor]) -> None:
    """Refuse outputs of another kind than those of a replay: plain results of ops, no attributes."""
    for output in outputs:
        is_leaf = output.requires_grad and output.grad_fn is None
        if type(output) is not Tensor or vars(output) or is_leaf:
            raise CaptureError(
                "The module returns a parameter, a leaf that requires a gradient, a subclass of"
                " `torch.Tensor`, or a tensor with attributes.",
                "Return a tensor that it computes.",
            )


def refuse_shared_outputs(outputs: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Refuse outputs that share memory with each other or with `others`."""
    taken = {storage_id(tensor) for tensor in others}
    for output in outputs:
        if storage_id(output) in taken:
            raise CaptureError(
                "The module returns an argument, a weight, or two tensors that share memory; those of a"
                " replay would not.",
                "Return a copy, `tensor.clone()`, or name a smaller module in `modules`.",
            )
        taken.add(storage_id(output))


def refuse_sparse(gradients: Iterable[Tensor | None]) -> None:
    """Refuse gradients that have no fixed size."""
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        raise CaptureError(
            "A gradient of the module is sparse.", "Pass `sparse=False` to its embeddings."
        )
