"""The report of the doctor, as text and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_cudagraph.errors import Finding
from lightning_cudagraph.trainer.doctor.estimate import Estimate

_WIDTH = 110

_NOT_SEEN = (
    "Call the doctor again when these are mended: values that change less often than each step, and"
    " paths that these steps did not take, may not be among them."
)


@dataclass(frozen=True, kw_only=True)
class DiagnosisReport:
    """The findings in a few steps of a run; `str` of it is the report.

    Attributes:
        step: the step that was examined, by its name.
        backend: the device on which it was captured, in words.
        findings: what keeps the step from being captured, each with the user's line and a remedy.
        search_ended_by: what has ended the search before the end of the step, in words; or nothing.
        notes: what the callback deals with by itself, and what else its report says.
        replayed_steps: the number of steps that were replays.
        estimate: numbers of a plain step; None if the run ended before one.
    """

    step: str
    backend: str
    findings: tuple[Finding, ...]
    search_ended_by: str
    notes: tuple[str, ...]
    replayed_steps: int
    estimate: Estimate | None = None

    @property
    def is_captured(self) -> bool:
        """True if the step was captured: nothing was found, and there were replays."""
        return not self.findings and self.replayed_steps > 0

    def to_dict(self) -> dict[str, Any]:
        """All of it, in a form that JSON can write."""
        return {
            "step": self.step,
            "backend": self.backend,
            "is_captured": self.is_captured,
            "replayed_steps": self.replayed_steps,
            "findings": [_as_dict(finding) for finding in self.findings],
            "search_ended_by": self.search_ended_by,
            "notes": list(self.notes),
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }

    def __str__(self) -> str:
        count = len(self.findings)
        if self.is_captured:
            steps = "1 step" if self.replayed_steps == 1 else f"{self.replayed_steps} steps"
            verdict = f"captured; {steps} replayed"
        elif count:
            verdict = f"not captured, for {count} reason{'s' * (count > 1)}"
        else:
            verdict = "nothing was found, and nothing was captured"
        lines = [f"`{self.step}`: {verdict}"]
        for number, finding in enumerate(self.findings, start=1):
            lines.append("")
            if (at := finding.location) is not None:
                lines.append(f"{number:3}. {_shown(at.path)}:{at.line}")
                lines += [f"         {at.source}"] if at.source else []
            else:
                lines.append(f"{number:3}. (no line of yours)")
            lines += _indented(finding.what)
            lines += _indented(f"Remedy: {finding.remedy}")
        if self.search_ended_by:
            listed = [finding.reason for finding in self.findings]
            behind = f"this: {self.search_ended_by.rstrip('.')}"
            if self.search_ended_by in listed:
                behind = f"number {1 + listed.index(self.search_ended_by)} of these"
            ended = f"The search ended early, behind {behind}. Mend it, and call the doctor again."
            lines += ["", *_indented(ended, "")]
        elif count:
            lines += ["", *_indented(_NOT_SEEN, "")]
        if self.notes:
            lines += ["", "The callback deals with these by itself, or only tells them:"]
            lines += [part for note in self.notes for part in _indented(note, "  - ")]
        if self.estimate is not None:
            lines += ["", "Estimate, from a step as without the callback:"]
            for subject, words in self.estimate.lines():
                lines += _indented(words, f"  {subject:<14}")
        return "\n".join(lines)


def _shown(path: str) -> str:
    """A path for a terminal: relative, if it lies in the working directory."""
    found = Path(path)
    return str(found.relative_to(Path.cwd())) if found.is_relative_to(Path.cwd()) else path


def _indented(text: str, first: str = "     ") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _as_dict(finding: Finding) -> dict[str, Any]:
    at = finding.location
    called = None if at is None else at.called
    return {
        "what": finding.what,
        "remedy": finding.remedy,
        "file": None if at is None else at.path,
        "line": None if at is None else at.line,
        "source": None if at is None else at.source,
        "called": None if called is None else str(called),
        "in_optimizer": finding.in_optimizer,
    }
