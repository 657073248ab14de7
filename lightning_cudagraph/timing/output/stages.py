"""Counts and times of one stage of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.checks.guards.remedies import kind_of
from lightning_cudagraph.timing.readings.step_time import StepTime

AFTER_PAUSES = (
    "It was so at the start of an epoch or after another pause: if many steps follow each, nothing needs"
    " to be done. Else:"
)


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """Counts and times of one stage: a `fit`, its validations, or the calls of a step.

    Attributes:
        warmed_up: number of warm-up steps, which ran eagerly before a capture.
        replayed: number of replayed steps.
        eager: number of other eager steps, by reason.
        eager_by_signature: number of batches that ran eagerly: their signature has earned no graph, or
            is one too many.
        remedy: the dimension of batches that varies most and what to do about it; empty if none does.
        captures: number of successful captures.
        evictions: number of batch signatures with graphs that were released for another one's.
        recaptures: the reasons of invalidations, in order.
        not_captured: the reason why nothing was captured, if the batches have too many signatures; or
            empty.
        capture_ms: host time of all captures together, in milliseconds.
        memory_bytes: device memory that the graphs have taken, in bytes.
        checked: number of replays that were verified against eager steps.
        replay_ms: mean time from the end of one step to the end of the next, of replays that were not
            verified, in milliseconds; None if it was not measured.
        plain_ms: the same for the `plain_steps`.
        plain_steps: number of warm-up steps that ran as without this package, to be measured.
    """

    warmed_up: int = 0
    replayed: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    eager_by_signature: int = 0
    remedy: str = ""
    captures: int = 0
    evictions: int = 0
    recaptures: tuple[str, ...] = ()
    not_captured: str = ""
    capture_ms: float = 0.0
    memory_bytes: int = 0
    checked: int = 0
    replay_ms: float | None = None
    plain_ms: float | None = None
    plain_steps: int = 0

    @classmethod
    def of(
        cls, counts: StepCounts, checked: int, pace: StepTime | None = None, remedy: str = ""
    ) -> StageSummary:
        """A snapshot of the numbers. Without a pace, step times were not measured."""
        counted = vars(counts) | {"eager": dict(counts.eager), "recaptures": tuple(counts.recaptures)}
        pace = pace or StepTime()
        return cls(
            **counted,
            remedy=remedy,
            checked=checked,
            replay_ms=pace.replayed_ms,
            plain_ms=pace.plain_ms,
            plain_steps=pace.plain_steps,
        )

    @property
    def eager_steps(self) -> int:
        """Number of eager steps outside of the warm-up."""
        return sum(self.eager.values())

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.warmed_up + self.replayed + self.eager_steps

    @property
    def replayed_share(self) -> float:
        """The share of replays among all steps, from 0 to 1; 0 without steps."""
        return self.replayed / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float | None:
        """`plain_ms` divided by `replay_ms`; None if either was not measured."""
        if self.plain_ms is None or not self.replay_ms:
            return None
        return self.plain_ms / self.replay_ms

    def unstable(self) -> dict[str, str]:
        """A remedy for each thing that has changed between steps more than once."""
        found = {}
        for what, reasons in self.recaptures_of().items():
            changes = [reason for reason in reasons if isinstance(reason, Change)]
            if len(reasons) > 1 and changes and (remedy := changes[-1].remedy):
                is_paused = all(change.is_after_pause for change in changes)
                found[what] = f"{AFTER_PAUSES} {remedy}" if is_paused else remedy
        return found

    def recaptures_of(self) -> dict[str, list[str]]:
        """The reasons of invalidations by what has changed, in order."""
        found: dict[str, list[str]] = {}
        for reason in self.recaptures:
            found.setdefault(kind_of(reason), []).append(reason)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as values that JSON can hold."""
        return {
            **asdict(self),
            "recaptures": list(self.recaptures),
            "eager_steps": self.eager_steps,
            "steps": self.steps,
            "replayed_share": self.replayed_share,
            "speedup": self.speedup,
        }
