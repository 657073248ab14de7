"""The times of all processes of a run, put side by side: which of them do the others wait for?

Under synchronous data parallelism every step takes all processes the same time, since each waits in the
collectives for the last one. So a straggler does not show in the times of steps. It is the process that
has the most work of its own, and waits the least.

Each process sums up its own steps. In pauses the sums of all are gathered in the first process, through
the store that the process group was made with. No process waits for another: what one does not send is
not shown.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Protocol

import numpy as np

from lightning_cudagraph.timing.lead_in import GAP_TAG
from lightning_cudagraph.timing.sinks import Sink
from lightning_cudagraph.timing.spans import (
    EXPOSED_TAG,
    RANKS_TAG,
    STEP_TAG,
    TOTAL_TAG,
    Reading,
    SpanLayout,
)

__all__ = [
    "PARTS",
    "RankRow",
    "RankTable",
    "RankTimes",
    "SharedRun",
    "Store",
    "Usual",
    "usual_parts",
]

# What a process tells of its steps. The first three follow from the others.
PARTS = (
    "step",
    "work",
    "wait",
    "forward",
    "backward",
    "host",
    "optimizer",
    "gap",
    "copy",
    "all_reduce",
)
_OF_OPTIMIZER = ("clipping", "scaler", "optimizer")
# What lies behind one another from the end of a step to the end of the next.
_TILES = ("copy", "gap", "forward", "backward", "host", "optimizer")
_ALL_REDUCE, _EXPOSED = "all_reduce", EXPOSED_TAG.removeprefix(STEP_TAG)
_OTHERS = "other collectives"
_WINDOWS_KEPT = 16
# How long the first process waits at the end of training for what the others have still to leave.
_LAST_WORD_S = 5.0
_POLL_S = 0.005


@dataclass(frozen=True)
class SharedRun:
    """A run of several processes.

    Attributes:
        name: all of them give it this one, and no other one of theirs.
        waited_s: tells how long the host of this process has waited for others before its steps, in
            seconds, all in all.
    """

    name: str
    waited_s: Callable[[], float] = lambda: 0.0


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Leave something."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""

    def get(self, key: str) -> bytes:
        """What was left."""

    def delete_key(self, key: str) -> bool:
        """Take it away."""


@dataclass(frozen=True)
class Usual:
    """What something takes over the steps of a window, in milliseconds."""

    mean_ms: float
    p50_ms: float
    p95_ms: float


@dataclass(frozen=True)
class RankRow:
    """The steps of one process.

    Attributes:
        rank: of the process.
        host: its machine.
        first_step: the first of the steps, as the trainer's loggers count.
        last_step: the last.
        n_steps: how many steps of the optimizer were timed.
        parts: of `PARTS`, those that the steps have. ``step`` is the time from the end of a step to the
            end of the next, ``wait`` what of it the process does nothing but wait for others, in
            collectives or before it launches the step, ``work`` the rest: what it would take without
            them. ``backward`` has no wait for all-reduces in it, and ``gap`` none for a launch.
    """

    rank: int
    host: str
    first_step: int
    last_step: int
    n_steps: int
    parts: dict[str, Usual]

    def p50_ms(self, part: str) -> float:
        """The median of a part; 0 if there is none."""
        return self.parts[part].p50_ms if part in self.parts else 0.0


@dataclass(frozen=True)
class RankTable:
    """The same steps of all processes, in the order of their ranks."""

    rows: tuple[RankRow, ...]

    def median_ms(self, part: str) -> float:
        """What is usual among the processes."""
        return float(np.median([row.p50_ms(part) for row in self.rows]))

    @property
    def slowest(self) -> RankRow:
        """The process with the most work of its own."""
        return max(self.rows, key=lambda row: row.p50_ms("work"))

    @property
    def fastest(self) -> RankRow:
        """The process with the least."""
        return min(self.rows, key=lambda row: row.p50_ms("work"))

    @property
    def scalars(self) -> dict[str, float]:
        """What is drawn as curves, by tag."""
        slowest, fastest = self.slowest, self.fastest
        work_ms = [row.p50_ms("work") for row in (fastest, slowest)]
        waits_ms = [row.p50_ms("wait") for row in self.rows]
        return {
            f"{RANKS_TAG}step": self.median_ms("step"),
            f"{RANKS_TAG}work_slowest": work_ms[1],
            f"{RANKS_TAG}work_median": self.median_ms("work"),
            f"{RANKS_TAG}work_fastest": work_ms[0],
            f"{RANKS_TAG}work_spread": work_ms[1] - work_ms[0],
            f"{RANKS_TAG}wait_least": min(waits_ms),
            f"{RANKS_TAG}wait_most": max(waits_ms),
            "ranks/slowest": float(slowest.rank),
        }


class _Calls:
    """The marks between which the parts lie of steps with one layout."""

    def __init__(self, layout: SpanLayout) -> None:
        self._of: dict[str, list[tuple[int, int]]] = {}
        for span in layout.spans:
            if not span.tag.startswith(STEP_TAG) or span.tag == TOTAL_TAG:
                continue
            part = span.tag.removeprefix(STEP_TAG)
            if part in _OF_OPTIMIZER:
                part = "optimizer"
            elif span.lane == "communication" and part not in (_ALL_REDUCE, _EXPOSED):
                part = _OTHERS
            self._of.setdefault(part, []).extend(span.calls)

    def parts_ms(self, offsets_ms: Sequence[float]) -> dict[str, float]:
        return {
            part: sum([offsets_ms[end] - offsets_ms[begin] for begin, end in calls])
            for part, calls in self._of.items()
        }


def usual_parts(readings: Sequence[Reading]) -> dict[str, Usual]:
    """What steps take, of `PARTS` those that they have.

    Args:
        readings: at least one, each of a whole step.
    """
    layouts: dict[SpanLayout, _Calls] = {}
    columns: dict[str, list[float]] = {}
    # Where no gap at all is known, steps are what lies inside of them.
    inside_only = not any(GAP_TAG in reading.layout.tags for reading in readings)
    for reading in readings:
        if (calls := layouts.get(reading.layout)) is None:
            calls = layouts[reading.layout] = _Calls(reading.layout)
        parts_ms = calls.parts_ms(reading.offsets_ms)
        exposed_ms = parts_ms.pop(_EXPOSED, 0.0)
        # The device has waited as long, if it had nothing left to do.
        before_ms = min(reading.waited_ms, parts_ms.get("gap", 0.0))
        wait_ms = exposed_ms + before_ms + parts_ms.pop(_OTHERS, 0.0)
        if inside_only or "gap" in parts_ms:  # there is none behind something else than a step
            step_ms = sum([parts_ms.get(part, 0.0) for part in _TILES])
            columns.setdefault("step", []).append(step_ms)
            columns.setdefault("work", []).append(step_ms - wait_ms)
        columns.setdefault("wait", []).append(wait_ms)
        if "backward" in parts_ms:
            parts_ms["backward"] -= exposed_ms
        if "gap" in parts_ms:
            parts_ms["gap"] -= before_ms
        for part, part_ms in parts_ms.items():
            columns.setdefault(part, []).append(part_ms)
    usual: dict[str, Usual] = {}
    for length in set(map(len, columns.values())):  # at once, which is quicker
        parts = [part for part, values_ms in columns.items() if len(values_ms) == length]
        values_ms = np.array([columns[part] for part in parts])
        p50_ms, p95_ms = np.percentile(values_ms, [50, 95], axis=1)
        numbers = zip(values_ms.mean(axis=1).tolist(), p50_ms.tolist(), p95_ms.tolist(), strict=True)
        usual.update((part, Usual(*of_part)) for part, of_part in zip(parts, numbers, strict=True))
    return {part: usual[part] for part in PARTS if part in usual}


class RankTimes(Sink):
    """Sums up the steps of this process, window by window; in the first process, shows those of all.

    A window has the steps of so many numbers: the same ones in all processes. Windows are exchanged in
    pauses, through a store and not by a collective: a process that fails, or comes to a pause of its
    own, holds up none of the others.

    Args:
        store: through which processes exchange them; of this run alone.
        rank: of this process.
        size: the number of processes.
        window_steps: the number of steps of a window.
        on_table: called in the first process for each window that all have sent.

    Attributes:
        trouble: why the times of the others are not known, or no more of them; or nothing.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        window_steps: int,
        on_table: Callable[[RankTable], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._window_steps = window_steps
        self._on_table = on_table
        self._host = socket.gethostname()
        # Readings by the number of the window; the last one is not complete.
        self._windows: dict[int, list[Reading]] = {}
        # Windows that this process has sent, and that have not been shown.
        self._open: deque[int] = deque(maxlen=_WINDOWS_KEPT)
        self._tables: deque[RankTable] = deque(maxlen=2)
        self.trouble = ""

    def add(self, reading: Reading) -> None:
        window = reading.step // self._window_steps
        if window not in self._windows:
            self._windows[window] = []
            if len(self._windows) > _WINDOWS_KEPT:
                del self._windows[next(iter(self._windows))]
        self._windows[window].append(reading)

    def pause(self) -> None:
        self._send(list(self._windows)[:-1])
        self._receive()

    def finish(self) -> RankTable | None:
        """Exchange the last windows, with a short wait for those of the others.

        Returns:
            In the first process, the last steps of all; None if they are not known.
        """
        self._send(list(self._windows))
        deadline_s = monotonic() + _LAST_WORD_S
        self._receive()
        while self._rank == 0 and self._open and monotonic() < deadline_s and not self.trouble:
            threading.Event().wait(_POLL_S)
            self._receive()
        if self._open and not (self._tables or self.trouble):
            self.trouble = f"not all have sent theirs within {_LAST_WORD_S:.0f} s of the end"
        # The last window may have a few steps only.
        return max(
            self._tables,
            key=lambda table: table.rows[0].n_steps * (2 if table is self._tables[-1] else 1),
            default=None,
        )

    def _send(self, windows: list[int]) -> None:
        for window in windows:
            readings = self._windows.pop(window)
            if self.trouble:
                continue
            first, last = readings[0].step, readings[-1].step
            row = RankRow(self._rank, self._host, first, last, len(readings), usual_parts(readings))
            key, text = self._key(window, self._rank), json.dumps(asdict(row))
            self._try(lambda: self._store.set(key, text))  # noqa: B023
            if self._rank == 0:
                self._open.append(window)

    def _receive(self) -> None:
        """In the first process: show the windows that all have sent."""
        for window in tuple(self._open):
            rows = None if self.trouble else self._try(lambda: self._taken(window))  # noqa: B023
            if rows is None:
                continue
            while self._open and self._open[0] <= window:  # one that all are past does not come any more
                self._open.popleft()
            table = RankTable(rows)
            self._tables.append(table)
            self._on_table(table)

    def _taken(self, window: int) -> tuple[RankRow, ...] | None:
        """What all have left for a window, or None if one of them has not."""
        keys = [self._key(window, rank) for rank in range(self._size)]
        if not self._store.check(keys):
            return None
        rows = tuple(_unpacked(self._store.get(key)) for key in keys)
        with contextlib.suppress(NotImplementedError):
            for key in keys:
                self._store.delete_key(key)
        return rows

    @staticmethod
    def _key(window: int, rank: int) -> str:
        return f"{window}/{rank}"

    def _try(self, do: Callable[[], Any]) -> Any:
        """Do something with the store. It can be gone, with the process that had it."""
        try:
            return do()
        except RuntimeError as error:
            self.trouble = f"{type(error).__name__}: {error}"
            return None


def _unpacked(text: bytes) -> RankRow:
    found = json.loads(text)
    found["parts"] = {part: Usual(**usual) for part, usual in found["parts"].items()}
    return RankRow(**found)
