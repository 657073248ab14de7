"""Reads on the host that a capture does not see.

Torch leaves some out under a mode of the dispatcher, as a capture is, and rounds otherwise then: a step
with one of them waits for the device without us, so no graph can hold it. Sources:
torch/csrc/autograd/FunctionsManual.cpp, and `cross_entropy_loss_label_smoothing` of
aten/src/ATen/native/LossNLL.cpp, which ask `isTensorSubclassLike`. One is inside of a kernel
(`masked_fill` of aten/src/ATen/native/cuda/Indexing.cu). tests/gpu/test_all_ops_under_modes.py looks for
others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["in_op", "of_function"]

Words = tuple[str, str]  # what it is to the user, and the remedy


def _product(name: str, by: str) -> Words:
    return (
        f"the gradient of `{name}`, for which torch reads on the host whether a factor is zero",
        f"Multiply one by one: `{by}`.",
    )


_WHERE = "Use `torch.where(mask, value, x)`."

# By op: of which argument it is the gradient.
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
        'Pass `reduction="none"`, and divide the sum by that of the weights of the targets:'
        " `weight[target].sum()`."
    ),
)


def in_op(name: str, args: tuple[Any, ...]) -> Words | None:
    """What it is in the kernel of an op or in its backward pass, or None.

    Args:
        name: of the op, such as "aten::prod".
        args: its positional arguments.
    """
    name = name.removesuffix("_")
    index, words = _IN_BACKWARD.get(name, (0, None))
    given = args[index] if len(args) > index else None
    if isinstance(given, Tensor) and given.requires_grad and torch.is_grad_enabled():
        return words
    if name == "aten::masked_fill" and isinstance(given, Tensor) and given.is_cuda:
        return _IN_KERNEL
    return None


def of_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Words | None:
    """What it is in a function that consists of several ops, or None.

    Args:
        func: the function, as function modes are handed it; so are its arguments.
        args: the positional ones.
        kwargs: the others.
    """
    if func is nn.functional.cross_entropy and _is_smoothed_mean(*args, **kwargs):
        return _SMOOTHED
    return None


def _is_smoothed_mean(
    input: Tensor, target: Tensor, *, weight: Tensor | None, label_smoothing: float, **options: Any
) -> bool:
    """Whether it is divided by the sum of the weights of those targets that are not ignored."""
    is_mean = options["reduction"] == "mean"
    is_mean &= options["reduce"] is not False and options["size_average"] is not False  # older names
    return is_mean and weight is not None and label_smoothing > 0 and not target.is_floating_point()
