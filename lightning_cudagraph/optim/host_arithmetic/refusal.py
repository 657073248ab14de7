"""The refusal of a step of an optimizer that cannot be traced, with the line of user code."""

from __future__ import annotations

from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.optim.supported_optimizers import ANOTHER_OPTIMIZER


def refused(what: str, remedy: str = ANOTHER_OPTIMIZER) -> CaptureError:
    """The error for a step that does `what`, in words."""
    return CaptureError(
        f"The step of the optimizer {what}.", remedy, in_optimizer=True, location=user_location()
    )
