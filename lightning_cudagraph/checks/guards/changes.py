"""A change that invalidates a graph, in words, with the user's line and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType

from torch import nn

from lightning_cudagraph.checks.audit.host_lines import first_line
from lightning_cudagraph.checks.guards.remedies import remedy_of_part
from lightning_cudagraph.checks.walk.host_objects import is_users_class
from lightning_cudagraph.checks.walk.parts import Moved
from lightning_cudagraph.errors import Location


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
        name = moved.attribute
        if isinstance(moved.holder, nn.Module) and not is_users_class(type(moved.holder)):
            name = moved.of.strip("`").rpartition(".")[2]  # a layer of torch reads its own attributes
        change.location = first_line(name, True, codes)
        change.remedy = remedy_of_part(moved, change.location)
        return change
