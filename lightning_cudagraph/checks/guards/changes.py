"""A change that invalidates a graph, in words, with the user's line and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType

from lightning_cudagraph.checks.audit.host_lines import first_line
from lightning_cudagraph.checks.guards.remedies import CHOOSE
from lightning_cudagraph.checks.walk.parts import Moved
from lightning_cudagraph.errors import Location

_CHOICES = (str, bytes, bool, type(None))


class Change(str):
    """A change, in words.

    Attributes:
        location: the first line of user code that reads what has changed; None if it is unknown.
        is_after_pause: user code may have run before, as between two epochs.
    """

    location: Location | None = None
    remedy = ""
    is_after_pause = False

    @classmethod
    def of(cls, moved: Moved, codes: Sequence[CodeType]) -> Change:
        change = cls(moved.words)
        change.location = first_line(moved.attribute, True, codes)
        # Contents of a buffer are compared as bytes, without a label.
        is_choice = type(moved.now) in _CHOICES and moved.label != ""
        change.remedy = CHOOSE if is_choice else ""
        return change
