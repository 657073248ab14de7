"""Counts of classes without a wait for the device, as torchmetrics needs them in a graph.

`torch.bincount` asks the device for the largest value, to know how long its result will be. The metrics
that count classes (macro averages, confusion matrices) know that beforehand, and could not go on with a
longer one. Here the same whole numbers are counted into a tensor of that length. A class outside of it,
which eagerly is an error of the metric, is an error of the device in a graph.
"""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torchmetrics.utilities import data

from lightning_cudagraph.compat.features import COUNTED_CLASSES
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode

__all__ = ["FixedCounts"]


@cache
def _counts() -> CodeType | None:
    """The code of the one function in torchmetrics that knows how many classes there are."""
    return data._bincount.__code__ if available(COUNTED_CLASSES) else None


class FixedCounts(OwnFunctionMode):
    """Count classes without asking the device, where torchmetrics knows how many there are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        length = kwargs.get("minlength")
        if func is torch.bincount and len(args) == 1 and length and _asked_by_metric(sys._getframe(1)):
            counts = torch.zeros(length, dtype=torch.long, device=args[0].device)
            classes = args[0].long()
            return counts.scatter_add_(0, classes, torch.ones_like(classes))
        return func(*args, **kwargs)


def _asked_by_metric(frame: FrameType | None) -> bool:
    """Tell if a call comes from that function."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of other modes
        frame = frame.f_back
    return frame is not None and frame.f_code is _counts()
