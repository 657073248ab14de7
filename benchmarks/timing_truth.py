"""The times of layers against those of `torch.profiler`, in the same replays of the same graph.

A fit with all modules timed is profiled twice: around its capture, which says which launches lie
between which marks, and around some replays, where the profiler has the start and the end of every
kernel (`benchmarks/kineto.py`). The time between two marks is then compared with that from the end of
the kernel before the first mark to the end of the kernel before the second one. A profiler slows
replays, and their events even more, also after it is off: it stays in the process. So our times are
shown under the profiler, and from a fit before its first use.

    python -m benchmarks.timing_truth
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.fits import environment, pinned, synchronize
from benchmarks.kineto import Captured, Launch, Profiled, Replayed, Trace, annotated
from benchmarks.models import MODELS, WIDE_MLP, Workload, leaf_names
from benchmarks.trainers import trainer_for
from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from lightning_cudagraph.timing.readings.spans import (
    BACKWARD_TAG,
    FORWARD_TAG,
    STEP_TAG,
    Reading,
    SpanLayout,
)

WORKLOADS = (WIDE_MLP, *MODELS[1:])
WITHIN_SHARE, WITHIN_US = 0.05, 3.0
SETTLING_STEPS = 30


@dataclass
class Alone:
    """The times of a fit without a profiler.

    Attributes:
        readings: of its replays.
        step_us: mean step time in microseconds, with an idle device at both ends.
    """

    readings: list[Reading]
    step_us: float


@dataclass
class Watched:
    """The traces and times of a profiled fit.

    Attributes:
        capture: the trace of the capture, and of the eager steps around it.
        replays: the trace of the profiled replays.
        readings: of these replays.
    """

    capture: Trace
    replays: Trace
    readings: list[Reading]


@dataclass
class Row:
    """One span, in microseconds, medians over replays.

    Attributes:
        tag: of the span.
        is_leaf: its module has no members.
        kernels: number of kernels, copies and fills in it.
        ours_us: time of the marks under the profiler.
        profiler_us: time of the profiler, in the same replays.
        busy_us: the same without the gaps between kernels.
        alone_us: time of the marks without the profiler.
        of_layer: in a backward pass, number of kernels in autograd nodes that the layer has made.
        inside: number of these that lie between its marks.
    """

    tag: str
    is_leaf: bool
    kernels: int
    ours_us: float
    profiler_us: float
    busy_us: float
    alone_us: float
    of_layer: int
    inside: int

    @property
    def off_us(self) -> float:
        """Difference from the profiler."""
        return self.ours_us - self.profiler_us

    @property
    def tolerance_us(self) -> float:
        """Allowed difference from the profiler."""
        return max(WITHIN_US, WITHIN_SHARE * self.profiler_us)

    @property
    def is_within(self) -> bool:
        return abs(self.off_us) <= self.tolerance_us

    @property
    def alone_is_within(self) -> bool:
        """True if `alone_us` lies between the time of the kernels and that with their gaps."""
        tolerance_us = self.tolerance_us
        return self.busy_us - tolerance_us <= self.alone_us <= self.profiler_us + tolerance_us


@dataclass
class Truth:
    """The comparison for one model.

    Attributes:
        name: of the model.
        rows: its spans.
        problems: parts that could not be compared with the profiler, with the reason.
        n_replays: number of compared replays.
        n_kernels: number of kernels, copies and fills of a replay.
        n_named: number of these with a kernel name that their op also has when launched eagerly.
        replay_us: a replay by the profiler, from its first kernel to its last.
        step_us: a step by the host's clock, without the profiler.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    n_replays: int = 0
    n_kernels: int = 0
    n_named: int = 0
    replay_us: float = float("nan")
    step_us: float = float("nan")

    def layers(self, above_us: float) -> list[Row]:
        """The spans of layers that take longer than `above_us`."""
        return [
            row
            for row in self.rows
            if row.tag.startswith((FORWARD_TAG, BACKWARD_TAG)) and row.profiler_us > above_us
        ]

    def part(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.tag == STEP_TAG + name), None)

    @property
    def backward(self) -> str:
        """Number of the leaves' backward kernels that lie between their marks, in words."""
        leaves = [row for row in self.rows if row.is_leaf and row.tag.startswith(BACKWARD_TAG)]
        inside, own = sum(row.inside for row in leaves), sum(row.of_layer for row in leaves)
        others = sum(row.kernels for row in leaves) - inside
        return f"{inside} of the leaves' {own} kernels between their marks, with {others} others"

    def parts_us(self, value: Callable[[Row], float]) -> float:
        """The sum of the parts of the step."""
        names = ("forward", "backward", "host", "clipping", "scaler", "optimizer")
        return sum(value(row) for name in names if (row := self.part(name)) is not None)


class _Batches:
    """Ready batches: first those of warm-up and verified replays, then those of measured replays.

    Args:
        batches: the batches.
        replays: number of measured replays.
        callback: its summary tells when replays begin.
    """

    def __init__(self, batches: list[Any], replays: int, callback: CUDAGraphCallback) -> None:
        self._batches = batches
        self._n_replays = replays
        self._callback = callback
        self._step = 0
        self.step_us = float("nan")

    def __len__(self) -> int:
        return SETTLING_STEPS + self._n_replays + 1

    def _some(self, steps: int) -> Iterator[Any]:
        for _ in range(steps):
            yield self._batches[self._step % len(self._batches)]
            self._step += 1

    def _measured(self) -> Iterator[Any]:
        synchronize()
        started_s = time.perf_counter()
        yield from self._some(self._n_replays)
        synchronize()
        self.step_us = (time.perf_counter() - started_s) / self._n_replays * 1e6

    def _captures(self) -> int:
        return self._callback.summary.fit.captures

    def __iter__(self) -> Iterator[Any]:
        yield from self._some(SETTLING_STEPS)
        yield from self._measured()
        yield from self._some(1)  # no code would run here after the last batch


class _WatchedBatches(_Batches):
    """The same, with the profiler on for some of the steps."""

    captured: Trace
    replayed: Trace

    def __iter__(self) -> Iterator[Any]:
        yield from self._some(2)
        profiled = Profiled()
        profiled.start()
        while not self._captures() and self._step < SETTLING_STEPS:
            yield from self._some(1)
        self.captured = profiled.stop()
        yield from self._some(SETTLING_STEPS - self._step)
        profiled = Profiled()
        profiled.start()
        yield from self._measured()
        self.replayed = profiled.stop()
        yield from self._some(1)


@contextlib.contextmanager
def readings_kept() -> Iterator[list[Reading]]:
    """Collect all readings, in order."""
    kept: list[Reading] = []
    original = Reading.__init__

    def init(self: Reading, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        kept.append(self)

    Reading.__init__ = init  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        Reading.__init__ = original  # type: ignore[method-assign]


_B = TypeVar("_B", bound=_Batches)


def _fit(
    workload: Workload, replays: int, tiny: bool, kind: Callable[[list[Any], int, CUDAGraphCallback], _B]
) -> tuple[_B, list[Reading]]:
    """Train with all modules timed; returns the batches, and the readings of the measured replays."""
    torch.manual_seed(1)
    callback = CUDAGraphCallback(timings=LayerTimings(modules=["*"], every_n_steps=1), streams=1)
    batches = kind([pinned(workload.batch(tiny)) for _ in range(8)], replays, callback)
    with (
        trainer_for(workload, [callback]) as trainer,
        contextlib.redirect_stdout(io.StringIO()),
        readings_kept() as readings,
    ):
        trainer.fit(workload.make(tiny), batches)
    counts = callback.summary.fit
    if counts.replayed + counts.warmed_up != len(batches):
        raise RuntimeError(f"Not all steps were replayed:\n{callback.summary}")
    # At the end of the fit more are made, of steps that have been read, or were eager.
    by_step: dict[int, Reading] = {}
    for reading in readings:
        by_step.setdefault(reading.step, reading)
    return batches, [by_step[SETTLING_STEPS + number] for number in range(replays)]


def alone(workload: Workload, replays: int, tiny: bool) -> Alone:
    """Train with all modules timed; call it before a profiler has been used in the process."""
    batches, readings = _fit(workload, replays, tiny, _Batches)
    return Alone(readings, batches.step_us)


def watch(workload: Workload, replays: int, tiny: bool) -> Watched:
    """Train with all modules timed, and with the profiler on for some of the steps."""
    with annotated():
        batches, readings = _fit(workload, replays, tiny, _WatchedBatches)
    return Watched(batches.captured, batches.replayed, readings)


def _plan(watched: Watched, truth: Truth) -> Captured | None:
    """The launches between marks, or None if the capture is not found."""
    captures = watched.capture.captures()
    if not captures or not captures[0].launches:
        calls = ", ".join(f"{name} {n}" for name, n in watched.capture.calls().most_common(20))
        truth.problems.append(f"no launches of a capture in the trace of it, but: {calls or 'nothing'}")
        return None
    plan = captures[0]
    for other in captures[1:]:
        if (other.kinds, other.marks) != (plan.kinds, plan.marks):
            truth.problems.append("two captures of the step differ in their launches, or in their marks")
            return None
    return plan


def _mapped(
    watched: Watched, plan: Captured, truth: Truth
) -> tuple[Captured, list[tuple[Replayed, Reading]]]:
    """The launches with device activities, and the profiled replays with their readings."""
    replays = watched.replays.replays()
    readings = watched.readings
    if not replays or len(replays) != len(readings):
        truth.problems.append(f"{len(replays)} launches of graphs for {len(readings)} readings")
        return plan, []
    numbers = plan.ran(replays[0], watched.capture.kernels_of_ops())
    if nothing := [launch for n, launch in enumerate(plan.launches) if n not in numbers]:
        seen = len(replays[0].activities)
        truth.problems.append(
            f"{seen} kernels, copies and fills for {len(plan.launches)} launches of the capture"
            + (f"; nothing ran for {_named(nothing)}" if numbers else ", which cannot be told apart")
        )
        if not numbers:
            kinds = [dict(Counter(each)) for each in (replays[0].kinds, plan.kinds)]
            truth.problems.append(f"these are {kinds[0]} for {kinds[1]}")
    ran = plan.only(numbers)
    alike = [pair for pair in zip(replays, readings, strict=True) if pair[0].kinds == ran.kinds]
    if numbers and len(alike) < len(replays):
        truth.problems.append(f"{len(replays) - len(alike)} of {len(replays)} replays differ")
    return ran, alike


def _named(launches: list[Launch]) -> str:
    return ", ".join(f"a {launch.kind} of {launch.op!r}" for launch in launches[:5])


def _positions(layout: SpanLayout, plan: Captured) -> Iterator[tuple[int, str, list[tuple[int, int]]]]:
    """Number and tag of each span in the graph, and the launches around its calls."""
    for number, span in enumerate(layout.spans):
        if all(mark < len(plan.marks) for call in span.calls for mark in call):
            yield number, span.tag, [(plan.marks[begin], plan.marks[end]) for begin, end in span.calls]


def compare(name: str, watched: Watched, alone: Alone, leaves: set[str]) -> Truth:
    """Compare the readings of a fit with its traces.

    Args:
        name: of the model.
        watched: readings and traces under the profiler.
        alone: readings of a fit without it.
        leaves: names of the modules without members.
    """
    truth = Truth(name, step_us=alone.step_us)
    plan = _plan(watched, truth)
    if plan is None:
        return truth
    plan, pairs = _mapped(watched, plan, truth)
    if not pairs:
        return truth
    truth.n_kernels = len(plan.launches)
    truth.replay_us = statistics.median(replay.total_us for replay, _ in pairs)
    eagerly = watched.capture.kernels_of_ops()
    named = [
        activity.name in eagerly.get(launch.op, ())
        for launch, activity in zip(plan.launches, pairs[0][0].activities, strict=True)
    ]
    truth.n_named = sum(named)
    if not all(named):
        odd = named.index(False)
        truth.problems.append(
            f"{named.count(False)} kernels have names that the op has not eagerly, such as"
            f" {pairs[0][0].activities[odd].name[:60]!r} of {plan.launches[odd].op!r}"
        )
    # After a pause there is no gap, and so another layout.
    layout = Counter(reading.layout for _, reading in pairs).most_common(1)[0][0]
    pairs = [pair for pair in pairs if pair[1].layout is layout]
    truth.n_replays = len(pairs)
    ours_ms = [reading.durations_ms.tolist() for _, reading in pairs]
    unwatched = [each for each in alone.readings if each.layout.spans == layout.spans]
    if not unwatched:
        truth.problems.append("a fit that is not watched has other marks")
        return truth
    alone_ms = [each.durations_ms.tolist() for each in unwatched]
    mapped = list(_positions(layout, plan))
    forward = {span.tag.removeprefix(FORWARD_TAG): span.calls for span in layout.spans}
    for number, tag, calls in mapped:
        layer = tag.partition("/")[2]
        own = plan.backward_of(forward.get(layer, ())) if tag.startswith(BACKWARD_TAG) else set()
        truth.rows.append(
            Row(
                tag,
                layer in leaves,
                sum(last - first for first, last in calls),
                statistics.median(times[number] for times in ours_ms) * 1e3,
                statistics.median(
                    sum(replay.between_us(*call) for call in calls) for replay, _ in pairs
                ),
                statistics.median(sum(replay.busy_us(*call) for call in calls) for replay, _ in pairs),
                statistics.median(times[number] for times in alone_ms) * 1e3,
                len(own),
                sum(n in own for n in range(len(plan.launches)) if any(a <= n < b for a, b in calls)),
            )
        )
    if outside := [span.tag for span in layout.spans if span.tag not in {tag for _, tag, _ in mapped}]:
        truth.problems.append(f"not in the graph, and so not compared: {', '.join(outside)}")
    return truth


def _share(within: list[bool]) -> str:
    return f"{sum(within)} of {len(within)}"


def _percent(value_us: float, of_us: float) -> str:
    return f"{value_us / of_us - 1:+.1%}"


def summary(truths: list[Truth], above_us: float) -> str:
    """One line a model, as a table in Markdown."""
    lines = [
        "| model | kernels | layers | in 5 % or 3 µs | worst | alone | sum of parts | step | backward |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for truth in truths:
        layers, total = truth.layers(above_us), truth.part("total")
        if total is None:
            lines.append(f"| {truth.name} | {truth.n_kernels} | not compared | | | | | | |")
            continue
        worst = max(layers, key=lambda row: abs(row.off_us) / row.tolerance_us, default=None)
        said = (
            "" if worst is None else f"{worst.off_us:+.1f} µs ({worst.off_us / worst.profiler_us:+.1%})"
        )
        leaves = sum(row.is_leaf for row in layers)
        parts = _percent(truth.parts_us(lambda row: row.ours_us), total.ours_us)
        alone = _percent(truth.parts_us(lambda row: row.alone_us), total.alone_us)
        lines.append(
            f"| {truth.name} | {truth.n_kernels} ({truth.n_named} named as eagerly)"
            f" | {len(layers)} above {above_us:.0f} µs, {leaves} of them leaves"
            f" | {_share([row.is_within for row in layers])} | {said}"
            f" | {_share([row.alone_is_within for row in layers])} | {parts}, alone {alone}"
            f" | {total.ours_us:.0f} µs by marks, {truth.replay_us:.0f} by the profiler"
            f" ({_percent(total.ours_us, truth.replay_us)}); alone {total.alone_us:.0f} by marks,"
            f" {truth.step_us:.0f} by the host | {truth.backward} |"
        )
    return "\n".join(lines)


def details(truth: Truth, above_us: float, limit: int) -> str:
    """The layers of a model with the largest differences from the profiler."""
    rows = sorted(truth.layers(above_us), key=lambda row: -abs(row.off_us) / row.tolerance_us)
    lines = [
        f"| {truth.name}: span | kernels | marks | profiler | of it busy | marks, alone |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.tag} | {row.kernels} | {row.ours_us:.1f} | {row.profiler_us:.1f}"
        f" | {row.busy_us:.1f} | {row.alone_us:.1f} |"
        for row in rows[:limit]
    ]
    return "\n".join(lines)


def main() -> int:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    parser.add_argument("--replays", type=int, default=20, help="replays that are profiled")
    parser.add_argument("--above-us", type=float, default=20.0, help="layers that take longer")
    parser.add_argument("--rows", type=int, default=6, help="layers shown of each model")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check that all runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    workloads = [workload for workload in WORKLOADS if workload.name in args.models]
    for workload in [each for each in workloads if not each.is_here]:
        print(f"{workload.name} is left out: it needs {workload.needs}")
        workloads.remove(workload)
    # All of these first: none of them may come behind a use of the profiler.
    unwatched = {each.name: alone(each, 10 * args.replays, args.tiny) for each in workloads}
    truths = []
    for workload in workloads:
        leaves = set(leaf_names(workload.make(args.tiny)))
        started_s = time.perf_counter()
        watched = watch(workload, args.replays, args.tiny)
        truths.append(compare(workload.name, watched, unwatched[workload.name], leaves))
        gc.collect()
        took_s = time.perf_counter() - started_s
        said = f"{workload.name}: {took_s:.0f} s\n{summary(truths[-1:], args.above_us)}\n"
        print(said, "\n".join(truths[-1].problems), file=sys.stderr, flush=True)
    surroundings = environment()
    print(", ".join(f"{key} {value}" for key, value in surroundings.items()))
    print(f"medians over {args.replays} replays\n")
    print(summary(truths, args.above_us))
    for truth in truths:
        if truth.layers(args.above_us):
            print("\n" + details(truth, args.above_us, args.rows))
        for problem in truth.problems:
            print(f"\n{truth.name}: {problem}")
    if args.json:
        args.json.write_text(json.dumps({**surroundings, "models": [asdict(truth) for truth in truths]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
