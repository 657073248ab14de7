"""Tables and pictures of each window of a fit, for whatever can show texts and pictures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from lightning_cudagraph.timing.output.figures import layer_bars, step_timeline
from lightning_cudagraph.timing.output.tables import window_text
from lightning_cudagraph.timing.readings.sinks import Sink
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.readings.windows import ReadingWindow, WindowSummary

__all__ = ["Dashboard", "Writer"]

# A picture takes some tenths of a second.
_SECONDS_BETWEEN_PICTURES = 60.0


class Writer(Protocol):
    """Writes texts and pictures."""

    @property
    def is_shown(self) -> bool:
        """They go somewhere; if not, they need not be made."""

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Show a text in a fixed-width font."""

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Show a picture made by matplotlib."""


class Dashboard(Sink):
    """Shows a table, ``cudagraph/layers``, and two pictures, ``cudagraph/slowest_layers`` and
    ``cudagraph/timeline``.

    They are made in pauses, if a window has come in since the last, pictures no more often than once a
    minute; and at the end, of what has come in until then.
    """

    def __init__(
        self,
        writer: Writer,
        window_readings: int,
        model: str,
        device: str,
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._writer = writer
        self._window_readings = window_readings
        self._model = model
        self._device = device
        self._now_s = now_s
        self.window = ReadingWindow(window_readings)
        self._not_told = 0
        self._not_drawn = 0
        self._drawn_at_s: float | None = None
        self._can_draw = True

    def add(self, reading: Reading) -> None:
        self.window.add(reading)
        self._not_told += 1

    def pause(self) -> None:
        """Show the last window, if all of it is new."""
        if self._not_told < self._window_readings or not self._writer.is_shown:
            return
        summary = self._tell()
        now_s = self._now_s()
        if self._drawn_at_s is None or now_s - self._drawn_at_s >= _SECONDS_BETWEEN_PICTURES:
            self._draw(summary)

    def close(self) -> None:
        """Show what has not been shown."""
        if not self._writer.is_shown:
            return
        if self._not_told:
            self._tell()
        if self._not_drawn:
            self._draw(self.window.summary())

    def _tell(self) -> WindowSummary:
        summary = self.window.summary()
        self._not_drawn += self._not_told
        self._not_told = 0
        self._writer.add_text("cudagraph/layers", window_text(summary), summary.last_step)
        return summary

    def _draw(self, summary: WindowSummary) -> None:
        self._not_drawn = 0
        self._drawn_at_s = self._now_s()
        if not self._can_draw:
            return
        try:
            with warnings.catch_warnings():
                # A layer may be called in letters that the font lacks: nothing that a run must hear of.
                warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
                for tag, draw in (("slowest_layers", layer_bars), ("timeline", step_timeline)):
                    figure = draw(summary, self._model, self._device)
                    if figure is not None:
                        self._writer.add_figure(f"cudagraph/{tag}", figure, summary.last_step)
        except Exception as error:
            # Fonts, a package that does not fit, another writer: no picture is worth a run.
            self._can_draw = False
            warnings.warn(
                f"Pictures of the times of layers were not drawn: {type(error).__name__}: {error}."
                " Tables and training go on.",
                RuntimeWarning,
                stacklevel=2,
            )
