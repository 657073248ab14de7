"""Step time of replays on the host's clock, from the end of one step to the end of the next."""

from __future__ import annotations

from time import perf_counter

from lightning_cudagraph.capture.steps import Phase

__all__ = ["StepPace"]


class StepPace:
    """Mean time of replays that follow a replay.

    Eager steps are not measured: the callback watches them, so they take longer than without it.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._last_phase: Phase | None = None
        self._replay_total_ms = 0.0
        self._replays = 0

    def tick(self, phase: Phase) -> None:
        """Note the end of a step of `phase`."""
        now_s = perf_counter()
        if self._last_s is not None and phase is self._last_phase is Phase.CAPTURED:
            self._replay_total_ms += (now_s - self._last_s) * 1e3
            self._replays += 1
        self._last_s, self._last_phase = now_s, phase

    def pause(self) -> None:
        """Note that something else than a training step follows (validation, a checkpoint)."""
        self._last_s = None

    @property
    def replayed_ms(self) -> float | None:
        """Mean milliseconds of a replayed step. The host may run ahead, which evens out in a mean."""
        return self._replay_total_ms / self._replays if self._replays else None
