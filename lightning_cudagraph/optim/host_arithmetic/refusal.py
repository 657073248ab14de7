"""The refusal of a step of an optimizer that cannot be traced, with the line of user code."""

from __future__ import annotations

from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.errors import CaptureError


def refused(
    what: str, remedy: str = "Use another optimizer to have its step in the graph too."
) -> CaptureError:
    """The error for a step that does `what`, in words."""
    return CaptureError(
        f"The step of the optimizer {what}.", remedy, in_optimizer=True, location=user_location()
    )
