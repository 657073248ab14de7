"""Modules that no capture can hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_cudagraph.errors import UnsupportedError

__all__ = ["refuse_unfit_modules"]


def refuse_unfit_modules(model: nn.Module) -> None:
    """Refuse a model with modules that no capture can hold.

    Raises:
        UnsupportedError: naming the module.
    """
    for name, child in model.named_modules():
        named = f"The module `{name}`" if name else f"The `{type(child).__qualname__}`"
        compiled_in_place = getattr(child, "_compiled_call_impl", None) is not None
        if compiled_in_place or isinstance(child, torch._dynamo.OptimizedModule):
            raise UnsupportedError(
                f"{named} is compiled; a capture around compiled code is not supported yet.",
                "Leave out `torch.compile`.",
            )
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{named} is a TorchScript module, whose tables and attributes cannot be compared with"
                " what a graph has baked in.",
                "Leave out `torch.jit.script` and `torch.jit.trace` for training.",
            )
        if isinstance(child, (DataParallel, DistributedDataParallel)):
            raise UnsupportedError(
                f"{named} is a `{type(child).__name__}`; captured so far are runs on a single device.",
                "Train on one device.",
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise UnsupportedError(
                f"{named} is a `{type(child).__name__}(sparse=True)`, whose gradients have a size that"
                " depends on values.",
                "Pass `sparse=False`.",
            )
