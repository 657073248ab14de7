"""The lines of warnings in a watched step: those that the user would see without the modes.

A function or an op of torch that warns names the line of its caller. Under a mode that is the mode's own
line, and so the same warning would come once for each mode, without the user's line.
"""

from __future__ import annotations

import sys
import threading
import warnings
from itertools import dropwhile
from types import FrameType
from typing import Any

from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.device.lines.user_lines import DYNAMO

_HANDLES = "handle_torch_function"
_MACHINERY = ("torch.overrides", "torch.utils._python_dispatch", "torch._ops", *DYNAMO)

_lock = threading.Lock()
_entered = 0
_shown: Any = warnings.showwarning


def begin() -> None:
    """Show warnings at the lines of the callers; for each entered mode once."""
    global _entered, _shown
    with _lock:
        _entered += 1
        if _entered == 1 and warnings.showwarning is not _show:
            _shown, warnings.showwarning = warnings.showwarning, _show


def end() -> None:
    """End what `begin` has begun."""
    global _entered
    with _lock:
        _entered -= 1
        if not _entered and warnings.showwarning is _show:
            warnings.showwarning = _shown


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    caller = _caller_of_modes(filename) if filename.startswith(PACKAGE_DIR) else None
    if caller is None:
        _shown(message, category, filename, lineno, file, line)
        return
    # By the filters for that line, and not again if it has been shown there.
    warnings.warn_explicit(
        message,
        category,
        caller.f_code.co_filename,
        caller.f_lineno,
        module=caller.f_globals.get("__name__"),
        registry=caller.f_globals.setdefault("__warningregistry__", {}),
    )


def _caller_of_modes(filename: str) -> FrameType | None:
    """The frame that has called torch; None if the warning comes from no mode."""
    callers = [*dropwhile(lambda f: f.f_code.co_filename != filename, frames(sys._getframe(2)))]
    if callers:
        # Another line may give the same warning, through this one.
        callers[0].f_globals.get("__warningregistry__", {}).clear()
    is_handed_on = False
    for frame in callers:
        is_ours = frame.f_code.co_filename.startswith(PACKAGE_DIR)
        if not is_ours and not module_of(frame).startswith(_MACHINERY):
            if not is_handed_on:
                return frame
            is_handed_on = False  # the call of a function of torch's that goes to the modes first
        elif not is_ours:
            is_handed_on = frame.f_code.co_name.endswith(_HANDLES)
    return None
