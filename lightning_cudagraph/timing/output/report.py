"""The report at the end of a run, as lines of text: counts of steps, reasons, times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_cudagraph.errors import see
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, STEP_PARTS, STEP_TAG
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG
from lightning_cudagraph.timing.readings.windows import WindowSummary

_PARTS = (*STEP_PARTS, "copy")
# The share of a step from which on a gap, or host time for timings, is reported.
_LARGE_GAP = 0.1
# A gain below the first is reported as not launch-bound; one below the second gets two decimals.
LAUNCH_BOUND = 1.05
_SMALL_GAIN = 2.0
# Steps from which on the report begins with the remedy, if most were eager because of their signature.
_LONG = 100
# Of batches: what varies, and what to do about it.
_SHAPES = " shapes. Pad to a few (`pad_to` of the callback)." + see("buckets")
_VALUES = " values. Pass it as a tensor, or only a few values." + see("names_in_batches")


def verdict(stage: StageSummary, unit: str) -> str:
    """State the gain, if it was measured, and the share of replays; `unit` is the plural of a step."""
    # Rounded down, so that 100.0% means all of them.
    percent = 1000 * stage.replayed // max(stage.steps, 1) / 10
    share = f"{stage.replayed} of {stage.steps} {unit} replayed ({percent}%)"
    speedup = stage.speedup
    if stage.remedy and stage.steps >= _LONG and 2 * stage.eager_by_signature > stage.steps:
        eager_percent = 100 * stage.eager_by_signature // stage.steps
        return f"{eager_percent}% of your {unit} ran eagerly: {stage.remedy}; {share}"
    if speedup is None:
        return share
    gain = f"{speedup:.{1 if speedup >= _SMALL_GAIN else 2}f}x your plain step"
    if speedup < LAUNCH_BOUND:
        return f"not launch-bound: {gain}, leave it out; {share}"
    return f"{gain}; {share}"


def stage_lines(label: str, stage: StageSummary, is_emulated: bool = False) -> list[str]:
    """Format the counts of a stage, with the reasons of eager steps and re-captures, and step times.

    On the emulator, nothing is advised on the gain or the device.
    """
    captured = f"captured {stage.captures} time(s)"
    if stage.captures:
        captured += f" in {stage.capture_ms:.0f} ms, {stage.memory_bytes / 2**20:.1f} MiB taken"
    if stage.evictions:
        captured += f", released for others {stage.evictions} time(s)"
    became = f"{stage.warmed_up} warmed up, {stage.replayed} replayed, {stage.eager_steps} eager"
    lines = [f"  {label:<10}{became}; {captured}"]
    by_number = sorted(_one_of_each_shape(stage.eager).items(), key=lambda item: -item[1])
    more = [f"{n} eager: {reason}" for reason, n in by_number]
    if not stage.captures and stage.warmed_up:
        why = stage.not_captured or "the run ended, or went on eagerly, before a capture"
        more.append(f"nothing was captured: {why}")
    unstable = stage.unstable()
    for what, reasons in stage.recaptures_of().items():
        if len(reasons) > 1:
            remedy = f". {unstable[what]}" if what in unstable else ""
            more.append(f"invalidated {len(reasons)} times: {what}{remedy}")
        else:
            more.append(f"invalidated: {reasons[0]}")
    if stage.captures:
        more.append(f"{stage.checked} replay(s) verified against eager steps")
    lines += [f"{'':<12}{line}" for line in more]
    if stage.replay_ms is not None:
        step = f"{stage.replay_ms:.2f} ms replayed on average"
        if stage.plain_ms is None and not is_emulated:
            step += '; to know what is gained, run once with `backend="off"`'
        elif stage.plain_ms is not None:
            step += f", {stage.plain_ms:.2f} ms plain ({stage.plain_steps} steps before the capture)"
        lines.append(f"  step      {step}")
    return lines


def _one_of_each_shape(eager: Mapping[str, int]) -> dict[str, int]:
    """The reasons of eager steps, those that differ only in a shape or value of the batch together."""
    found: defaultdict[tuple[str, bool], dict[str, int]] = defaultdict(dict)
    for reason, steps in eager.items():
        expected, is_other, value = reason.partition(", found ")
        is_of_batch = is_other and "`batch" in expected
        found[expected if is_of_batch else reason, value.startswith("(")][reason] = steps
    return {
        next(iter(reasons))
        if len(reasons) == 1
        else f"{expected}, found {len(reasons)} other" + (_SHAPES if are_shapes else _VALUES): sum(
            reasons.values()
        )
        for (expected, are_shapes), reasons in found.items()
    }


def ended_lines(ended: str) -> list[str]:
    """Name the exception that ended a run; no line without one."""
    return [f"  ended     by {ended}; times of the last steps are missing"] if ended else []


def note_lines(notes: Sequence[str]) -> list[str]:
    """Format notes for the user."""
    return [f"  note      {note}" for note in notes]


def time_lines(
    graph: WindowSummary,
    ranks: Sequence[str] = (),
    event_host_us: float = 0.0,
    label: str = "graph",
    is_emulated: bool = False,
) -> list[str]:
    """Format the parts of a step, and the times of all processes.

    With every step timed, `event_host_us` is the host time of one event per step. The first line has the
    label.
    """
    gap = _gap_line(graph, event_host_us, is_emulated)
    return [*_parts_line(label, graph), *gap, *_ranks_lines(ranks)]


def _parts_line(label: str, summary: WindowSummary) -> list[str]:
    parts = [(part, times) for part in _PARTS if (times := summary.get(STEP_TAG + part)) is not None]
    if not parts:
        return []
    texts = [f"{part} {times.p50_ms:.3f} ms" for part, times in parts]
    reduced, exposed = summary.get(f"{STEP_TAG}all_reduce"), summary.get(EXPOSED_TAG)
    if reduced is not None and exposed is not None:
        texts.append(f"all_reduce {reduced.p50_ms:.3f} ms ({exposed.p50_ms:.3f} exposed)")
    return [f"  {label:<10}" + ", ".join(texts)]


def _ranks_lines(ranks: Sequence[str]) -> list[str]:
    return [f"  {'' if index else 'ranks':<10}{line}" for index, line in enumerate(ranks)]


def _gap_line(summary: WindowSummary, event_host_us: float, is_emulated: bool) -> list[str]:
    """The time between two steps, and its likely cause, as a sentence."""
    gap, period = summary.get(GAP_TAG), summary.period
    if gap is None or period is None or period.p50_ms <= 0:
        return []
    text = (
        f"  gap       between two steps, beside the copy of the batch, median {gap.p50_ms:.3f} of"
        f" {period.p50_ms:.3f} ms ({gap.share:.0%})"
    )
    waited = summary.waited
    if waited is not None and waited.p50_ms >= gap.p50_ms / 2 > 0:
        text += f": for {waited.p50_ms:.3f} ms of it this process waits for others to come to the step"
    elif gap.share >= _LARGE_GAP and not is_emulated:
        text += ": the device waits for loggers, hooks or the dataloader, or works for them"
        n_events = typical.layout.n_marks if (typical := summary.typical()) is not None else 0
        events_ms = 1e-3 * event_host_us * n_events
        if events_ms >= _LARGE_GAP * period.p50_ms:
            text += (
                f"; the {n_events} events of a timed step take the host about {events_ms:.2f} ms"
                " (`LayerTimings(every_n_steps=50)` times fewer steps)"
            )
    return [text]
