"""What a `DistributedDataParallel` must be like so that steps with it can be captured.

What it keeps on the host from step to step is noted elsewhere, by who replays the steps.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.compat.features import REPLICAS
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import UnsupportedError

__all__ = ["COMM_HOOKS", "check_wrapper", "hooks_of", "is_unfinished", "take_times"]

# Those that keep nothing from step to step.
COMM_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
# The reducer takes times of its first ten iterations and of one in so many later, by events that no
# capture can hold (torch/csrc/distributed/c10d/reducer.hpp, `kDDPRuntimeLoggingSampleRate`).
_SAMPLE_RATE = 100
_NEVER = 2**30


def is_unfinished(ddp: DistributedDataParallel) -> bool:
    """Whether a step was left in the middle of its backward pass: gradients are waited for."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def take_times(ddp: DistributedDataParallel, does: bool) -> None:
    """Let it take times of its own behind the first ten iterations, or not."""
    ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE if does else _NEVER)


def hooks_of(ddp: DistributedDataParallel) -> tuple[str, ...]:
    """The communication hooks that it has, by name."""
    return tuple(hook.__qualname__ for hook, _ in ddp._comm_hooks)


def check_wrapper(
    what: str, ddp: DistributedDataParallel, by_strategy: bool = False, known_hooks: int = 0
) -> None:
    """Refuse a wrapper that does in a step what no graph can hold.

    Args:
        what: what it is called.
        ddp: the wrapper.
        by_strategy: it is that of a strategy of Lightning's.
        known_hooks: how many of its communication hooks, from the first, were looked at already.

    Raises:
        UnsupportedError: naming what that is.
        CUDAGraphError: if torch has lost private names that captured steps are built on.
    """
    require(REPLICAS)
    device = next(ddp.parameters()).device
    if ddp.find_unused_parameters:
        raise UnsupportedError(
            f"{what} with `find_unused_parameters=True` reads on the host, in every backward pass, which"
            " parameters took part.",
            "Leave it out, and let all parameters take part in every step; freeze others with"
            " `requires_grad_(False)`.",
        )
    for argument, value in (
        ("static_graph", ddp.static_graph and not by_strategy),
        ("mixed_precision", ddp.mixed_precision),
        ("delay_all_reduce_named_params", getattr(ddp, "_delay_all_reduce_params", None)),
    ):
        if value:
            raise UnsupportedError(
                f"{what} with `{argument}` is not known to come out the same from a captured step.",
                "Leave it out.",
            )
    for hook, _ in ddp._comm_hooks[known_hooks:]:
        if hook not in COMM_HOOKS:
            raise UnsupportedError(
                f"{what} has the communication hook `{getattr(hook, '__qualname__', hook)}`, which runs"
                " Python in every backward pass, and may keep something from step to step.",
                "Use one of `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, such as"
                " `bf16_compress_hook`.",
            )
    group = ddp.process_group
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size:
        raise UnsupportedError(
            f"{what} averages over {size} of the {world_size} processes;"
            " captured so far are steps of all of them.",
            "Leave `process_group` out.",
        )
    # By device: one group can have several backends, and may have been made without a name of any.
    backend = dist.get_backend_config(group)
    if device.type == "cuda" and "cuda:nccl" not in backend:
        raise UnsupportedError(
            f"{what} has a process group that uses {backend}, which averages gradients on the host.",
            'Initialize the process group with the backend "nccl".',
        )
