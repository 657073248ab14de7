"""Times of the timed steps of a run, as numbers and as lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_cudagraph.timing.output.tables import layer_table, timed_steps
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG, STEP_TAG
from lightning_cudagraph.timing.readings.windows import Times, WindowSummary

_SLOWEST_LAYERS = 10


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
    def of_window(cls, window: WindowSummary, lines: Sequence[str]) -> StepTimes:
        """The times of the steps in a window, with the lines about them."""
        parts, forward, backward = (
            {tag.removeprefix(kind): t for tag, t in window.times.items() if tag.startswith(kind)}
            for kind in (STEP_TAG, FORWARD_TAG, BACKWARD_TAG)
        )
        table = layer_table(window, most_rows=_SLOWEST_LAYERS)
        title = f"  slowest layers of {timed_steps(window.n_readings)}"
        return cls(
            timed_steps=window.n_readings,
            parts=parts,
            forward=forward,
            backward=backward,
            lines=tuple(lines),
            layers=(title, *(f"    {line}" for line in table)) if table else (),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything except `lines` and `layers`, as values that JSON can hold."""
        return {name: value for name, value in asdict(self).items() if name not in ("lines", "layers")}

    def __str__(self) -> str:
        return "\n".join([*self.lines, *self.layers])
