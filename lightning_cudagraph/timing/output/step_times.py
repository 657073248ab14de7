"""Times of the timed steps of a run, as numbers and as lines; the summary of an eager run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_cudagraph.timing.output.report import (
    ended_lines,
    layer_lines,
    note_lines,
    time_lines,
)
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG, STEP_TAG
from lightning_cudagraph.timing.readings.windows import Times, WindowSummary

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of the last timed steps of a run; `str` of it are their lines of the report.

    Attributes:
        timed_steps: number of timed steps in the statistics: the last `LayerTimings.window_steps`.
        parts: statistics of each part of a step, by name: ``forward``, ..., and ``total``, the whole.
        forward: statistics of the forward pass of each timed layer, by name.
        backward: statistics of the backward pass of each timed layer, by name.
        lines: the parts in milliseconds, and what the steps wait for, as lines of text.
        layers: the slowest layers, as the lines of a table.
    """

    timed_steps: int = 0
    parts: dict[str, Times] = field(default_factory=dict)
    forward: dict[str, Times] = field(default_factory=dict)
    backward: dict[str, Times] = field(default_factory=dict)
    lines: tuple[str, ...] = field(default=(), repr=False)
    layers: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of_window(cls, window: WindowSummary, lines: Sequence[str], **others: Any) -> Self:
        """The times of the steps in a window, with the lines about them; `others` are attributes."""
        parts, forward, backward = (
            {tag.removeprefix(kind): t for tag, t in window.times.items() if tag.startswith(kind)}
            for kind in (STEP_TAG, FORWARD_TAG, BACKWARD_TAG)
        )
        return cls(
            timed_steps=window.n_readings,
            parts=parts,
            forward=forward,
            backward=backward,
            lines=tuple(lines),
            layers=tuple(layer_lines(window)),
            **others,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything except `lines` and `layers`, as values that JSON can hold."""
        return {name: value for name, value in asdict(self).items() if name not in ("lines", "layers")}

    def __str__(self) -> str:
        return "\n".join([*self.lines, *self.layers])


@dataclass(frozen=True, kw_only=True)
class EagerSummary(StepTimes):
    """Summary of an eager run whose steps were timed; `str` of it is the report.

    Attributes:
        device: the name of the device that was timed; empty before the end of a run.
        ended: the exception that ended the run, with the last step; empty if none did.
        notes: notes for the user.
    """

    device: str = ""
    ended: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        window: WindowSummary,
        device: str,
        notes: Sequence[str] = (),
        ranks: Sequence[str] = (),
        ended: str = "",
    ) -> EagerSummary:
        """The summary of the steps in a window; `ranks` are lines about all processes."""
        lines = time_lines(window, ranks=ranks, label="step")
        return cls.of_window(window, lines, device=device, notes=tuple(notes), ended=ended)

    def to_dict(self) -> dict[str, Any]:
        """Everything except `lines` and `layers`, as values that JSON can hold."""
        return {**super().to_dict(), "notes": list(self.notes)}

    def __str__(self) -> str:
        if not self.device:
            return "lightning_cudagraph: nothing has run yet"
        lines = ["lightning_cudagraph: the times of an eager run", *ended_lines(self.ended)]
        return "\n".join([*lines, *self.lines, *note_lines(self.notes), *self.layers])
