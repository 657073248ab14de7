"""The time of replayed steps from end to end, as the host sees them."""

from __future__ import annotations

from time import perf_counter

from lightning_cudagraph.capture.steps import Phase

__all__ = ["StepPace"]


class StepPace:
    """The time of steps that are replays and follow a replay.

    Steps without a graph have no pace here: the callback watches them, and they take longer than in a
    run without it.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._last_phase: Phase | None = None
        self._replay_total_ms = 0.0
        self._replays = 0

    def tick(self, phase: Phase) -> None:
        """A step of `phase` has ended."""
        now_s = perf_counter()
        if self._last_s is not None and phase is self._last_phase is Phase.CAPTURED:
            self._replay_total_ms += (now_s - self._last_s) * 1e3
            self._replays += 1
        self._last_s, self._last_phase = now_s, phase

    def pause(self) -> None:
        """Something that is not a training step comes now (validation, a checkpoint)."""
        self._last_s = None

    @property
    def replayed_ms(self) -> float | None:
        """Milliseconds of a replayed step: the mean, in which running ahead evens out."""
        return self._replay_total_ms / self._replays if self._replays else None
