"""The owner of each piece of code that runs in a step."""

from __future__ import annotations

import os
from enum import Enum
from types import FrameType

from lightning_cudagraph.checks.audit.calls.known_calls import RECORDERS
from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.device.lines.user_lines import PACKAGES, is_of_python, is_users

_WRITERS = RECORDERS | {"numpy", "tqdm", "rich"}


class Origin(Enum):
    """The owner of a piece of code."""

    USERS = "the user's"
    FRAMEWORKS = "of torch, Lightning, or this package"
    PASSES_ON = "of Python's library or a writer package, which acts for its caller"


class Origins:
    """The owners of the code of frames."""

    def __init__(self, passing_on: frozenset[str]) -> None:
        self._passing_on = passing_on
        self.by_file: dict[str, Origin] = {}

    def of(self, frame: FrameType) -> Origin:
        file = frame.f_code.co_filename
        if file.startswith("<"):  # several modules can share such a name
            return Origin.USERS if is_users(frame.f_code, frame.f_globals) else Origin.PASSES_ON
        origin = self.by_file.get(file)
        if origin is None:
            if (
                file in self._passing_on
                or is_of_python(file)
                or file.partition(PACKAGES)[2].partition(os.sep)[0] in _WRITERS
            ):
                origin = Origin.PASSES_ON
            else:
                is_theirs = is_users(frame.f_code, frame.f_globals)
                origin = Origin.USERS if is_theirs else Origin.FRAMEWORKS
            self.by_file[file] = origin
        return origin

    def is_users(self, frame: FrameType) -> bool:
        return self.of(frame) is Origin.USERS

    def user_caller(self, frame: FrameType | None) -> FrameType | None:
        """The frame of user code that made a call, past code that acts for its caller; or None."""
        caller = next((f for f in frames(frame) if self.of(f) is not Origin.PASSES_ON), None)
        return caller if caller is not None and self.is_users(caller) else None
