"""Destinations of readings: the report, TensorBoard, other loggers, a trace file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from lightning_cudagraph.timing.readings.spans import Reading

__all__ = ["Sink", "Sinks"]


class Sink:
    """Takes readings, in the order of their steps.

    Not all have one layout: steps of a window of accumulation differ in it, and a step after a pause has
    no gap before it. A layout that comes up again is the same object, so that what is prepared for it
    can be found by its identity.
    """

    def add(self, reading: Reading) -> None:
        """Take the times of a step. On the step's path: no more than an append."""
        raise NotImplementedError

    def pause(self) -> None:
        """Write and draw, if there is anything: something that is not a training step comes now."""

    def close(self) -> None:
        """Write what is left, and put back what was changed: no more comes, perhaps after a failure."""


class Sinks(Sink):
    """Several destinations; closed from the last to the first, all of them also where one fails."""

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
