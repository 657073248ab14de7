"""Dashboard: tables and pictures of each window of a fit, for a writer of texts and pictures."""

from __future__ import annotations

import warnings
from time import monotonic

from lightning_cudagraph.timing.output.tables import window_text
from lightning_cudagraph.timing.readings.windows import ReadingWindow, WindowSummary
from lightning_cudagraph.timing.sinks.figures import layer_bars, step_timeline
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter

# To draw one takes some tenths of a second.
_SECONDS_BETWEEN_PICTURES = 60.0


class Dashboard(ReadingWindow):
    """Table ``cudagraph/layers``, and pictures ``cudagraph/slowest_layers`` and ``cudagraph/timeline``.

    They are made in pauses, once a whole window of new readings is there (pictures once a minute at
    most), and at the end.
    """

    def __init__(self, writer: TensorBoardWriter, window_readings: int, model: str, device: str) -> None:
        super().__init__(window_readings)
        self._writer = writer
        self._model = model
        self._device = device
        self._n_undrawn = 0
        self._drawn_at_s: float | None = None
        self._can_draw = True

    def pause(self) -> None:
        if not (self.is_all_new and self._writer.is_shown):
            return
        summary = self._write_table()
        now_s = monotonic()
        if self._drawn_at_s is None or now_s - self._drawn_at_s >= _SECONDS_BETWEEN_PICTURES:
            self._draw(summary)

    def close(self) -> None:
        if not self._writer.is_shown:
            return
        if self.n_new:
            self._write_table()
        if self._n_undrawn:
            self._draw(self.summary())

    def _write_table(self) -> WindowSummary:
        summary = self.summary()
        self._n_undrawn += self.n_new
        self.n_new = 0
        self._writer.add_text("cudagraph/layers", window_text(summary), summary.last_step)
        return summary

    def _draw(self, summary: WindowSummary) -> None:
        self._n_undrawn = 0
        self._drawn_at_s = monotonic()
        if not self._can_draw:
            return
        try:
            with warnings.catch_warnings():
                # The font may lack letters of a layer's name, which is not worth a warning.
                warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
                for tag, draw in (("slowest_layers", layer_bars), ("timeline", step_timeline)):
                    figure = draw(summary, self._model, self._device)
                    if figure is not None:
                        self._writer.add_figure(f"cudagraph/{tag}", figure, summary.last_step)
        except Exception as error:
            # Fonts, package versions, the user's writer: no failed picture may end a run.
            self._can_draw = False
            warnings.warn(
                f"Pictures of the times of layers were not drawn: {type(error).__name__}: {error}."
                " Tables and training go on.",
                RuntimeWarning,
                stacklevel=2,
            )
