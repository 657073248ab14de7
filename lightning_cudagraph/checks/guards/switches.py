"""Guard on global switches and contexts of torch, which are baked in by a capture."""

from __future__ import annotations

import operator
from typing import Any

import torch

_VALUES = (
    # The `fp32_precision` of each backend, and never `allow_tf32` or
    # `torch.get_float32_matmul_precision()`: those raise once code has set the newer names, while these
    # follow the old ones too.
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
)
_GETTERS = (
    "torch.are_deterministic_algorithms_enabled",
    "torch.backends.cuda.flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled",
    "torch.is_autocast_cache_enabled",
    "torch.get_default_dtype",
    "torch.is_grad_enabled",
)
_GETTERS_OF_DEVICE = ("torch.is_autocast_enabled", "torch.get_autocast_dtype")


def _named(path: str) -> Any:
    return operator.attrgetter(path.removeprefix("torch."))(torch)


def global_switches() -> dict[str, Any]:
    """The present values of the switches, by their public names."""
    switches = {name: _named(name) for name in _VALUES}
    switches |= {f"{name}()": _named(name)() for name in _GETTERS}
    for device_type in ("cuda", "cpu"):
        for name in _GETTERS_OF_DEVICE:
            switches[f"{name}({device_type!r})"] = _named(name)(device_type)
    return switches


def contexts() -> tuple[object, ...]:
    """The contexts of torch that are entered: modes, hooks on saved tensors, autocast.

    Code between steps can enter and leave them at any time, so they are compared before each replay.
    """
    functions, dispatch = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return (
        functions,
        functions and torch._C._get_function_stack_at(functions - 1),
        dispatch,
        dispatch and torch._C._get_dispatch_stack_at(dispatch - 1),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
