"""Frames of the call stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, outwards; none for None."""
    # Not `traceback.walk_stack`, which begins at the current frame if it is given None.
    while frame is not None:
        yield frame
        frame = frame.f_back


def receiver_of(frame: FrameType) -> Any:
    """The first argument of the function of a frame, of a method its object; None if it has none."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def module_of(frame: FrameType) -> str:
    """The name of the module of a frame; empty if its globals have none."""
    return str(frame.f_globals.get("__name__", ""))
