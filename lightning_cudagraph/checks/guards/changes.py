"""A change that invalidates a graph, in words, with the user's line and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType

from lightning_cudagraph.checks.audit.host_lines import first_line
from lightning_cudagraph.checks.audit.parts import Moved
from lightning_cudagraph.errors import Location, see

_CHOOSE = (
    "Branch on `batch_idx`, on `global_step` or on a whole number in the batch in its place: each path"
    " has a graph." + see("paths")
)
_CHOICES = (str, bytes, bool, type(None))


class Change(str):
    """A change, in words.

    Attributes:
        location: the first line of user code that reads what has changed; None if it is unknown.
        remedy: what to do about a text, a truth value or the like, for which no tensor can stand; else
            empty.
    """

    location: Location | None = None
    remedy = ""

    @classmethod
    def of(cls, moved: Moved, codes: Sequence[CodeType]) -> Change:
        """The change of a part that the step reads.

        Args:
            codes: the user code of the step.
        """
        change = cls(moved.words)
        change.location = first_line(moved.attribute, True, codes)
        change.remedy = _CHOOSE if type(moved.now) in _CHOICES else ""
        return change
