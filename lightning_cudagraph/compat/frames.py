"""Frames of the call stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, outwards; none for None."""
    # Not `traceback.walk_stack`, which begins at the current frame if it is given None.
    while frame is not None:
        yield frame
        frame = frame.f_back
