"""Work of the host that belongs to a graph: what goes before each launch of it, and behind it.

A graph holds launches and nothing else. What a step computes on the host (the bias corrections of
Adam, from the number of its steps) is computed in each replay, before the launch, and copied to where
the graph reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["HostWork", "host_work_of", "work_under_capture"]

_here = threading.local()


class HostWork:
    """What the host does around each launch of one part of a graph.

    Attributes:
        skipped: by the identity of an optimizer, a flag on the device that says, after a replay, whether
            the optimizer's step was skipped in it.
    """

    def __init__(self) -> None:
        self._work: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.skipped: dict[int, Tensor] = {}

    def add(self, before: Callable[[], None], behind: Callable[[], None]) -> None:
        """Take work to do before each launch, and behind it."""
        self._work.append((before, behind))

    @contextmanager
    def around_launch(self) -> Iterator[None]:
        """Do it around what is inside, the launch."""
        for before, _ in self._work:
            before()
        yield
        for _, behind in self._work:
            behind()


@contextmanager
def host_work_of(parts: list[HostWork]) -> Iterator[None]:
    """Inside, a graph is captured in this thread that has this work, part by part."""
    outer = getattr(_here, "parts", None)
    _here.parts = parts
    try:
        yield
    finally:
        _here.parts = outer


def work_under_capture() -> HostWork:
    """The host work of the part of a graph whose capture is under way in this thread."""
    parts: list[HostWork] = _here.parts
    return parts[-1]
