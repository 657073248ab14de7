"""Marks of the collectives in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, STEP_TAG, Span

_ALL_REDUCE = "all_reduce"


class Collectives:
    """The collectives of one step, each by the numbers of two marks: ready to begin, and done.

    A collective on a stream of its own begins when its inputs are ready and the collective before it is
    done. The later of the two is known once the step has run. So its beginning has no event: it is
    computed from two marks, and numbered after all events. `ends` are of these alone.
    """

    def __init__(self) -> None:
        self.ends: list[int] = []
        # Name, ready and end mark of those on streams of their own, in the order of issue.
        self._overlapping: list[tuple[str, int, int]] = []
        self._waited_for: list[tuple[str, int, int]] = []
        # Tensors of collectives under way. Torch releases its own references at `Work.wait`, which
        # `mark_end` calls while the collective may still run.
        self._held: list[Any] = []

    def add(self, name: str, ready: int, end: int, tensors: Any) -> None:
        """Add a collective on a stream of its own, whose inputs are there at the mark `ready`."""
        self._overlapping.append((name, ready, end))
        self._held.append(tensors)
        self.ends.append(end)

    def add_waited_for(self, name: str, begin: int, end: int) -> None:
        """Add a collective that runs between the kernels of the step."""
        self._waited_for.append((name, begin, end))

    def let_go(self) -> None:
        """Release the tensors of collectives that are done."""
        self._held.clear()

    def begins_ms(self, offsets_ms: Sequence[float]) -> list[float]:
        """Beginnings of the collectives on streams of their own, in milliseconds."""
        begins_ms: list[float] = []
        done_ms = 0.0
        for _, ready, end in self._overlapping:
            # Two streams may report one point in time in either order.
            begins_ms.append(min(max(offsets_ms[ready], done_ms), offsets_ms[end]))
            done_ms = offsets_ms[end]
        return begins_ms

    def spans(self, n_events: int) -> list[Span]:
        """The spans in display order; the marks of `begins_ms` are numbered from `n_events` on."""
        calls: dict[str, list[tuple[int, int]]] = {}
        for number, (name, _, end) in enumerate(self._overlapping, n_events):
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
        """Begin and end marks of the step's waits for all-reduces."""
        waited_for = [(begin, end) for name, begin, end in self._waited_for if name == _ALL_REDUCE]
        overlapping = [(ready, end) for name, ready, end in self._overlapping if name == _ALL_REDUCE]
        return (*waited_for, *overlapping[-1:])
