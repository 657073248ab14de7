"""Summary of a run: counts and times by stage, and the report printed at its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cudagraph.timing.output.report import ended_lines, note_lines, stage_lines, verdict
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.step_times import StepTimes

# The plural of a step of each stage.
_UNITS = {
    "fit": "steps",
    "validate": "batches",
    "test": "batches",
    "predict": "batches",
    "calls": "calls",
}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run, stage by stage; `str` of it is the report.

    A stage without graphs has counts of zero.

    Attributes:
        backend: the device and mechanism that the graphs ran on, or the device of an eager run, in
            words; empty before a run.
        is_emulated: True if that is the emulator, whose times tell nothing of a gain.
        fit: the training steps.
        validate: the batches of validation, in a `fit` or alone.
        test: the batches of `trainer.test`.
        predict: the batches of `trainer.predict`.
        calls: the calls of a `GraphedStep`.
        refused: the reason why all steps were eager, as a sentence, or that they were to be so; empty
            if they were not.
        ended: the exception that ended the run, in a `fit` with the last step; empty if none did.
        tensorboard_dir: the log folder that TensorBoard reads the times of the run from, or None.
        notes: notes for the user.
        times: the times of the timed steps, by part and layer; empty until the run ends.
    """

    backend: str = ""
    is_emulated: bool = False
    fit: StageSummary = field(default_factory=StageSummary)
    validate: StageSummary = field(default_factory=StageSummary)
    test: StageSummary = field(default_factory=StageSummary)
    predict: StageSummary = field(default_factory=StageSummary)
    calls: StageSummary = field(default_factory=StageSummary)
    refused: str = ""
    ended: str = ""
    tensorboard_dir: str | None = None
    notes: tuple[str, ...] = ()
    times: StepTimes = field(default_factory=StepTimes, repr=False)

    @property
    def stages(self) -> dict[str, StageSummary]:
        """The stages that had steps, by name."""
        found = {name: getattr(self, name) for name in _UNITS}
        return {name: stage for name, stage in found.items() if stage.steps}

    @property
    def verdict(self) -> str:
        """The first line of the report: the gain if it was measured, and the share of replays."""
        if self.refused:
            return self.refused
        if not self.backend:
            return "nothing has run yet"
        name, stage = next(iter(self.stages.items()), ("fit", self.fit))
        return f"{verdict(stage, _UNITS[name])}; {self.backend}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, as values that JSON can hold."""
        return {
            "verdict": self.verdict,
            "backend": self.backend,
            "stages": {name: stage.to_dict() for name, stage in self.stages.items()},
            "refused": self.refused,
            "ended": self.ended,
            "tensorboard_dir": self.tensorboard_dir,
            "notes": list(self.notes),
            "times": self.times.to_dict(),
        }

    def with_stage(self, name: str, stage: StageSummary) -> RunSummary:
        """A copy with `stage` as the stage of this name."""
        return replace(self, **{name: stage})  # type: ignore[arg-type]

    def __str__(self) -> str:
        lines = [f"lightning_cudagraph: {self.verdict}", *ended_lines(self.ended)]
        for name, stage in self.stages.items():
            lines += stage_lines(name, stage, self.is_emulated)
        lines += self.times.lines
        if self.tensorboard_dir is not None:
            lines.append(f"  charts    tensorboard --logdir {self.tensorboard_dir!r}")
        return "\n".join([*lines, *note_lines(self.notes), *self.times.layers])
