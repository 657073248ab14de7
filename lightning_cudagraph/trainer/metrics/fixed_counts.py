"""Class counts of fixed length, without the synchronisation in `torch.bincount`.

`torch.bincount` reads the largest value on the host, to know the length of its result. The metrics that
count classes (macro averages, confusion matrices) know the length beforehand, and fail with a longer
result. Here the same integers are counted into a tensor of that length. A class outside of it, which
eagerly is an error of the metric, is an error of the device in a graph.
"""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torchmetrics.utilities import data

from lightning_cudagraph.compat.features import COUNTED_CLASSES
from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.compat.tables import available
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode


@cache
def _counts() -> CodeType | None:
    """The code of torchmetrics' `_bincount`, which knows the number of classes; None if unavailable."""
    return data._bincount.__code__ if available(COUNTED_CLASSES) else None


class FixedCounts(OwnFunctionMode):
    """Function mode that replaces `torch.bincount` in torchmetrics' `_bincount`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        length = kwargs.get("minlength")
        if func is torch.bincount and len(args) == 1 and length and _is_of_metric(sys._getframe(1)):
            counts = torch.zeros(length, dtype=torch.long, device=args[0].device)
            classes = args[0].long()
            return counts.scatter_add_(0, classes, torch.ones_like(classes))
        return func(*args, **kwargs)


def _is_of_metric(frame: FrameType | None) -> bool:
    """True if a call comes from torchmetrics' `_bincount`."""
    codes = (caller.f_code for caller in frames(frame))
    # Past the handlers of other modes.
    return next((code for code in codes if code.co_name != "__torch_function__"), None) is _counts()
