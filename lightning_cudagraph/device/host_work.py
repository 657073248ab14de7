"""Host work of a graph, done before and after each launch.

A graph holds launches and nothing else. Values that a step computes on the host (Adam's bias
corrections, from its step count) are computed before each launch, and copied to where the graph reads
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_cudagraph.compat.attributes import setting

_here = threading.local()


class HostWork:
    """Host work around each launch of one part of a graph.

    Attributes:
        gates: by the id of an optimizer, the gate around its step, if a gradient scaler may skip it.
    """

    def __init__(self) -> None:
        self._work: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.gates: dict[int, Any] = {}
        self.traced: dict[int, Any] = {}

    def add(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._work.append((before, after))

    @contextmanager
    def around_launch(self) -> Iterator[None]:
        for before, _ in self._work:
            before()
        yield
        for _, after in self._work:
            after()


def host_work_of(parts: list[HostWork]) -> AbstractContextManager[None]:
    """Make these the host work of the graph that this thread captures, one per part."""
    return setting(_here, parts=parts)


def work_under_capture() -> HostWork:
    """The host work of the part that this thread is capturing."""
    parts: list[HostWork] = _here.parts
    return parts[-1]
