"""Guard on global switches and contexts of torch, which are baked in by a capture."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from lightning_cudagraph.checks.walk.parts import same
from lightning_cudagraph.errors import UnsupportedError

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
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
)
_GETTERS = (
    "torch.are_deterministic_algorithms_enabled",
    "torch.is_deterministic_algorithms_warn_only_enabled",
    "torch.is_anomaly_enabled",
    "torch.backends.mha.get_fastpath_enabled",
    "torch.backends.cuda.flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled",
    "torch.is_autocast_cache_enabled",
    "torch.get_default_dtype",
    "torch.get_num_threads",
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


def refuse_inference_mode(what: str) -> None:
    """Refuse a call of `what`, with which a sentence begins, in inference mode."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            f"{what} is called inside `torch.inference_mode()`: its tensors lack version counters.",
            "Use `torch.no_grad()`.",
        )


def entered_modes() -> list[Any]:
    """The function modes and dispatch modes that are entered."""
    functions, dispatch = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return [
        *map(torch._C._get_function_stack_at, range(functions)),
        *map(torch._C._get_dispatch_stack_at, range(dispatch)),
    ]


def hooks_on_saved_tensors() -> Any:
    """The two hooks on saved tensors that are entered last; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class _Mode:
    """A mode that equals itself, and another one of its class with the same attributes."""

    def __init__(self, mode: Any) -> None:
        self._mode, self._attributes = mode, dict(vars(mode))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mode) or type(self._mode) is not type(other._mode):
            return False
        return self._mode is other._mode or same(self._attributes, other._attributes)

    __hash__ = None  # type: ignore[assignment]


@cache
def _left_out() -> tuple[Callable[[], object], ...]:
    """Getters of the switches of a GPU that Dynamo's guard leaves out.

    The properties of `torch.backends.cudnn` would take 5 times as long.
    """
    return (
        torch._C._get_cudnn_enabled,
        torch._C._get_cudnn_benchmark,
        torch._C._get_cudnn_deterministic,
        partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
        partial(torch._C._get_fp32_precision_getter, "cuda", "rnn"),
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.mha.get_fastpath_enabled,
        torch.is_anomaly_enabled,
        torch._C._get_cublas_allow_fp16_accumulation,
    )


class Contexts:
    """The contexts and switches of torch as they are now, in a form that is compared before each replay.

    Code between steps can enter and leave them at any time: modes, hooks on saved tensors, autocast.
    Dynamo's guard takes 0.3 us for autocast, the default dtype, deterministic algorithms, the precision
    of matrix products and the number of threads. Whether gradients are on outside of a step decides
    nothing.
    """

    def __init__(self) -> None:
        guards: Any = torch._C._dynamo.guards
        self._gradients_are_on = torch.is_grad_enabled()
        self._has_same_state: Callable[[], bool] = guards.GlobalStateGuard().check
        self._getters = _left_out()
        self._switches = [read() for read in self._getters]
        self._modes = [*map(_Mode, entered_modes())]
        self._hooks = hooks_on_saved_tensors()

    def changed(self) -> bool:
        if torch.is_grad_enabled() is not self._gradients_are_on:
            with torch.set_grad_enabled(self._gradients_are_on):
                return self.changed()
        return (
            not self._has_same_state()
            or [read() for read in self._getters] != self._switches
            or [*map(_Mode, entered_modes())] != self._modes
            or hooks_on_saved_tensors() != self._hooks
        )
