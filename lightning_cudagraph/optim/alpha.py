"""A tensor in the place of a `Scalar`, which torch would read back to the host.

SGD steps by ``add_(gradient, alpha=-lr)``, RMSprop by ``addcdiv_(gradient, average, value=-lr)``.
Torch parses `alpha` and `value` as a `Scalar`, and calls ``.item()`` on a tensor. Here the same update
is made with the tensor itself, bit for bit in float32 and float64; in 16 bits it can differ in the last
place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.capture.own_modes import OwnFunctionMode
from lightning_cudagraph.compat.torch_names import tree_iter

__all__ = ["TensorAlphaMode"]


def _add_scaled_(target: Tensor, other: Tensor, alpha: Tensor) -> Tensor:
    """``target += alpha * other`` with one rounding, as ``add_(other, alpha=float)`` has."""
    if target.dtype in (torch.float32, torch.float64):
        return target.addcmul_(other, alpha)
    if not target.is_cuda:
        # In 16 bits the CPU's vectorised `add_` rounds alpha to the parameter's dtype (its tail does
        # not: there, results can differ in the last place).
        return target.addcmul_(other, alpha.to(target.dtype))
    # On a GPU `addcmul_` would round alpha, and `add_` computes in float32.
    return target.copy_(torch.addcmul(target.float(), other.float(), alpha.float()))


def _addcdiv_scaled_(target: Tensor, dividend: Tensor, divisor: Tensor, value: Tensor) -> Tensor:
    """``target += value * dividend / divisor``, rounded as ``addcdiv_(..., value=float)`` rounds."""
    if target.is_cuda:
        # ATen/native/cuda/PointwiseOpsKernel.cu: `a + alpha * (b / c)`, with one rounding for the sum.
        return target.addcmul_(dividend.div(divisor), value)
    # ATen/native/cpu/PointwiseOpsKernel.cpp: `self + alpha * t1 / t2`, from left to right.
    return target.add_(dividend.mul(value).div_(divisor))


def _foreach_add_scaled_(targets: list[Tensor], others: list[Tensor], alpha: Tensor) -> None:
    if targets[0].is_cuda and targets[0].dtype is not torch.float64:
        # The fused SGD kernel without momentum is this very update, in one launch for the list.
        torch._fused_sgd_(
            targets,
            others,
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=-alpha.float(),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        return
    for target, other in zip(targets, others, strict=True):
        _add_scaled_(target, other, alpha)


def _any_sparse(others: Any) -> bool:
    return any(
        leaf.layout is not torch.strided for leaf in tree_iter(others) if isinstance(leaf, Tensor)
    )


class TensorAlphaMode(OwnFunctionMode):
    """Lets ``add_``, ``_foreach_add_`` and ``addcdiv_`` take a tensor as a scalar without reading it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        alpha = kwargs.get("alpha")
        if isinstance(alpha, Tensor) and not _any_sparse(args[1:]):
            if func is Tensor.add_:
                return _add_scaled_(args[0], args[1], alpha)
            if func is torch._foreach_add_:
                return _foreach_add_scaled_(args[0], args[1], alpha)
        value = kwargs.get("value")
        if isinstance(value, Tensor) and func is Tensor.addcdiv_:
            return _addcdiv_scaled_(args[0], args[1], args[2], value)
        return func(*args, **kwargs)
