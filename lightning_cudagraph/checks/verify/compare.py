"""Comparison of a replay with an eager step, tensor by tensor, and the error for a difference."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_cudagraph.errors import FORWARD_BACKWARD, VerificationError

Values = dict[str, Tensor]

# Another algorithm for the same sum moves an element by a few units in the last place of the largest
# summands; in 16 bits by at most a hundredth of them.
_ROUNDING_UNITS = 16.0
_ROUNDING_AT_MOST = 1e-2
# Rounding moves an update by at most this part. Without this bound, a wrong learning rate of 1e-6 would
# be lost in the rounding of the weights.
_PART_OF_UPDATE = 1e-2


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise equality; NaN equals NaN."""
    return (one == other) | ((one != one) & (other != other))


def names_that_differ(one: Values, other: Values) -> list[str]:
    """The names whose values differ, in the order of `one`; `other` may be in host memory."""
    return [name for name, value in one.items() if not _is_equal(value.detach(), other[name])]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.detach().to(one.device)
    # It makes no tensor, but takes NaN for another number than NaN, and knows no complex32.
    is_equal = one.dtype != torch.complex32 and torch.equal(one, other)
    return is_equal or bool(_same(one, other).all())


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; NaN if only one side is NaN."""
    if not one.numel():
        return 0.0
    wide, wide_other = _wide(one), _wide(other).to(one.device)
    largest = float((wide - wide_other).abs().masked_fill(_same(wide, wide_other), 0.0).max())
    if not (one.is_floating_point() or one.is_complex()) and not torch.equal(one, other.to(one.device)):
        return max(largest, 1.0)  # large integers that round to the same float
    return largest


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def size(tensor: Tensor) -> float:
    """The largest element, without its sign."""
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def rounding(expected: Tensor, before: Tensor | None = None) -> float:
    """The largest difference that another kernel or algorithm can explain."""
    if not (expected.is_floating_point() or expected.is_complex()) or not expected.numel():
        return 0.0
    epsilon = torch.finfo(expected.dtype).eps
    largest = size(expected)
    allowed = min(_ROUNDING_UNITS * epsilon, _ROUNDING_AT_MOST) * largest
    if before is not None:
        # At least one unit in the last place: the result is a multiple of it.
        allowed = min(allowed, max(epsilon * largest, _PART_OF_UPDATE * distance(expected, before)))
    return allowed


def buffers_and_gradients(module: nn.Module, only_added_to: Iterable[nn.Parameter]) -> Values:
    """The tensors that a step changes before its optimizer does, by names for messages."""
    state: Values = {f"buffer `{name}`": buffer for name, buffer in module.named_buffers()}
    for index, parameter in enumerate(only_added_to):
        if (gradient := parameter.grad) is not None:
            state[f"the gradient of a parameter that the step only adds to ({index})"] = gradient
    return state


def verification_error(differing: list[str], expected: Values, found: Values) -> VerificationError:
    """The error for a replay that differs from an eager step."""
    if not differing:
        return VerificationError(
            "The state of the random number generator after a replay of the captured step is not that"
            " after the eager step. All values are the same, but the step draws other random numbers"
            " than at the capture.",
            "Look for random ops that depend on Python values.",
        )
    name = differing[0]
    return VerificationError(
        "A replay of the captured step comes to other numbers than the eager step from the same state,"
        f" on the same batch: first in {name}, {_shown(expected[name], found[name])} ({len(differing)}"
        f" of {len(expected)} tensors differ). The step, a hook or the optimizer reads something on the"
        " host that has changed since the capture, such as a global or an attribute of another object.",
        f"Pass it with the batch, or keep it in a buffer; or {FORWARD_BACKWARD}.",
    )


def _shown(expected: Tensor, found: Tensor) -> str:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return (
            f"expected {expected.dtype} of shape {tuple(expected.shape)}, found {found.dtype} of shape"
            f" {tuple(found.shape)}"
        )
    one, other = expected.flatten().cpu(), found.flatten().cpu()
    at = int((~_same(one, other)).nonzero()[0])
    text = f"expected {_number(one[at])}, found {_number(other[at])}"
    if not (expected.is_floating_point() and expected.isfinite().all()):
        return text
    apart = distance(one, other)
    units = apart / (torch.finfo(one.dtype).eps * (float(_wide(one).abs().max()) or 1.0))
    text += f", {units:.2g} times the precision of {one.dtype} apart"
    if apart <= rounding(one):
        text += ", as little as other kernels could explain, which are the same in every replay though"
    return text


def _number(element: Tensor) -> str:
    value = element.item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)
