"""Reads of metric attributes (states, counts) by user code in a captured step.

The states of a metric have common names, such as `weight` or `total`. Modules are audited by the names
that their code mentions (`checks/walk/walker.py`); for metrics that would match unrelated code, so
actual reads are intercepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.compat.frames import frames, receiver_of
from lightning_cudagraph.device.lines.user_lines import is_of_python, is_users, user_frame
from lightning_cudagraph.errors import Location

# Patched methods, which are handled in `states.py`.
_METHODS = frozenset({"forward", "update", "compute", "reset"})
# Attributes that expose all others.
_EVERYTHING = frozenset({"__dict__"})
# Code of torch that reads `__dict__` for one name only.
_PLUMBING = [getattr(nn.Module, name).__code__ for name in ("__getattr__", "__setattr__", "__delattr__")]


@contextmanager
def metric_reads(note: Callable[[Metric, str, Location | None], None]) -> Iterator[None]:
    """Report reads of metric attributes by user code outside of the metric, with the line."""
    plain = Metric.__getattribute__

    def read(self: Metric, name: str) -> Any:
        if (not name.startswith("__") or name in _EVERYTHING) and name not in _METHODS:
            frame = sys._getframe(1)
            is_plumbing = any(frame.f_code is code for code in _PLUMBING)
            user_caller = None if is_plumbing else _user_caller(self, frame)
            if user_caller is not None:
                own = object.__getattribute__(self, "__dict__")
                for attribute in [*own] if name in _EVERYTHING else [name]:
                    if attribute not in _METHODS:
                        note(self, attribute, user_frame(user_caller))
        return plain(self, name)

    before = vars(Metric).get("__getattribute__")
    Metric.__getattribute__ = read  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if before is None:
            del Metric.__getattribute__
        else:  # of an enclosing step
            Metric.__getattribute__ = before  # type: ignore[method-assign]


class MetricReads:
    """The attributes of metrics that were read, as guards."""

    def __init__(self) -> None:
        # By identity, because metrics define `==` and hashes of their own.
        self._read: dict[tuple[int, str], tuple[Metric, Location | None]] = {}

    def note(self, metric: Metric, name: str, where: Location | None) -> None:
        self._read.setdefault((id(metric), name), (metric, where))

    def first_of(self, metric: Metric, names: frozenset[str]) -> tuple[str, Location | None] | None:
        """The first of some attributes of a metric that was read, with the line."""
        for (ident, name), (_, where) in self._read.items():
            if ident == id(metric) and name in names:
                return name, where
        return None

    def tell(self, mentioned: MentionedNames, leave_out: Callable[[Metric, str], bool]) -> None:
        """Guard the attributes: add them to those that are compared before every replay."""
        for (_, name), (metric, _) in self._read.items():
            if not leave_out(metric, name):
                namespaces = [vars(metric), metric._buffers]
                holder = next((own for own in namespaces if name in own), namespaces[0])
                mentioned.attributes.append((holder, name, f"a `{type(metric).__qualname__}`"))


def _user_caller(metric: Metric, frame: FrameType | None) -> FrameType | None:
    """The user's frame that reads an attribute, outside of the metric's own code; None if another's."""
    for caller in frames(frame):
        code = caller.f_code
        file = code.co_filename
        is_users_code = is_users(code, caller.f_globals)
        passes_on = file.startswith("<") or is_of_python(file)
        if receiver_of(caller) is not metric and (is_users_code or not passes_on):
            return caller if is_users_code else None
    return None
