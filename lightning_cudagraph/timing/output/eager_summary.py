"""Summary of an eager run whose steps were timed, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_cudagraph.timing.output.report import ended_lines, layer_lines, note_lines, time_lines
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG, STEP_TAG
from lightning_cudagraph.timing.readings.windows import Times, WindowSummary


@dataclass(frozen=True, kw_only=True)
class EagerSummary:
    """Summary of an eager run whose steps were timed; `str` of it is the report.

    Attributes:
        device: the name of the device that was timed; empty before the end of a run.
        timed_steps: number of timed steps in the statistics: the last `LayerTimings.window_steps`.
        parts: statistics of each part of a step, by name: ``forward``, ..., and ``total``, the whole.
        forward: statistics of the forward pass of each timed layer, by name.
        backward: statistics of the backward pass of each timed layer, by name.
        ended: the exception that ended the run, with the last step; empty if none did.
        notes: notes for the user.
        times: the parts of a step in milliseconds, as lines of text.
        layers: the slowest layers, as the lines of a table.
    """

    device: str = ""
    timed_steps: int = 0
    parts: dict[str, Times] = field(default_factory=dict)
    forward: dict[str, Times] = field(default_factory=dict)
    backward: dict[str, Times] = field(default_factory=dict)
    ended: str = ""
    notes: tuple[str, ...] = ()
    times: tuple[str, ...] = field(default=(), repr=False)
    layers: tuple[str, ...] = field(default=(), repr=False)

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
        parts, forward, backward = (
            {tag.removeprefix(kind): t for tag, t in window.times.items() if tag.startswith(kind)}
            for kind in (STEP_TAG, FORWARD_TAG, BACKWARD_TAG)
        )
        return cls(
            device=device,
            timed_steps=window.n_readings,
            parts=parts,
            forward=forward,
            backward=backward,
            ended=ended,
            notes=tuple(notes),
            times=tuple(time_lines(window, ranks=ranks, label="step")),
            layers=tuple(layer_lines(window)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything except `times` and `layers`, as values that JSON can hold."""
        found = asdict(self) | {"notes": list(self.notes)}
        return {name: value for name, value in found.items() if name not in ("times", "layers")}

    def __str__(self) -> str:
        if not self.device:
            return "lightning_cudagraph: nothing has run yet"
        lines = ["lightning_cudagraph: the times of an eager run", *ended_lines(self.ended)]
        lines += [*self.times, *note_lines(self.notes), *(f"  {line}" for line in self.layers)]
        return "\n".join(lines)
