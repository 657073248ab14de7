"""Reads of metrics by a captured step, from outside of them: of their states, and of their counts.

The states of a metric have names like `weight` or `total`, which much code mentions that means something
else. So, other than with modules (`checks/audit/walker.py`), it is seen what is really read, and by
whom.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.device.sentry.sentry import Location, is_users, user_frame

__all__ = ["MetricReads", "metric_reads"]

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = "-packages" + os.sep
# Calls of these are seen to elsewhere.
_METHODS = frozenset({"forward", "update", "compute", "reset"})
# One of these shows all the others.
_EVERYTHING = frozenset({"__dict__"})
# Not so when torch looks there for one name.
_PLUMBING = [getattr(nn.Module, name).__code__ for name in ("__getattr__", "__setattr__", "__delattr__")]


@contextmanager
def metric_reads(note: Callable[[Metric, str, Location | None], None]) -> Iterator[None]:
    """Inside, be told of every attribute of a metric that the user's code asks for from outside of it.

    Args:
        note: is given the metric, the name of the attribute, and the user's line.
    """
    plain = Metric.__getattribute__

    def read(self: Metric, name: str) -> Any:
        if (not name.startswith("__") or name in _EVERYTHING) and name not in _METHODS:
            frame = sys._getframe(1)
            is_plumbing = any(frame.f_code is code for code in _PLUMBING)
            asker = None if is_plumbing else _asker(self, frame)
            if asker is not None:
                own = object.__getattribute__(self, "__dict__")
                for attribute in [*own] if name in _EVERYTHING else [name]:
                    if attribute not in _METHODS:
                        note(self, attribute, user_frame(asker))
        return plain(self, name)

    before = vars(Metric).get("__getattribute__")
    Metric.__getattribute__ = read  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if before is None:
            del Metric.__getattribute__
        else:  # that of a step around this one
            Metric.__getattribute__ = before  # type: ignore[method-assign]


class MetricReads:
    """The attributes of metrics that were read, for guards to compare."""

    def __init__(self) -> None:
        # By identity, because metrics compare as they please.
        self._read: dict[tuple[int, str], tuple[Metric, Location | None]] = {}

    def note(self, metric: Metric, name: str, where: Location | None) -> None:
        """Note one."""
        self._read.setdefault((id(metric), name), (metric, where))

    def first_of(self, metric: Metric, names: frozenset[str]) -> tuple[str, Location | None] | None:
        """The first of some attributes of a metric that was read, and where."""
        for (ident, name), (_, where) in self._read.items():
            if ident == id(metric) and name in names:
                return name, where
        return None

    def tell(self, mentioned: MentionedNames, leave_out: Callable[[Metric, str], bool]) -> None:
        """Have them compared before every replay.

        Args:
            mentioned: what the captured step mentions.
            leave_out: says of an attribute whether the graph has it in another way.
        """
        for (_, name), (metric, _) in self._read.items():
            if not leave_out(metric, name):
                namespaces = [vars(metric), metric._buffers]
                holder = next((own for own in namespaces if name in own), namespaces[0])
                mentioned.attributes.append((holder, name, f"a `{type(metric).__qualname__}`"))


def _asker(metric: Metric, frame: FrameType | None) -> FrameType | None:
    """The frame that asked for an attribute, past the metric's own code; None if not the user's."""
    while frame is not None:
        code = frame.f_code
        receiver = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        file = code.co_filename
        is_asker = is_users(code, frame.f_globals)
        passes_on = file.startswith("<") or (file.startswith(_STDLIB) and _PACKAGES not in file)
        if receiver is not metric and (is_asker or not passes_on):
            return frame if is_asker else None
        frame = frame.f_back
    return None
