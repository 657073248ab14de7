"""The frames of an error that its traceback shows: the user's own.

Between the call of `fit` and the user's line in the step lie some forty frames of Lightning, torch and
this package. They tell the user nothing, and the message names the lines.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from lightning_cudagraph.device.lines.user_lines import is_installed, is_users
from lightning_cudagraph.errors import UnsupportedError

_SETTING = "CUDAGRAPH_TRACEBACK"
_ALL = "full"
# Before, a bare `raise` goes on with the entry that the handler has begun with.
_RAISES_FROM_ERROR = sys.version_info >= (3, 11)


def shows_all_frames() -> bool:
    """True if the user asks for all frames."""
    return os.environ.get(_SETTING) == _ALL


def leave_users_frames(error: BaseException, of_any: bool = False) -> None:
    """Take the frames of libraries out of the tracebacks of an error and of its causes.

    To be called where an error leaves, by code that raises it again. `CUDAGRAPH_TRACEBACK=full` in the
    environment keeps all frames.

    Args:
        of_any: also of an error of the user's code, which is left as it is otherwise.
    """
    if not (of_any or isinstance(error, UnsupportedError)) or shows_all_frames():
        return
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _users(cause.__traceback__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _users(first: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    entry = first
    while entry is not None:
        code = entry.tb_frame.f_code
        is_own = is_users(code, entry.tb_frame.f_globals) and not is_installed(code.co_filename)
        if is_own or (entry is first and not _RAISES_FROM_ERROR):
            entries.append(entry)
        entry = entry.tb_next
    following = None
    for entry in reversed(entries):
        entry.tb_next = following
        following = entry
    return following
