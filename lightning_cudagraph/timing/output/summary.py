"""The summary of a run: numbers, and the report that is printed at its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cudagraph.timing.output.report import ended_lines, note_lines, stage_lines, verdict
from lightning_cudagraph.timing.output.stages import StageSummary

__all__ = ["RunSummary"]

# What the steps of a stage are called.
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

    A stage that had no steps in graphs is one of zeros.

    Attributes:
        backend: what the graphs ran on, in words.
        fit: the training steps.
        validate: the batches of validation, in a `fit` or alone, if they had graphs.
        test: those of `trainer.test`.
        predict: those of `trainer.predict`.
        calls: the calls of a `GraphedStep`.
        refused: why all steps were eager, in a sentence; or nothing.
        ended: the exception that has ended the run, and where; or nothing.
        tensorboard_dir: the folder in which TensorBoard finds the times of the run, if there is one.
        notes: what the user should know besides.
        times: where the time goes, in lines; known at the end of a run.
        layers: the slowest layers, as the lines of a table; known at the end of a run.
    """

    backend: str = ""
    fit: StageSummary = field(default_factory=StageSummary)
    validate: StageSummary = field(default_factory=StageSummary)
    test: StageSummary = field(default_factory=StageSummary)
    predict: StageSummary = field(default_factory=StageSummary)
    calls: StageSummary = field(default_factory=StageSummary)
    refused: str = ""
    ended: str = ""
    tensorboard_dir: str | None = None
    notes: tuple[str, ...] = ()
    times: tuple[str, ...] = field(default=(), repr=False)
    layers: tuple[str, ...] = field(default=(), repr=False)

    @property
    def stages(self) -> dict[str, StageSummary]:
        """The stages that had steps, by name."""
        found = {name: getattr(self, name) for name in _UNITS}
        return {name: stage for name, stage in found.items() if stage.steps}

    @property
    def verdict(self) -> str:
        """The first line of the report: what the graphs have gained, or how much was replayed."""
        if self.refused:
            return self.refused
        if not self.backend:
            return "nothing has run yet"
        name, stage = next(iter(self.stages.items()), ("fit", self.fit))
        return f"{verdict(stage, _UNITS[name])}; {self.backend}"

    def to_dict(self) -> dict[str, Any]:
        """All of it but the tables of times, in a form that JSON can write."""
        return {
            "verdict": self.verdict,
            "backend": self.backend,
            "stages": {name: stage.to_dict() for name, stage in self.stages.items()},
            "refused": self.refused,
            "ended": self.ended,
            "tensorboard_dir": self.tensorboard_dir,
            "notes": list(self.notes),
        }

    def with_stage(self, name: str, stage: StageSummary) -> RunSummary:
        """The same with another stage of this name."""
        return replace(self, **{name: stage})  # type: ignore[arg-type]

    def __str__(self) -> str:
        lines = [f"lightning_cudagraph: {self.verdict}", *ended_lines(self.ended)]
        for name, stage in self.stages.items():
            lines += stage_lines(name, stage)
        lines += self.times
        if self.tensorboard_dir is not None:
            lines.append(f"  charts    tensorboard --logdir {self.tensorboard_dir!r}")
        lines += note_lines(self.notes)
        return "\n".join([*lines, *(f"  {line}" for line in self.layers)])
