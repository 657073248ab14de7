"""The report at the end of `fit`: what became of the steps, what it gained, where the time goes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque

from lightning_cudagraph.capture.steps import Phase, StepCounts
from lightning_cudagraph.timing.spans import BACKWARD_TAG, FORWARD_TAG, STEP_TAG, Reading

__all__ = ["LayerTimes", "StepPace", "eager_report", "evaluation_report", "fit_report"]

_WINDOW_STEPS = 200
_SLOWEST_LAYERS = 10
_BAR_WIDTH = 24


class StepPace:
    """How long steps take from end to end, as the host sees them, by phase.

    The first warm-up step is not counted: it pays for what is made lazily.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._last_phase: Phase | None = None
        self._warm_ms: list[float] = []
        self._replay_total_ms = 0.0
        self._replays = 0

    def tick(self, phase: Phase) -> None:
        """A step of `phase` has ended."""
        now_s = time.perf_counter()
        if self._last_s is not None and phase is self._last_phase:
            elapsed_ms = (now_s - self._last_s) * 1e3
            if phase is Phase.WARMING:
                self._warm_ms.append(elapsed_ms)
            elif phase is Phase.CAPTURED:
                self._replay_total_ms += elapsed_ms
                self._replays += 1
        self._last_s, self._last_phase = now_s, phase

    def pause(self) -> None:
        """Something that is not a training step comes now (validation, a checkpoint)."""
        self._last_s = None

    @property
    def eager_ms(self) -> float | None:
        """Milliseconds of an eager step: the median of the warm-up steps but the first."""
        return statistics.median(self._warm_ms) if self._warm_ms else None

    @property
    def replayed_ms(self) -> float | None:
        """Milliseconds of a replayed step: the mean, in which running ahead evens out."""
        return self._replay_total_ms / self._replays if self._replays else None


class LayerTimes:
    """The times of the last replays, by tag."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=_WINDOW_STEPS)

    def add(self, reading: Reading) -> None:
        """Take the times of one replay."""
        self._readings.append(reading)

    def pause(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def __len__(self) -> int:
        """How many readings there are."""
        return len(self._readings)

    def medians_ms(self) -> dict[str, float]:
        """The median over the last replays, in milliseconds, by tag."""
        by_tag: dict[str, list[float]] = defaultdict(list)
        for reading in self._readings:
            for tag, value_ms in zip(reading.layout.tags, reading.durations_ms.tolist(), strict=True):
                by_tag[tag].append(value_ms)
        return {tag: statistics.median(values) for tag, values in by_tag.items()}


def _slowest(medians_ms: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """Name, forward and backward milliseconds of each layer, the slowest first."""
    rows = [
        (name, value_ms, medians_ms.get(BACKWARD_TAG + name))
        for tag, value_ms in medians_ms.items()
        if (name := tag.removeprefix(FORWARD_TAG)) != tag
    ]
    return sorted(rows, key=lambda row: -(row[1] + (row[2] or 0.0)))


def _layer_table(medians_ms: dict[str, float]) -> list[str]:
    rows = _slowest(medians_ms)[:_SLOWEST_LAYERS]
    if not rows:
        return []
    total_ms = medians_ms.get(f"{STEP_TAG}total") or (
        medians_ms.get(f"{STEP_TAG}forward", 0.0) + medians_ms.get(f"{STEP_TAG}backward", 0.0)
    )
    width = max(len(name) for name, _, _ in rows)
    lines = [
        f"slowest layers, median of up to {_WINDOW_STEPS} replays (containers include their members)",
        f"  {'layer':<{width}}  forward ms  backward ms  share of step",
    ]
    for name, forward_ms, backward_ms in rows:
        share = (forward_ms + (backward_ms or 0.0)) / total_ms if total_ms else 0.0
        backward = "-" if backward_ms is None else f"{backward_ms:.3f}"
        bar = "#" * round(min(share, 1.0) * _BAR_WIDTH)
        lines.append(f"  {name:<{width}}  {forward_ms:>10.3f}  {backward:>11}  {share:>5.0%} {bar}")
    return lines


def _count_lines(label: str, counts: StepCounts) -> list[str]:
    eager_steps = sum(counts.eager.values())
    lines = [
        (
            f"  {label:<10}{counts.warmed_up} warmed up, {counts.replayed} replayed,"
            f" {eager_steps} eager; captured {counts.captures} time(s)"
        )
    ]
    lines += [f"            {n} eager: {reason}" for reason, n in counts.eager.most_common()]
    if not counts.captures and counts.warmed_up:
        why = counts.variety or "the run ended, or went on eagerly, before a capture"
        lines.append(f"            nothing was captured: {why}")
    lines += [f"            captured anew: {reason}" for reason in counts.recaptures]
    return lines


def evaluation_report(backend: str, counts: StepCounts, notes: list[str]) -> str:
    """The report of a run without training, as plain text with aligned columns.

    Args:
        backend: what the graphs ran on.
        counts: what became of the batches.
        notes: what the user should know besides.
    """
    lines = [f"lightning_cudagraph: {backend}", *_count_lines("evaluate", counts)]
    if counts.captures:
        lines.append(_capture_line(counts))
    return "\n".join(lines + [f"  note      {note}" for note in notes])


def _capture_line(counts: StepCounts) -> str:
    return f"  capture   {counts.capture_ms:.0f} ms, {counts.memory_bytes / 2**20:.1f} MiB taken"


def fit_report(
    backend: str,
    counts: StepCounts,
    pace: StepPace,
    times: LayerTimes,
    notes: list[str],
    evaluation: StepCounts | None = None,
) -> str:
    """The report as plain text with aligned columns.

    Args:
        backend: what the graphs ran on.
        counts: what became of the steps.
        pace: how long they took.
        times: the times inside the graph.
        notes: what the user should know besides.
        evaluation: what became of the batches of validation, if they had graphs.

    Returns:
        A few lines, without a trailing newline.
    """
    lines = [f"lightning_cudagraph: {backend}", *_count_lines("steps", counts)]
    if evaluation is not None:
        lines += _count_lines("evaluate", evaluation)
    if counts.captures:
        lines.append(_capture_line(counts))
    if pace.eager_ms is not None and pace.replayed_ms is not None:
        lines.append(
            f"  step      {pace.eager_ms:.2f} ms eager (in warm-up), {pace.replayed_ms:.2f} ms"
            f" replayed: {pace.eager_ms / pace.replayed_ms:.2f} times as fast"
        )
    medians_ms = times.medians_ms()
    parts = [part for part in ("forward", "backward", "optimizer") if STEP_TAG + part in medians_ms]
    if parts:
        shown = ", ".join(f"{part} {medians_ms[STEP_TAG + part]:.3f} ms" for part in parts)
        lines.append(f"  graph     {shown}")
    lines += [f"  note      {note}" for note in notes]
    return "\n".join(lines + [f"  {line}" for line in _layer_table(medians_ms)])


def eager_report(times: LayerTimes, notes: list[str]) -> str:
    """The report of a run without graphs, as plain text with aligned columns.

    Args:
        times: the times of its steps.
        notes: what the user should know besides.
    """
    medians_ms = times.medians_ms()
    lines = ["lightning_cudagraph: the times of an eager run"]
    parts = [tag.removeprefix(STEP_TAG) for tag in medians_ms if tag.startswith(STEP_TAG)]
    if parts:
        shown = ", ".join(f"{part} {medians_ms[STEP_TAG + part]:.3f} ms" for part in parts)
        lines.append(f"  step      {shown}")
    lines += [f"  note      {note}" for note in notes]
    return "\n".join(lines + [f"  {line}" for line in _layer_table(medians_ms)])
