"""The base class of sinks, and several sinks as one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from lightning_cudagraph.timing.readings.spans import Reading


class Sink:
    """Destination of readings, which come in the order of their steps.

    Layouts differ between accumulation phases, and a step after a pause has no gap. A layout that comes
    again is the same object, so that sinks can cache by identity.
    """

    def add(self, reading: Reading) -> None:
        """Add the times of a step. On the critical path: no more than an append."""
        raise NotImplementedError

    def pause(self) -> None:
        """Write and draw: something else than a training step follows."""

    def close(self) -> None:
        """Write the rest, and undo patches: no more readings follow, perhaps after a failure."""


class Sinks(Sink):
    """Several sinks; closed in reverse order, all of them even if one fails."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def add(self, reading: Reading) -> None:
        for sink in self._sinks:
            sink.add(reading)

    def pause(self) -> None:
        for sink in self._sinks:
            sink.pause()

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
