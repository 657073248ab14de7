"""A call of a captured module: its arguments, and the mode of torch that it is made in."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from lightning_cudagraph.checks.guards.switches import (
    entered_modes,
    global_switches,
    hooks_on_saved_tensors,
    refuse_inference_mode,
)
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.batch import flatten_batch, map_leaves
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.static import dressed

LEAVE_OUT = "Leave it out of `modules`."


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, each once, in the order of its leaves."""
    found = {id(leaf): leaf for _, leaf in flatten_batch(tree) if isinstance(leaf, Tensor)}
    return list(found.values())


def with_tensors(tree: Any, new: Iterable[Tensor]) -> Any:
    """A tree with other tensors in place of its own, which are in the order of `tensors_of`."""
    if isinstance(tree, Tensor):
        (other,) = new
        return other
    others = dict(zip(map(id, tensors_of(tree)), new, strict=True))
    return map_leaves(tree, lambda leaf: others[id(leaf)] if isinstance(leaf, Tensor) else leaf)


class Call:
    """A call of a captured module.

    Attributes:
        tensors: the tensors in its arguments, each once.
        plain: aliases of these that require no gradients.
        batch: its arguments around the aliases.

    Raises:
        UnsupportedError: if no graph can be replayed for its arguments, or in this mode of torch.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        modules: Iterable[nn.Module],
        device: torch.device,
    ) -> None:
        given = {"args": args, "kwargs": kwargs}
        self.tensors = tensors_of(given)
        self.needs_grad = tuple(tensor.requires_grad for tensor in self.tensors)
        _refuse_weights(self.tensors, parameters)
        self.plain = [dressed(each.detach(), each) for each in self.tensors]
        self.batch = with_tensors(given, self.plain)
        self.mode = {
            **_mode(device.type),
            "`requires_grad` of the arguments": self.needs_grad,
            "`requires_grad` of the parameters": tuple(each.requires_grad for each in parameters),
            "`training` of the modules": tuple(each.training for each in modules),
        }
        self._device = device

    @cached_property
    def signature(self) -> Signature:
        """All that a graph of this call is specialised on."""
        return Signature(self.batch, self._device, self.mode)


def _refuse_weights(arguments: Iterable[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a weight of the module as an argument: its gradients would be added in another order."""
    leaves = [each for each in arguments if each.requires_grad and each.is_leaf]
    if any(each is parameter for each in leaves for parameter in parameters):
        raise UnsupportedError(
            "An argument of the module is a weight of the module too.",
            "Let the module take it from itself.",
        )


def _mode(device_type: str) -> dict[str, Hashable]:
    """The switches of torch, which the code around a call may set for it."""
    if torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled():
        raise UnsupportedError(
            "The module is called inside `torch.autocast` with its cache of weights on, which it shares"
            " with other calls.",
            "Pass `cache_enabled=False`, as Lightning does.",
        )
    if parametrize._cache_enabled:
        raise UnsupportedError(
            "The module is called inside `parametrize.cached()`, and shares weights with other calls.",
            LEAVE_OUT,
        )
    refuse_inference_mode("The module")
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise UnsupportedError(
            "The module is called inside a transform of `torch.func`, or in forward-mode autograd, which"
            " sees no op of a replay.",
            LEAVE_OUT,
        )
    if hooks_on_saved_tensors() is not None:
        raise UnsupportedError(
            "The module is called inside activation checkpointing, `save_on_cpu` or other hooks of saved"
            " tensors, and a graph keeps these in memory of its own.",
            LEAVE_OUT,
        )
    if not all(map(_is_default_device, entered_modes())):
        raise UnsupportedError(
            "The module is called inside a mode of torch's functions or its dispatcher, which sees no op"
            " of a replay.",
            LEAVE_OUT,
        )
    return {"torch.get_default_device()": str(torch.get_default_device()), **global_switches()}


def _is_default_device(mode: object) -> bool:
    """True for the mode that `torch.set_default_device` enters."""
    return type(mode).__module__ == "torch.utils._device"
