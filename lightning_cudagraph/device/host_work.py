"""Host work of a graph, done before and after each launch.

A graph holds launches and nothing else. Values that a step computes on the host (Adam's bias
corrections, from its step count; random numbers that it draws there) are computed before each launch,
and copied to where the graph reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

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


class HostInput:
    """Static input of graphs for what the host computes before each launch.

    Attributes:
        memory: its memory on the device, in bytes.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    @contextmanager
    def filled(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Yield host memory for the first bytes; what it holds then is copied there.

        The copy is in order with the launches of the current stream, and from other memory each time:
        a copy that is still queued finds what it is to read.
        """
        # Pinned memory of torch's own pool is not reused before the copy is done.
        is_pinned = self.memory.device.type == "cuda"
        source = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        yield source
        self.memory[:size_bytes].copy_(source, non_blocking=True)


class LateValue:
    """A tensor of the device that the host reads later."""

    def __init__(self, value: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if value.is_cuda else None
        if self._event is None:
            self._value = value.clone()
        else:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event.record()

    def is_known(self) -> bool:
        """True if the host need not wait. On the emulator it is to do what it does for a GPU."""
        return self._event is not None and self._event.query()

    def read(self) -> torch.Tensor:
        """The value; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


def host_work_of(parts: list[HostWork]) -> AbstractContextManager[None]:
    """Make these the host work of the graph that this thread captures, one per part."""
    return setting(_here, parts=parts)


def work_under_capture() -> HostWork:
    """The host work of the part that this thread is capturing."""
    parts: list[HostWork] = _here.parts
    return parts[-1]
