"""Collectives of `torch.distributed` in captures on the CPU emulator.

They pass through the dispatcher like any op, whether Python or DistributedDataParallel's reducer issues
them. A capture must not run them: on a GPU it would not, and the other processes may be doing something
else. So their results are made here without running them; a replay runs them and waits.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.device.streams.accesses import WRAP

# Functional collectives: the results are tensors that are waited for later. The norm of sharded
# gradients is reduced with them.
_FUNCTIONAL = "_c10d_functional"
_WAIT = "_c10d_functional::wait_tensor"
_KNOWN = frozenset({"_c10d_functional::all_reduce", _WAIT})


def is_collective(func: Any) -> bool:
    """True if an op is a collective or a message; refuse those that the emulator cannot record."""
    if func.namespace.startswith(_FUNCTIONAL):
        if func._schema.name in _KNOWN:
            return True
        forbid(
            f"a functional collective (`{func.__name__}`), on the CPU emulator",
            "Use those of `torch.distributed`, such as `torch.distributed.all_reduce`.",
            user_location(),
        )
    return bool(func.namespace == "c10d")


def only_wraps(func: Any) -> bool:
    """True if an op only wraps a tensor that is in the graph."""
    return bool(func._schema.name == WRAP)


def returned_unrun(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of a collective without running it: its tensors, and work that is done."""
    if func.namespace == _FUNCTIONAL:
        return args[0] if func._schema.name == _WAIT else torch.empty_like(args[0])
    done: Any = torch.futures.Future()
    written = list(tree_iter(args[0]))
    done.set_result(written)
    make: Any = torch._C._distributed_c10d
    work = make._create_work_from_future(done).boxed()
    # An op that also returns tensors returns those that it writes: its first argument.
    return (args[0], work) if len(func._schema.returns) == 2 else work


def wait_for(func: Any, returned: Any) -> None:
    """Wait until a collective that was run has ended."""
    if func.namespace == _FUNCTIONAL:
        torch.ops._c10d_functional.wait_tensor(returned)
        return
    work_of(returned).wait()


def group_of(args: tuple[Any, ...]) -> Any:
    """The process group among the arguments of a collective's op."""
    kinds: Any = torch._C._distributed_c10d
    objects = (arg for arg in args if isinstance(arg, torch.ScriptObject))
    boxed = next(each for each in objects if str(each).endswith(".ProcessGroup>"))
    return kinds.ProcessGroup.unbox(boxed)


def work_of(returned: Any) -> Any:
    """The `Work` of a collective by what its op has returned; None if there is none yet."""
    boxed = returned[-1] if isinstance(returned, (tuple, list)) else returned
    unbox: Any = torch._C._distributed_c10d.Work.unbox
    return None if boxed is None else unbox(boxed)
