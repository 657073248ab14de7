"""Hooks around each collective of a step, for its times.

Collectives pass through the dispatcher, whether Python or DistributedDataParallel's reducer issues them.
In a capture the sentry sees them there. In an eager step, where a mode for every op would cost more than
is measured, kernels registered for these ops alone call the hooks and then the backend's kernels. The
collectives themselves are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_cudagraph.device.sentry.collectives import group_of, work_of

# Names of the ops in torch (torch/csrc/distributed/c10d/Ops.cpp), and their public names. Barriers and
# point-to-point messages are left out; so are `all_gather` and `reduce_scatter` of lists, because they
# copy through other memory, which torch lets go of at the first `Work.wait`, and hooks wait early.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}


class CollectiveHook(Protocol):
    """A hook that is called before each collective is issued."""

    def __call__(self, name: str, tensors: Any) -> Callable[[Any], None]:
        """Note that a collective is about to be issued on the current stream.

        Returns:
            A function to call after the collective is issued, with its `Work`; or with None if the
            current stream waits for it.
        """


_hooks: list[CollectiveHook] = []


def group_and_work(func: Any, args: tuple[Any, ...], returned: Any) -> tuple[Any, Any] | None:
    """The process group and the `Work` of a collective that uses its arguments alone.

    Returns:
        None for other ops, and for a collective that is issued later or done.
    """
    is_known = func._schema.name.rpartition("::")[2] in _NAMES
    work = work_of(returned) if is_known and not _are_gathered() else None
    return None if work is None else (group_of(args), work)


def run_collective(func: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """Run a collective with the hooks around it."""
    name = _NAMES.get(func._schema.name.rpartition("::")[2])
    if not _hooks or name is None or _are_gathered():
        return run()
    issued = [hook(name, args) for hook in _hooks]
    returned = run()
    work = work_of(returned)
    for after in issued:
        after(work)
    return returned


@contextmanager
def collective_hook(hook: CollectiveHook, captured: bool) -> Iterator[None]:
    """Call a hook around the collectives that any thread issues inside the `with` block."""
    _hooks.append(hook)
    library = None if captured else _hooked_kernels()
    try:
        yield
    finally:
        if library is not None:
            library._destroy()
        _hooks.remove(hook)


def _hooked_kernels() -> Any:
    """Register kernels that call the hooks and the backend's kernels, until they are destroyed."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _NAMES:
        if hasattr(torch.ops.c10d, name):  # some are missing in older versions
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
    """True inside `_coalescing_manager`: collectives are issued later, and there is no work yet."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return bool(getattr(world, "pg_coalesce_state", None))
