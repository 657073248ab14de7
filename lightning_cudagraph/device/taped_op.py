"""One recorded op, run again on the memory that it had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.sentry.collectives import is_collective, wait_for
from lightning_cudagraph.tensors.writes import storage_id, tensors_in


def address(tensor: Tensor) -> Tensor:
    """An alias of the tensor's present storage, even if the tensor is later set to another."""
    return tensor.detach()


def addressed(value: Any, known: dict[int, Tensor], taken: Callable[[Tensor], Tensor] = address) -> Any:
    """An argument of an op, with its tensors replaced by aliases.

    Args:
        known: aliases by the id of their tensor, so that one tensor has one alias: attention checks if
            query, key and value are the same object.
        taken: makes an alias.
    """
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = taken(value)
        return known[id(value)]
    if type(value) in (list, tuple):
        return type(value)(addressed(member, known, taken) for member in value)
    return value


class TapedOp:
    """One recorded op: function, aliased arguments, and the storage of its results.

    Attributes:
        results: aliases of its results; None for one that shares its storage with an input: a view, or
            the input itself.
    """

    __slots__ = ("args", "autocast", "func", "grad_mode", "kwargs", "results")

    def __init__(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        self.func = func
        self.grad_mode = torch.is_grad_enabled()  # some kernels read it (mkldnn's RNN)
        # Composite ops pass it on to the ops that they call.
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.args = args
        self.kwargs = kwargs
        there = {storage_id(tensor) for tensor in inputs}
        self.results = [None if storage_id(each) in there else address(each) for each in outputs]

    def run(self) -> None:
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            autocast = torch.autocast("cpu", dtype=self.autocast, cache_enabled=False)
        with torch.set_grad_enabled(self.grad_mode), torch._C._AutoDispatchBelowAutograd(), autocast:
            results = self.func(*self.args, **self.kwargs)
            if is_collective(self.func):
                wait_for(self.func, results)
        for target, value in zip(self.results, tensors_in(results), strict=True):
            # A zero of forward derivatives has no memory.
            if target is not None and target.data_ptr():
                target.copy_(value)
