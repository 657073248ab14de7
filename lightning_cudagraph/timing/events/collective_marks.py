"""The collectives of a step among its marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, STEP_TAG, Span

__all__ = ["Collectives"]

_ALL_REDUCE = "all_reduce"


class Collectives:
    """Those of one step, by the numbers of the marks when they can begin, and when they are done.

    One that runs beside the stream of the step waits for what it works on, and for the one before it.
    Which comes later is known once the step has run: so its beginning is no event, but a number that
    follows from two, and comes behind the events.

    Attributes:
        ends: the marks at the ends of those that run beside the step.
        n_begins: how many of these there are.
    """

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.n_begins = 0
        # Ready and end of those that run beside the step, in the order in which they are issued.
        self._beside: list[tuple[str, int, int]] = []
        self._waited_for: list[tuple[str, int, int]] = []
        # Tensors of collectives under way: a collective that is waited for at once lets go of its own.
        self._kept: list[Any] = []

    def add(self, name: str, ready: int, end: int, tensors: Any) -> None:
        """Take one that runs beside the stream of the step.

        Args:
            name: what it is.
            ready: the mark of what is before it on that stream.
            end: the mark behind it.
            tensors: its tensors, held until it is done.
        """
        self._beside.append((name, ready, end))
        self._kept.append(tensors)
        self.ends.append(end)
        self.n_begins += 1

    def add_waited_for(self, name: str, begin: int, end: int) -> None:
        """Take one that runs between the kernels of the step."""
        self._waited_for.append((name, begin, end))

    def let_go(self) -> None:
        """Let go of their tensors: they are done."""
        self._kept.clear()

    def begins_ms(self, offsets_ms: Sequence[float]) -> list[float]:
        """The begins of those beside the step."""
        begins_ms: list[float] = []
        done_ms = 0.0
        for _, ready, end in self._beside:
            # Stamps of one point in time on two streams can be in either order.
            begins_ms.append(min(max(offsets_ms[ready], done_ms), offsets_ms[end]))
            done_ms = offsets_ms[end]
        return begins_ms

    def spans(self, n_events: int) -> list[Span]:
        """The spans of the marks, in the order in which they are shown.

        Args:
            n_events: how many events there are, which those of `begins_ms` come behind.
        """
        calls: dict[str, list[tuple[int, int]]] = {}
        for number, (name, _, end) in enumerate(self._beside, n_events):
            calls.setdefault(name, []).append((number, end))
        for name, begin, end in self._waited_for:
            calls.setdefault(name, []).append((begin, end))
        found = [
            Span(STEP_TAG + name, "communication", tuple(sorted(calls[name], key=lambda call: call[1])))
            for name in sorted(calls, key=lambda name: name != _ALL_REDUCE)
        ]
        if exposed := self._exposed():
            found.insert(1, Span(EXPOSED_TAG, "communication", exposed))
        return found

    def _exposed(self) -> tuple[tuple[int, int], ...]:
        """The begins and ends of waits of the step for all-reduces."""
        waited_for = [(begin, end) for name, begin, end in self._waited_for if name == _ALL_REDUCE]
        beside = [(ready, end) for name, ready, end in self._beside if name == _ALL_REDUCE]
        return (*waited_for, *beside[-1:])
