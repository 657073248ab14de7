"""Torch's encoder layers, which take another path where they see hooks.

In evaluation mode `nn.TransformerEncoderLayer` is computed in one piece, unless there are hooks on it
or on a member (torch/nn/modules/transformer.py): then in several, which differ in the last place.
So hooks of ours are taken off while it looks, and the layer is timed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cudagraph.device.sentry.own_modes import not_compiled

__all__ = ["unseen_by_encoder_layers"]


@contextmanager
def unseen_by_encoder_layers(
    is_ours: Callable[[Any], bool], unhooked: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Inside, torch's encoder layers in evaluation mode do not see hooks of ours.

    Args:
        is_ours: whether a hook is.
        unhooked: called with each member that has no hooks then.
    """
    forward: Any = nn.TransformerEncoderLayer.forward

    def taken_off(layer: nn.TransformerEncoderLayer) -> list[tuple[Any, dict[Any, Any]]]:
        """Empty the tables of hooks, if all are ours; returns these, with what was in them."""
        members = list(layer.modules())
        tables: list[Any] = [
            table for member in members for table in (member._forward_pre_hooks, member._forward_hooks)
        ]
        if not all(is_ours(hook) for table in tables for hook in table.values()):
            return []
        for member in members[1:]:
            unhooked(member)
        hooked = [(table, dict(table)) for table in tables if table]
        for table, _ in hooked:
            table.clear()
        return hooked

    def unseen(layer: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> Any:
        if layer.training or torch.compiler.is_compiling():
            return forward(layer, *args, **kwargs)
        hooked = taken_off(layer)
        try:
            return forward(layer, *args, **kwargs)
        finally:
            for table, hooks in hooked:
                table.update(hooks)

    # As `forward`, which is torch's, is not.
    not_compiled(taken_off, with_what_it_calls=True)
    not_compiled(unseen)
    nn.TransformerEncoderLayer.forward = unseen  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoderLayer.forward = forward  # type: ignore[method-assign]
