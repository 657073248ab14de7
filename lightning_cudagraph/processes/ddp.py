"""Refusals of a `DistributedDataParallel` that no graph can hold, and its communication hooks."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.compat.features import REPLICAS
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.lines.user_lines import is_users
from lightning_cudagraph.errors import UnsupportedError

# Communication hooks of torch's without state between steps. Its others count steps on the host, and
# wait for the device.
_COMM_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)


def is_stateless(hook: Any) -> bool:
    """True for a communication hook of torch's that keeps nothing."""
    return hook in _COMM_HOOKS


def check_comm_hook(what: str, hook: Any) -> None:
    """Refuse a communication hook of a library that may keep something; the user's own is audited."""
    function = inspect.unwrap(hook)
    function = getattr(function, "__func__", function)
    is_own = isinstance(function, FunctionType) and is_users(function.__code__, function.__globals__)
    if is_stateless(hook) or is_own:
        return
    raise UnsupportedError(
        f"{what} `{_name_of(hook)}`, which runs Python of a library in every backward pass, and may keep"
        " something from step to step, or wait for the device.",
        "Use a function or method of your own, or one of"
        " `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, such as `bf16_compress_hook`.",
    )


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def hooks_of(ddp: DistributedDataParallel) -> tuple[str, ...]:
    """The communication hooks of a wrapper, by name."""
    return tuple(_name_of(hook) for hook, _ in ddp._comm_hooks)


def check_wrapper(
    what: str, ddp: DistributedDataParallel, by_strategy: bool = False, known_hooks: int = 0
) -> None:
    """Refuse a wrapper that no graph can hold.

    Args:
        by_strategy: True if a strategy of Lightning's has made it.
        known_hooks: number of its communication hooks, from the first, that were checked before.
    """
    require(REPLICAS)
    device = next(ddp.parameters()).device
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
        check_comm_hook(f"{what} has the communication hook", hook)
    group = ddp.process_group
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size:
        raise UnsupportedError(
            f"{what} averages over {size} of the {world_size} processes;"
            " captured so far are steps of all of them.",
            "Leave `process_group` out.",
        )
    # By device: a group can have several backends, and may have been made without naming one.
    backend = dist.get_backend_config(group)
    if device.type == "cuda" and "cuda:nccl" not in backend:
        raise UnsupportedError(
            f"{what} has a process group that uses {backend}, which averages gradients on the host.",
            'Initialize the process group with the backend "nccl".',
        )
