"""Hooks around each collective of a step, for its times.

They come through the dispatcher, whether Python calls them or DistributedDataParallel's reducer does. In
a capture its sentry sees them there. In an eager step, where a look at every op would cost more than is
measured, kernels of ours stand above those of the backends for the time being, for these ops alone. What
a collective does is the same with and without: nothing of it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["CollectiveHook", "collective_hook", "run_collective"]

# What ops are called in torch (torch/csrc/distributed/c10d/Ops.cpp), and by those who use them. Barriers
# and messages between two processes are none.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}


class CollectiveHook(Protocol):
    """A function that is called before each collective is issued."""

    def __call__(self, name: str, tensors: Any) -> Callable[[Any], None]:
        """A collective is about to be issued on the current stream.

        Args:
            name: such as ``all_reduce``.
            tensors: its arguments, tensors and others.

        Returns:
            Called once it is issued, with its `Work`, or None if the current stream waits for it.
        """


_hooks: list[CollectiveHook] = []


def run_collective(func: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """Run a collective, with the hooks around it."""
    name = _NAMES.get(func._schema.name.rpartition("::")[2])
    if not _hooks or name is None or _are_gathered():
        return run()
    issued = [hook(name, args) for hook in _hooks]
    returned = run()
    work = _work_of(returned)
    for after in issued:
        after(work)
    return returned


@contextmanager
def collective_hook(hook: CollectiveHook, captured: bool) -> Iterator[None]:
    """Have a hook called around the collectives that are issued inside, on any thread.

    Args:
        hook: the hook.
        captured: a capture is under way, whose sentry sees them.
    """
    _hooks.append(hook)
    library = None if captured else _hooked_kernels()
    try:
        yield
    finally:
        if library is not None:
            library._destroy()
        _hooks.remove(hook)


def _hooked_kernels() -> Any:
    """Kernels that call the hooks and hand collectives on, until they are destroyed."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _NAMES:
        if hasattr(torch.ops.c10d, name):  # some are younger than others
            library.impl(name, _handing_on(getattr(torch.ops.c10d, name).default), "Autograd")
    return library


def _handing_on(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        return run_collective(op, args, run)

    return call


def _are_gathered() -> bool:
    """Tell if collectives are gathered, to be issued together: there is nothing to wait for yet."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return bool(getattr(world, "pg_coalesce_state", None))


def _work_of(returned: Any) -> Any:
    boxed = returned[-1] if isinstance(returned, (tuple, list)) else returned
    unbox: Any = torch._C._distributed_c10d.Work.unbox
    return None if boxed is None else unbox(boxed)
