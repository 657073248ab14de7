"""Encoder layers of torch, which take another path if they see hooks.

In evaluation mode `nn.TransformerEncoderLayer` is computed by one fused op. With hooks on it or on a
member (torch/nn/modules/transformer.py) it is computed by several ops, with results that differ in the
last place. So our hooks are removed during `forward`, and the layer is timed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.sentry.own_modes import not_compiled


def unseen_by_encoder_layers(
    ours: type, unhooked: Callable[[nn.Module], None]
) -> AbstractContextManager[None]:
    """Hide hooks of the class `ours` from torch's encoder layers in evaluation mode.

    Each member whose hooks are hidden, and which is therefore not timed, is passed to `unhooked`.
    """
    forward: Any = nn.TransformerEncoderLayer.forward

    def remove_hooks(layer: nn.TransformerEncoderLayer) -> list[tuple[Any, dict[Any, Any]]]:
        """Empty the tables of hooks, if all are ours; return the tables with their former contents."""
        members = list(layer.modules())
        tables: list[Any] = [
            table for member in members for table in (member._forward_pre_hooks, member._forward_hooks)
        ]
        if not all(isinstance(hook, ours) for table in tables for hook in table.values()):
            return []
        for member in members[1:]:
            unhooked(member)
        hooked = [(table, dict(table)) for table in tables if table]
        for table, _ in hooked:
            table.clear()
        return hooked

    def without_hooks(layer: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> Any:
        if layer.training or torch.compiler.is_compiling():
            return forward(layer, *args, **kwargs)
        hooked = remove_hooks(layer)
        try:
            return forward(layer, *args, **kwargs)
        finally:
            for table, hooks in hooked:
                table.update(hooks)

    # Like torch's `forward` itself, which is not compiled either.
    not_compiled(remove_hooks, with_what_it_calls=True)
    not_compiled(without_hooks)
    return setting(nn.TransformerEncoderLayer, forward=without_hooks)
