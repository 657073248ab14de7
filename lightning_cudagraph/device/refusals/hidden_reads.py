"""Host reads that torch makes in eager mode only, and that a capture therefore does not see.

Under a dispatch mode, and so in a capture, torch takes another path without the read, with other
rounding. The eager step waits for the device there, so no graph can reproduce it. Sources:
torch/csrc/autograd/FunctionsManual.cpp, and `cross_entropy_loss_label_smoothing` of
aten/src/ATen/native/LossNLL.cpp, which ask `isTensorSubclassLike`. One read is inside a kernel
(`masked_fill` of aten/src/ATen/native/cuda/Indexing.cu). tests/gpu/test_all_ops_under_modes.py looks for
others. They are a list because nothing else detects them: neither the walk over Python objects nor a
mode, and the emulator has no boundary between host and device.

Backward passes of compiled code were traced under dispatch modes, and do not read. So these reads are
permitted while compiled functions run as plain Python (`reads_permitted`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.probes import found_or_stand_in
from lightning_cudagraph.device.refusals.host_reads import Words


def _product(name: str, by: str) -> Words:
    return (
        f"the gradient of `{name}`, for which torch reads on the host whether a factor is zero",
        f"Multiply one by one: `{by}`; or take it of `x.detach()`, if no gradient comes from it.",
    )


_WHERE = "Use `torch.where(mask, value, x)`."

# By op: the index of the argument whose gradient needs the read.
_IN_BACKWARD: dict[str, tuple[int, Words]] = {
    "aten::prod": (0, _product("prod", "functools.reduce(torch.mul, x.unbind(dim))")),
    "aten::cumprod": (
        0,
        _product("cumprod", "torch.stack([*itertools.accumulate(x.unbind(dim), torch.mul)], dim)"),
    ),
    "aten::masked_fill": (
        2,
        (
            (
                "the gradient of the value of `masked_fill`, for which torch reads on the host how much"
                " of the mask is set"
            ),
            _WHERE,
        ),
    ),
}
_IN_KERNEL = ("`masked_fill` with a tensor on the GPU as its value, which is read on the host", _WHERE)
_SMOOTHED = (
    (
        "`cross_entropy` with label smoothing and weights of the classes, for whose mean torch reads on"
        " the host which targets are ignored"
    ),
    (
        'Pass `reduction="none"`, and divide the sum by `(weight[target.clamp(min=0)] * (target !='
        " ignore_index)).sum()`."
    ),
)
_CROSS_ENTROPY = nn.functional.cross_entropy
_LINEAR_CROSS_ENTROPY = getattr(nn.functional, "linear_cross_entropy", object())  # since torch 2.13
_CROSS_ENTROPY_LOSS = (
    found_or_stand_in("torch._C._nn.cross_entropy_loss"),
    torch.ops.aten.cross_entropy_loss,
    torch.ops.aten.cross_entropy_loss.default,
)

# Threads in which such reads in backward passes are permitted.
_permitted: set[int] = set()


@contextmanager
def reads_permitted() -> Iterator[None]:
    """Permit such reads in backward passes of this thread."""
    thread = threading.get_ident()
    _permitted.add(thread)
    try:
        yield
    finally:
        _permitted.discard(thread)


def in_op(name: str, args: tuple[Any, ...]) -> Words | None:
    """Describe the host read in the kernel of an op, such as "aten::prod", or in its backward pass."""
    name = name.removesuffix("_")
    index, words = _IN_BACKWARD.get(name, (0, None))
    given = args[index] if len(args) > index else None
    if not isinstance(given, Tensor) or words is None:
        return None
    if name == "aten::masked_fill":
        if given.is_cuda:
            return _IN_KERNEL
    elif not given.ndim:
        return None
    has_gradient = given.requires_grad and torch.is_grad_enabled()
    is_permitted = threading.get_ident() in _permitted
    return words if has_gradient and not is_permitted else None


def of_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Words | None:
    """Describe the host read in a function of several ops, given as a function mode receives it."""
    if func is _CROSS_ENTROPY:
        is_smoothed_mean = _of_cross_entropy(*args, **kwargs)
    elif func is _LINEAR_CROSS_ENTROPY:
        is_smoothed_mean = _of_cross_entropy(
            args[0],
            args[2],
            kwargs.get("weight"),
            reduction=kwargs.get("reduction", "mean"),
            label_smoothing=kwargs.get("label_smoothing", 0.0),
        )
    elif func in _CROSS_ENTROPY_LOSS:
        is_smoothed_mean = _of_cross_entropy_loss(*args, **kwargs)
    else:
        return None
    return _SMOOTHED if is_smoothed_mean else None


def _of_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    if size_average is not None or reduce is not None:  # the older names
        reduction = "mean" if size_average is not False and reduce is not False else ""
    return _of_cross_entropy_loss(
        input, target, weight, int(reduction == "mean"), ignore_index, label_smoothing
    )


def _of_cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> bool:
    """True for a mean over the class weights of the targets that are not ignored, with smoothing."""
    return (
        reduction == 1 and weight is not None and label_smoothing > 0 and not target.is_floating_point()
    )
