"""Step times on the host's clock, from the end of one step to the end of the next."""

from __future__ import annotations

from enum import Enum
from time import perf_counter

from lightning_cudagraph.capture.steps import Phase


class Plain(Enum):
    """Place of a step in a row of plain steps, which run as without this package and are measured."""

    NOT = "not"
    ONE = "one"
    LAST = "last"


class StepTime:
    """Mean time of replays that follow a replay, and of plain steps before the capture.

    Other eager steps are not measured: the callback watches them, so they take longer than without it.
    Plain ones come in a row: the device has nothing left to do at the end of the step before the first
    of them, nor at the end of the last one.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._last_phase: Phase | None = None
        self._replay_total_ms = 0.0
        self._replays = 0
        self._told = (0, 0.0)  # replays, and their milliseconds, at the last `since_last_ms`
        self._plain_total_ms = 0.0
        self._plain_steps = 0
        self._row: Plain | None = Plain.NOT  # where in the row of plain steps; None if it was broken

    def tick(self, phase: Phase, plain: Plain = Plain.NOT) -> None:
        now_s = perf_counter()
        step_ms = None if self._last_s is None else (now_s - self._last_s) * 1e3
        if plain is not Plain.NOT and step_ms is not None and self._row in (Plain.NOT, Plain.ONE):
            self._plain_total_ms += step_ms
            self._plain_steps += 1
            self._row = plain
        elif plain is not Plain.NOT or self._row is Plain.ONE:
            self._row = None  # a pause, or another step, came between them
        elif step_ms is not None and phase is self._last_phase is Phase.CAPTURED:
            self._replay_total_ms += step_ms
            self._replays += 1
        self._last_s, self._last_phase = now_s, phase

    def pause(self) -> None:
        self._last_s = None

    @property
    def replayed_ms(self) -> float | None:
        """Mean milliseconds of a replayed step. The host may run ahead, which evens out in a mean."""
        return self._replay_total_ms / self._replays if self._replays else None

    def since_last_ms(self) -> float | None:
        """Mean milliseconds of the steps replayed since the last call; None without any."""
        replays, total_ms = self._told
        self._told = self._replays, self._replay_total_ms
        new = self._replays - replays
        return (self._replay_total_ms - total_ms) / new if new else None

    @property
    def plain_steps(self) -> int:
        """The plain steps that were measured: a whole row, or none."""
        return self._plain_steps if self._row is Plain.LAST else 0

    @property
    def plain_ms(self) -> float | None:
        return self._plain_total_ms / self.plain_steps if self.plain_steps else None
