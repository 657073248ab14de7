"""Unsupported modules: refused before a capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_cudagraph.compat.names.torch_names import is_traceable_wrapper_subclass
from lightning_cudagraph.device.refusals.forbidden_ops import STRIDED
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.layouts import has_strides
from lightning_cudagraph.tensors.local import is_split

# By name: their package takes long to import.
_SHARDED = {"FullyShardedDataParallel": "FSDP1", "FSDPModule": "`fully_shard`"}


def refuse_unsupported_modules(model: nn.Module, averaged: bool = False, sharded: bool = False) -> None:
    """Refuse a model with unsupported modules."""
    _refuse_sharded(model, sharded)
    for kind in {base for child in model.modules() for base in type(child).__mro__}:
        # Python's value for a class made by code without a `__name__`.
        if vars(kind).get("__module__") == "builtins":
            refuse_nameless(f"The class `{kind.__qualname__}`")
    for name, child in model.named_modules():
        named = f"The module `{name}`" if name else f"The `{type(child).__qualname__}`"
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{named} is a TorchScript module, whose tables and attributes cannot be compared with"
                " what a graph has baked in.",
                "Leave out `torch.jit.script` and `torch.jit.trace` for training.",
            )
        if isinstance(child, DistributedDataParallel) and averaged:
            continue
        if isinstance(child, (DataParallel, DistributedDataParallel)):
            raise UnsupportedError(
                f"{named} is a `{type(child).__name__}`; captured so far are runs on a single device.",
                "Train on one device.",
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise UnsupportedError(
                f"{named} is a `{type(child).__name__}(sparse=True)`, whose gradients have a size that"
                " depends on values.",
                "Pass `sparse=False`, and Adam instead of SparseAdam.",
            )


def refuse_nameless(what: str) -> None:
    """Refuse code that belongs to no module: it cannot be told from code that libraries generate."""
    raise UnsupportedError(
        f"{what} is made by code that runs without a name (`exec` with globals in which there is no"
        " `__name__`), so that what it does cannot be looked at.",
        'Give it one: `exec(code, {"__name__": "my_steps"})`.',
    )


def _refuse_sharded(model: nn.Module, sharded: bool) -> None:
    """Refuse parameters and buffers that are sharded, or are tensor subclasses or sparse otherwise."""
    supported = {
        id(parameter)
        for child in model.modules()
        if sharded and _kind_of_shards(child) == "FSDPModule"
        for parameter in child.parameters()
        if is_split(type(parameter))
    }
    for name, child in model.named_modules():
        kind = _kind_of_shards(child)
        if kind and not (sharded and kind == "FSDPModule"):
            named = f"module `{name}`" if name else "model"
            raise UnsupportedError(
                f"The weights of the {named} are split between devices ({_SHARDED[kind]}),"
                " and gathered in every step, into memory that Python hooks resize and free.",
                "Use `DistributedDataParallel`, if the model fits on one device; or `fully_shard`, with"
                " Lightning's `ModelParallelStrategy` or in a `GraphedStep`.",
            )
    found: tuple[tuple[str, Iterable[tuple[str, Any]]], ...] = (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    )
    for what, tensors in found:
        for name, tensor in tensors:
            made_of = type(tensor)
            if not has_strides(tensor):
                kind = "is a nested tensor" if tensor.is_nested else f"has the layout `{tensor.layout}`"
                raise UnsupportedError(
                    f"The {what} `{name}` {kind}, and has no shape and strides by which replays could be"
                    " compared.",
                    f"Register {STRIDED}",
                )
            if sharded and is_split(made_of) and tensor.device_mesh.ndim > 1:
                raise UnsupportedError(
                    f"The {what} `{name}` is split between processes in more than one way (a mesh of"
                    f" {tensor.device_mesh.ndim} dimensions: hybrid sharding, or tensor parallelism).",
                    "Use `fully_shard` with a mesh of one dimension.",
                )
            if is_traceable_wrapper_subclass(tensor) and id(tensor) not in supported:
                raise UnsupportedError(
                    f"The {what} `{name}` is a `{made_of.__qualname__}`, which has no memory of its"
                    " own, but consists of other tensors; replays cannot be compared in these yet.",
                    "Use plain tensors on one device, or `DistributedDataParallel` on several.",
                )


def _kind_of_shards(module: nn.Module) -> str:
    """The name of the class by which a module shards its weights; empty for none."""
    for cls in type(module).__mro__:
        if cls.__name__ in _SHARDED and cls.__module__.startswith("torch.distributed."):
            return cls.__name__
    return ""
