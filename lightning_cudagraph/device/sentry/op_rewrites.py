"""Rewrites of copies from host memory, which a CUDA capture would refuse or read after they are freed.

* A constant made on the device, ``torch.tensor([1.0, 2.0], device="cuda")``, is a blocking copy from the
  host. It becomes a fill, or a copy from pinned memory that lives as long as the graph.
* A tensor that the step makes on the host and copies to the device is copied from such memory, too.
  Every replay uses its value at capture, as for any Python number in the step; unless it comes from a
  draw: then `HostOps` makes it again for each replay.
* A pinned tensor that a captured copy reads is kept alive, because each replay reads it again. (Grouped
  matrix products pass arrays of addresses to the device in this way.)

A host tensor older than the step may be changed by host code between two steps. A copy of it from
unpinned memory is refused; where an op takes it as a scalar, its value becomes a guard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import HostInput
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.device.sentry.host_ops import HostOps, aligned
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.device.sentry.sentry import Sentry
from lightning_cudagraph.device.sentry.tables import is_table
from lightning_cudagraph.device.streams.branches import Branches
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.tensors.writes import tensors_in

# Constants of one capture. Pinned before the capture begins: pinning may wait for the device.
_ARENA_BYTES = 1 << 20
_FROM_PYTHON = {torch.tensor, torch.as_tensor}

_TOO_LARGE = (
    f"constants of more than {_ARENA_BYTES >> 20} MiB that are copied from the host",
    "Keep them in buffers (`register_buffer`).",
)
_HOST_WRITE = (
    "a write into a tensor in host memory, which a replay would not do",
    "Keep the tensor on the device, in a buffer (`register_buffer`).",
)


class HostMemory:
    """Host memory that a graph reads in every replay, and that lives as long as the graph."""

    def __init__(self) -> None:
        self._arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._used_bytes = 0
        self._kept: dict[int, Tensor] = {}
        self.scalars: list[tuple[Tensor, Any]] = []

    def keep(self, pinned: Tensor) -> None:
        self._kept[id(pinned)] = pinned

    def pinned(self, value: Tensor) -> Tensor:
        """Copy a host tensor into pinned memory, unless a graph's constants are too large together."""
        start = aligned(self._used_bytes)
        self._used_bytes = start + value.nbytes
        if self._used_bytes > _ARENA_BYTES:
            forbid(*_TOO_LARGE, user_location())
        place = self._arena[start : self._used_bytes].view(value.dtype).view(value.shape)
        return place.copy_(value)

    def moved(self) -> bool:
        """True if a host tensor that a kernel took as a number has changed."""
        return any(_moved(tensor.item(), was) for tensor, was in self.scalars)


def _moved(now: Any, was: Any) -> bool:
    return bool(now != was) and not (now != now and was != was)  # both are NaN


def _is_python(data: Any) -> bool:
    return all(isinstance(leaf, (bool, int, float, complex)) for leaf in tree_iter(data))


class Constants(OwnFunctionMode):
    """A function mode that makes constants on the device without a blocking copy."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs)
        if func in _FROM_PYTHON and _is_python(args[:1]):
            device = kwargs.get("device")
            device = torch.get_default_device() if device is None else torch.device(device)
            if device.type == "cuda":
                kwargs["device"] = "cpu"
                return self._on_device(func(*args, **kwargs), device)
        elif func is Tensor.new_tensor and args[0].is_cuda and _is_python(args[1:2]):
            kwargs.setdefault("dtype", args[0].dtype)
            kwargs["device"] = "cpu"
            return self._on_device(torch.tensor(args[1], **kwargs), args[0].device)
        elif func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_cuda:
            args = (args[0], self._index(args[1], args[0].device), *args[2:])
        return func(*args, **kwargs)

    def _on_device(self, value: Tensor, device: torch.device) -> Tensor:
        with torch.no_grad():
            if value.numel() == 1:
                made = torch.full(value.shape, value.item(), dtype=value.dtype, device=device)
            else:
                made = torch.empty(value.shape, dtype=value.dtype, device=device)
                made.copy_(self._memory.pinned(value), non_blocking=True)
        return made.requires_grad_(value.requires_grad)

    def _index(self, index: Any, device: torch.device) -> Any:
        """An index with its lists of integers replaced by tensors on the device."""
        if isinstance(index, tuple):
            return tuple(self._index(part, device) for part in index)
        if isinstance(index, list) and index and all(type(number) is int for number in index):
            return self._on_device(torch.tensor(index, device="cpu"), device)
        return index


class RewritingSentry(Sentry):
    """A sentry that rewrites copies from the host where it can make them safe.

    Args:
        host_input: what replays send to the device; None if the step runs for real, and is no capture.
    """

    def __init__(
        self,
        generators: Generators,
        memory: HostMemory,
        branches: Branches | None = None,
        host_input: HostInput | None = None,
        device_type: str = "cuda",
    ) -> None:
        super().__init__(device_type, generators)
        self._memory = memory
        self._branches = branches
        self.host_ops = HostOps(host_input)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_around_another, types)):
            return NotImplemented  # comes again, as ops on the inner tensors
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        is_host = len(on_host) == len(tensors)
        if on_host:
            args, kwargs = self._rewritten(func, args, kwargs)
            self._look_at(func, args, on_host, is_host)
        run = partial(super().__torch_dispatch__, func, types, args, kwargs)
        if is_host and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return self.host_ops.run(func, args, kwargs, run)
        if on_host and not is_host:
            self.host_ops.take(tensors_in(args, kwargs))
        return run()

    def end(self) -> None:
        super().end()
        self.host_ops.end()

    def take(self, tensors: list[Tensor]) -> None:
        self.host_ops.take(tensors)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._branches is None:
            return func(*args, **kwargs)
        return self._branches.run(func, args, kwargs)

    def _rewritten(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rewrite the arguments of a copy to the device so that it reads memory of the graph."""
        name = func._schema.name
        if name == "aten::_to_copy":
            source, device = args[0], kwargs.get("device")
            if device is None or torch.device(device).type != self._device_type:
                return args, kwargs
            dtype, shape = kwargs.get("dtype") or source.dtype, source.shape
        elif name == "aten::copy_" and args[0].device.type == self._device_type:
            source, dtype, shape = args[1], args[0].dtype, args[0].shape
        else:
            return args, kwargs
        if self.host_ops.is_drawn(source):
            own = self.host_ops.staged(source, dtype, shape)
        elif source.is_pinned():
            self._memory.keep(source)
            return args, kwargs
        elif self.host_ops.is_made_inside(source):
            own = self._memory.pinned(source.detach().to(dtype).expand(shape))
            self.known.same(own, source)
        else:
            return args, kwargs
        if name == "aten::copy_":
            return (args[0], own, True), {}
        return (own,), {**kwargs, "non_blocking": True}

    def _look_at(
        self, func: Any, args: tuple[Any, ...], on_host: list[Tensor], all_on_host: bool
    ) -> None:
        """Refuse writes into host tensors older than the step, and guard those read as scalars."""
        for tensor in on_host:
            if self.host_ops.is_made_inside(tensor) or tensor.is_pinned():
                continue
            is_write = func._schema.is_mutable and any(tensor is arg for arg in args[:1])
            if all_on_host and is_write and not is_table(tensor):
                forbid(*_HOST_WRITE, user_location())
            if not all_on_host and tensor.ndim == 0:
                self._memory.scalars.append((tensor, tensor.item()))
