"""Comparison of the processes of a run: detection of stragglers.

Under synchronous data parallelism, a step takes the same time in all processes, since each waits in the
collectives for the last. So step times do not show a straggler: it is the process with the most work of
its own, and the least wait.

Each process summarises its own steps. In pauses rank 0 gathers the summaries, through the store of the
process group. No process waits for another; a window that one has not sent is not shown.
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
from typing import Any

import numpy as np

from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.spans import (
    EXPOSED_TAG,
    OF_OPTIMIZER,
    RANKS_TAG,
    STEP_TAG,
    TOTAL_TAG,
    Reading,
)
from lightning_cudagraph.timing.readings.windows import Times, WindowSummary, column_times

# The parts of steps that are measured, and those that processes exchange: some are computed from these.
MEASURED_PARTS = ("forward", "backward", "host", "optimizer", "gap", "copy", "all_reduce")
_PARTS = ("step", "work", "wait", *MEASURED_PARTS)
# The parts that tile the time from the end of a step to the end of the next.
_TILES = ("copy", "gap", "forward", "backward", "host", "optimizer")
# The most windows that wait for a pause, or for other processes; older ones are dropped.
_WAITING_WINDOWS = 8
# The longest wait of rank 0, at the end of training, for the last windows of the others.
_LAST_WORD_S = 5.0
_POLL_S = 0.005


@dataclass(frozen=True)
class SharedRun:
    """A run of several processes, with a name that is the same in all of them and unique among runs.

    `waited_s` returns the total wait of this process's host for others before its steps.
    """

    name: str
    waited_s: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class RankRow:
    """The steps of one process in a window.

    The times in `parts` are by name, those that the steps have. ``step`` is the time from the
    end of a step to the end of the next, ``wait`` its part in which the process only waits for others,
    in collectives or before the launch, and ``work`` the rest: the time that it would take alone.
    ``backward`` is without waits for all-reduces, and ``gap`` without those for a launch.
    """

    rank: int
    host: str
    first_step: int
    last_step: int
    n_steps: int
    parts: dict[str, Times]

    def p50_ms(self, part: str) -> float:
        """The median of a part; 0 if the steps lack it."""
        return self.parts[part].p50_ms if part in self.parts else 0.0


@dataclass(frozen=True)
class RankTable:
    """The same steps of all processes, in the order of ranks."""

    rows: tuple[RankRow, ...]

    def median_ms(self, part: str) -> float:
        return float(np.median([row.p50_ms(part) for row in self.rows]))

    @property
    def slowest(self) -> RankRow:
        return max(self.rows, key=lambda row: row.p50_ms("work"))

    @property
    def fastest(self) -> RankRow:
        return min(self.rows, key=lambda row: row.p50_ms("work"))

    @property
    def scalars(self) -> dict[str, float]:
        slowest_ms, fastest_ms = self.slowest.p50_ms("work"), self.fastest.p50_ms("work")
        waits_ms = [row.p50_ms("wait") for row in self.rows]
        return {
            f"{RANKS_TAG}step": self.median_ms("step"),
            f"{RANKS_TAG}work_slowest": slowest_ms,
            f"{RANKS_TAG}work_median": self.median_ms("work"),
            f"{RANKS_TAG}work_fastest": fastest_ms,
            f"{RANKS_TAG}work_spread": slowest_ms - fastest_ms,
            f"{RANKS_TAG}wait_least": min(waits_ms),
            f"{RANKS_TAG}wait_most": max(waits_ms),
            "ranks/slowest": float(self.slowest.rank),
        }


def part_times(readings: Sequence[Reading]) -> dict[str, Times]:
    """The times of steps by part, of `_PARTS` those that the steps have."""
    summary = WindowSummary(readings)
    parts_ms = {part: summary.series_ms(STEP_TAG + part) for part in _PARTS}
    parts_ms["optimizer"] = summary.series_ms(*(STEP_TAG + part for part in OF_OPTIMIZER))
    known = {*(STEP_TAG + part for part in (*_PARTS, *OF_OPTIMIZER)), EXPOSED_TAG, TOTAL_TAG}
    # Other collectives, for which the step waits from beginning to end.
    others = [tag for tag in summary.tags if tag.startswith(STEP_TAG) and tag not in known]
    exposed_ms = np.nan_to_num(summary.series_ms(EXPOSED_TAG))
    # The host's wait is in the gap, as far as the device was idle.
    before_ms = np.minimum(summary.waited_ms, np.nan_to_num(parts_ms["gap"]))
    wait_ms = exposed_ms + before_ms + np.nan_to_num(summary.series_ms(*others))
    step_ms = np.nan_to_num([parts_ms[part] for part in _TILES]).sum(axis=0)
    has_gap = ~np.isnan(parts_ms["gap"])
    if has_gap.any():  # if no step has a gap, steps are compared without it
        step_ms = np.where(has_gap, step_ms, np.nan)  # after a pause, the gap is unknown
    parts_ms |= {"step": step_ms, "work": step_ms - wait_ms, "wait": wait_ms}
    parts_ms["backward"] = parts_ms["backward"] - exposed_ms
    parts_ms["gap"] = parts_ms["gap"] - before_ms
    columns = column_times(np.stack([parts_ms[part] for part in _PARTS], axis=1), step_ms)
    return {part: times for part, times in zip(_PARTS, columns, strict=True) if times is not None}


class RankTimes(Sink):
    """Sink that summarises this process's steps by window, and in rank 0 tabulates all processes.

    A window is a range of `window_steps` step numbers, so it is the same in all processes. Windows are
    exchanged in pauses, through a `torch.distributed.Store` of this run alone and not by a collective: a
    process that fails, or pauses alone, does not block the others. In rank 0, `on_table` is called for
    each window that all have sent. If times of other processes are missing, `trouble` says why.
    """

    def __init__(
        self, store: Any, rank: int, size: int, window_steps: int, on_table: Callable[[RankTable], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._window_steps = window_steps
        self._on_table = on_table
        self._host = socket.gethostname()
        # Readings by window; the last one is incomplete.
        self._windows: dict[int, list[Reading]] = {}
        # Windows that this process has sent, and that are not shown yet.
        self._open: deque[int] = deque(maxlen=_WAITING_WINDOWS)
        self._tables: deque[RankTable] = deque(maxlen=2)
        self.trouble = ""

    def add(self, reading: Reading) -> None:
        window = reading.step // self._window_steps
        if window not in self._windows:
            self._windows[window] = []
            if len(self._windows) > _WAITING_WINDOWS:
                del self._windows[next(iter(self._windows))]
        self._windows[window].append(reading)

    def pause(self) -> None:
        self._send(list(self._windows)[:-1])
        self._receive()

    def finish(self) -> RankTable | None:
        """Exchange the last windows, with a short wait for the others.

        In rank 0, return the last steps of all processes; None if they are not known.
        """
        self._send(list(self._windows))
        deadline_s = monotonic() + _LAST_WORD_S
        self._receive()
        while self._rank == 0 and self._open and monotonic() < deadline_s and not self.trouble:
            threading.Event().wait(_POLL_S)
            self._receive()
        if self._open and not (self._tables or self.trouble):
            self.trouble = f"not all have sent theirs within {_LAST_WORD_S:.0f} s of the end"
        # The last window may have few steps; it counts if it has at least half of those before.
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
            row = RankRow(self._rank, self._host, first, last, len(readings), part_times(readings))
            key, text = self._key(window, self._rank), json.dumps(asdict(row))
            self._try(lambda: self._store.set(key, text))  # noqa: B023
            if self._rank == 0:
                self._open.append(window)

    def _receive(self) -> None:
        """Show the windows that all have sent; called in rank 0."""
        for window in tuple(self._open):
            rows = None if self.trouble else self._try(lambda: self._taken(window))  # noqa: B023
            if rows is None:
                continue
            while self._open and self._open[0] <= window:  # an older one is never completed
                self._open.popleft()
            table = RankTable(rows)
            self._tables.append(table)
            self._on_table(table)

    def _taken(self, window: int) -> tuple[RankRow, ...] | None:
        """The rows of all processes for a window; None if one is missing."""
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
        """Use the store, which may be gone with the process that serves it."""
        try:
            return do()
        except RuntimeError as error:
            self.trouble = f"{type(error).__name__}: {error}"
            return None


def _unpacked(text: bytes) -> RankRow:
    found = json.loads(text)
    found["parts"] = {part: Times(**times) for part, times in found["parts"].items()}
    return RankRow(**found)
