"""The collectives of a step, for who wants to know when they are issued.

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

__all__ = ["Listener", "call_heard", "listening"]

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


class Listener(Protocol):
    """Told of each collective before it is issued."""

    def __call__(self, name: str, tensors: Any) -> Callable[[Any], None]:
        """A collective is about to be issued on the current stream.

        Args:
            name: such as ``all_reduce``.
            tensors: its arguments, tensors and others.

        Returns:
            Called once it is issued, with its `Work`, or None if the current stream waits for it.
        """


_listeners: list[Listener] = []


def call_heard(func: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """Run a collective, and tell who listens before it and behind it.

    Args:
        func: the op.
        args: its arguments.
        run: runs it.
    """
    name = _NAMES.get(func._schema.name.rpartition("::")[2])
    if not _listeners or name is None or _are_gathered():
        return run()
    issued = [listener(name, args) for listener in _listeners]
    returned = run()
    work = _work_of(returned)
    for tell in issued:
        tell(work)
    return returned


@contextmanager
def listening(listener: Listener, captured: bool) -> Iterator[None]:
    """Listen to the collectives that are issued inside, on any thread.

    Args:
        listener: is told.
        captured: a capture is under way, whose sentry sees them.
    """
    _listeners.append(listener)
    library = None if captured else _overheard()
    try:
        yield
    finally:
        if library is not None:
            library._destroy()
        _listeners.remove(listener)


def _overheard() -> Any:
    """Kernels that tell of collectives and hand them on, until they are destroyed."""
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

        return call_heard(op, args, run)

    return call


def _are_gathered() -> bool:
    """Whether collectives are gathered, to be issued together: there is nothing to wait for yet."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return bool(getattr(world, "pg_coalesce_state", None))


def _work_of(returned: Any) -> Any:
    boxed = returned[-1] if isinstance(returned, (tuple, list)) else returned
    unbox: Any = torch._C._distributed_c10d.Work.unbox
    return None if boxed is None else unbox(boxed)
