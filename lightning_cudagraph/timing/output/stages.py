"""The steps of one stage of a run, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.timing.readings.pace import StepPace

__all__ = ["StageSummary"]


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """Counts and times of the steps of one stage: of a `fit`, of its validations, of calls of a step.

    Attributes:
        warmed_up: steps that ran eagerly to make ready for a capture.
        replayed: steps that were replays.
        eager: other steps that ran eagerly, by reason.
        captures: captures that succeeded.
        recaptures: why graphs were dropped, in order.
        not_captured: why nothing was captured, if batches look too different for it; or nothing.
        capture_ms: host time of the captures together.
        memory_bytes: device memory that the graphs have taken.
        checked: replays that were checked against eager steps.
        replay_ms: the mean time of a replayed step from end to end, without those that were checked;
            None where it was not measured.
        plain_ms: the same of `plain_steps`; None where it was not measured.
        plain_steps: those steps of the warm-up that ran as without this package, for this measurement.
    """

    warmed_up: int = 0
    replayed: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    captures: int = 0
    recaptures: tuple[str, ...] = ()
    not_captured: str = ""
    capture_ms: float = 0.0
    memory_bytes: int = 0
    checked: int = 0
    replay_ms: float | None = None
    plain_ms: float | None = None
    plain_steps: int = 0

    @classmethod
    def of(cls, counts: StepCounts, checked: int, pace: StepPace | None = None) -> StageSummary:
        """The numbers as they are now.

        Args:
            counts: what became of the steps.
            checked: how many replays were checked.
            pace: how long they took, if that was measured.
        """
        return cls(
            warmed_up=counts.warmed_up,
            replayed=counts.replayed,
            eager=dict(counts.eager),
            captures=counts.captures,
            recaptures=tuple(counts.recaptures),
            not_captured=counts.variety,
            capture_ms=counts.capture_ms,
            memory_bytes=counts.memory_bytes,
            checked=checked,
            replay_ms=None if pace is None else pace.replayed_ms,
            plain_ms=None if pace is None else pace.plain_ms,
            plain_steps=0 if pace is None else pace.plain_steps,
        )

    @property
    def eager_steps(self) -> int:
        """The steps that ran eagerly, but for those of the warm-up."""
        return sum(self.eager.values())

    @property
    def steps(self) -> int:
        """All steps."""
        return self.warmed_up + self.replayed + self.eager_steps

    @property
    def replayed_share(self) -> float:
        """The share of steps that were replays, from 0 to 1; 0 of no steps."""
        return self.replayed / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float | None:
        """The time of a plain step by that of a replayed one; None where either was not measured."""
        if self.plain_ms is None or not self.replay_ms:
            return None
        return self.plain_ms / self.replay_ms

    def to_dict(self) -> dict[str, Any]:
        """All numbers, in a form that JSON can write."""
        return {
            **asdict(self),
            "recaptures": list(self.recaptures),
            "eager_steps": self.eager_steps,
            "steps": self.steps,
            "replayed_share": self.replayed_share,
            "speedup": self.speedup,
        }
