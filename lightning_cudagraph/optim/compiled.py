"""Compiled optimizer steps (`torch.compile`) in a graph.

A change to an optimizer for a graph would be compiled with it, and give other numbers than the user's
own step. So a compiled step is captured only if nothing has to change: its counters and its learning
rate are on the device already. Then it runs unchanged, in eager steps and in captures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_cudagraph.compat.attributes import do_nothing
from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.supported_optimizers import Form


def is_compiled(step: Callable[..., Any]) -> bool:
    """True if a function comes from `torch.compile`, and is not only excluded from Dynamo.

    Dynamo excludes the steps of LBFGS and SparseAdam once anything has been compiled
    (torch/_dynamo/eval_frame.py, `TorchPatcher`).
    """
    return hasattr(step, "_torchdynamo_orig_callable") and not getattr(
        step, "_torchdynamo_disable", False
    )


@cache
def _wrapper_code() -> CodeType:
    """The code object that all functions from `torch.compile` share."""
    return torch.compile(do_nothing, backend="eager").__code__


def is_in_compiled_code() -> bool:
    """True if a compiled function is among the callers."""
    # The first `torch.compile` of a process changes much in torch, such as the checks of distributions.
    # It must be the user's.
    if not getattr(LBFGS.step, "_torchdynamo_disable", False):
        return False
    wrapper = _wrapper_code()
    return any(frame.f_code is wrapper for frame in frames(sys._getframe(1)))


def refuse_changes(optimizer: Optimizer, form: Form, device: torch.device) -> None:
    """Refuse an optimizer with a compiled step that would have to change for a graph."""
    name = type(optimizer).__qualname__
    if form.inspected:
        raise UnsupportedError(
            f"`step` of the `{name}` is compiled, and the class is not one of torch's own: what it keeps"
            " on the host, compiled code does not show.",
            "Leave out `torch.compile` there.",
            in_optimizer=True,
        )
    for index, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if form.reads_rate and not (isinstance(lr, Tensor) and lr.device.type == device.type):
            found = f"a tensor on {lr.device}" if isinstance(lr, Tensor) else "a float"
            raise UnsupportedError(
                f"`step` of the `{name}` is compiled with its learning rate, and `lr` of param group"
                f" {index} is {found}; expected a tensor on {device}, which each replay reads.",
                f'Pass `lr=torch.tensor(..., device="{device}")`, or leave out `torch.compile` there.',
                in_optimizer=True,
            )
        if group.get("capturable") is False:
            raise UnsupportedError(
                f"`step` of the `{name}` is compiled, and param group {index} has `capturable=False`;"
                " expected True, so that its steps are counted on the device.",
                "Pass `capturable=True`, or leave out `torch.compile` there.",
                in_optimizer=True,
            )
