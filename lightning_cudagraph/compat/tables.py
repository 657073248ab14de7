"""The table of all private names, and the features that are available with them."""

from __future__ import annotations

import torch

from lightning_cudagraph.compat.features import Feature
from lightning_cudagraph.compat.names.lightning_names import LIGHTNING
from lightning_cudagraph.compat.names.python_names import PYTHON
from lightning_cudagraph.compat.names.tensorboard_names import TENSORBOARD
from lightning_cudagraph.compat.names.torch_names import TORCH
from lightning_cudagraph.compat.names.torchmetrics_names import TORCHMETRICS
from lightning_cudagraph.compat.probes import PrivateName, trouble_with
from lightning_cudagraph.errors import CUDAGraphError

TABLE: tuple[PrivateName, ...] = (*TORCH, *LIGHTNING, *TORCHMETRICS, *TENSORBOARD, *PYTHON)


def require(*features: Feature) -> None:
    """Refuse features with a private name that is missing or changed; the error names the first."""
    for feature in features:
        if trouble := _trouble(feature):
            raise CUDAGraphError(
                f"{trouble}, and this package builds {feature.what} on it. Use versions that"
                f" docs/versions.md names as tested, or {feature.without}."
            )


def available(feature: Feature) -> bool:
    """True if all private names of a feature are as expected."""
    return not _trouble(feature)


def notes(*features: Feature) -> list[str]:
    """One line for each optional feature that is off: why, and what that costs."""
    troubles = [(feature, _trouble(feature)) for feature in features]
    return [
        f"off: {feature.what}, because {trouble}; {feature.without}"
        for feature, trouble in troubles
        if trouble
    ]


def _trouble(feature: Feature) -> str:
    # Probes run autograd, which evaluations switch off.
    with torch.inference_mode(False), torch.enable_grad():
        return trouble_with(TABLE, feature)
