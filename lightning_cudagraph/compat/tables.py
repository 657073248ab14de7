"""All private names, and whether what is built on them can be done."""

from __future__ import annotations

import torch

from lightning_cudagraph.compat.features import (
    BROKEN_CAPTURES,
    CUDA_STREAMS,
    HELD_GRADIENTS,
    Feature,
)
from lightning_cudagraph.compat.names.lightning_names import LIGHTNING
from lightning_cudagraph.compat.names.python_names import PYTHON
from lightning_cudagraph.compat.names.tensorboard_names import TENSORBOARD
from lightning_cudagraph.compat.names.torch_names import TORCH
from lightning_cudagraph.compat.names.torchmetrics_names import TORCHMETRICS
from lightning_cudagraph.compat.private_names import PrivateName, trouble_with
from lightning_cudagraph.errors import CUDAGraphError

__all__ = ["TABLE", "available", "notes", "notes_of_captures", "require"]

TABLE: tuple[PrivateName, ...] = (*TORCH, *LIGHTNING, *TORCHMETRICS, *TENSORBOARD, *PYTHON)


def require(*features: Feature) -> None:
    """Refuse what cannot be right.

    Raises:
        CUDAGraphError: naming the first private name that is gone, or is not what it was.
    """
    for feature in features:
        if trouble := _trouble(feature):
            raise CUDAGraphError(
                f"{trouble}, and this package builds {feature.what} on it. Use versions that"
                f" docs/versions.md names as tested, or {feature.without}."
            )


def available(feature: Feature) -> bool:
    """Whether a feature can be had."""
    return not _trouble(feature)


def notes(*features: Feature) -> list[str]:
    """Which of some optional features are off, why, and what that costs, in words."""
    troubles = [(feature, _trouble(feature)) for feature in features]
    return [
        f"off: {feature.what}, because {trouble}; {feature.without}"
        for feature, trouble in troubles
        if trouble
    ]


def _trouble(feature: Feature) -> str:
    # Examples of autograd are none in evaluations.
    with torch.inference_mode(False), torch.enable_grad():
        return trouble_with(TABLE, feature)


def notes_of_captures(device: torch.device) -> list[str]:
    """Which optional features of captures are off on a device, in words."""
    return notes(HELD_GRADIENTS, *((CUDA_STREAMS, BROKEN_CAPTURES) if device.type == "cuda" else ()))
