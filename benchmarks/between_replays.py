"""Device activity between two replays: why a step is longer than its graph.

A model of the comparison is trained by the callback without timings, on one stream and on as many as are
fastest, and by the hand-written loop. Some steps in the middle are traced with `torch.profiler`, which
slows down the host; so the device's own activities count, and the idle time is an upper bound.

    python -m benchmarks.between_replays --models GPT
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.fits import ON_GPU, environment, pinned
from benchmarks.kineto import Between, Profiled, Trace
from benchmarks.models import WORKLOADS, Workload
from benchmarks.peers import BY_HAND, DATA_FLOW, ONE_STREAM, PEERS

__all__ = ["TracedBatches", "main", "rows_of"]

_WARM_STEPS = 100
_TRACED_STEPS = 20
_READY_BATCHES = 16


class TracedBatches:
    """Batches, some of them consumed under a profiler.

    Args:
        workload: the model.
        tiny: the model in its tiny size.
        warm_steps: number of first steps, which are not traced.
        traced_steps: number of traced steps.

    Attributes:
        trace: the trace, set after the last traced step.
    """

    trace: Trace

    def __init__(
        self,
        workload: Workload,
        tiny: bool = False,
        warm_steps: int = _WARM_STEPS,
        traced_steps: int = _TRACED_STEPS,
    ) -> None:
        self._batches = [pinned(workload.batch(tiny)) for _ in range(_READY_BATCHES)]
        self._warm_steps = warm_steps
        self._end = warm_steps + traced_steps

    def __len__(self) -> int:
        return self._end + 1  # one more ends the trace: no code runs after the last batch

    def __iter__(self) -> Iterator[Any]:
        profiled = Profiled()
        for step in range(len(self)):
            if step == self._warm_steps:
                profiled.start()
            elif step == self._end:
                self.trace = profiled.stop()
            yield self._batches[step % len(self._batches)]


def rows_of(name: str, found: Sequence[Between], calls: Counter[str]) -> list[str]:
    """Rows in Markdown: median times between replays, then the activities and CUDA calls in them.

    Args:
        name: of the model and the peer.
        found: the gaps between replays.
        calls: number of calls of each CUDA function by the host, in all gaps.
    """
    if not found:
        return [f"| {name} | no replays | | |"]
    rows = [
        f"| {name} | from replay to replay | | {_median(each.total_us for each in found)} |",
        f"| | of that idle | | {_median(each.idle_us for each in found)} |",
    ]
    activities = [activity for each in found for activity in each.activities]
    times = Counter(activity.name for activity in activities)
    for activity, n in times.most_common():
        ran_us = _median(each.end_us - each.start_us for each in activities if each.name == activity)
        rows.append(f"| | {activity.replace('|', '/')[:80]} | {n / len(found):.2f} | {ran_us} |")
    for call, n in calls.most_common():
        rows.append(f"| | host: {call} | {n / len(found):.2f} | |")
    return rows


def _median(values: Iterator[float]) -> str:
    return f"{statistics.median(values):.1f}"


def main(given: Sequence[str] | None = None) -> None:
    """Trace, and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.between_replays", description=__doc__)
    models = [each.name for each in WORKLOADS]
    parser.add_argument("--models", nargs="+", choices=models, default=models, metavar="MODEL")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    args = parser.parse_args(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print("\n| | | times a step | µs |\n|---|---|---|---|")
    for workload in (each for each in WORKLOADS if each.name in args.models):
        for peer in (each for each in PEERS if each.name in (BY_HAND, ONE_STREAM, DATA_FLOW)):
            if peer.needs_gpu and not ON_GPU:
                continue
            batches: Any = TracedBatches(workload, args.tiny)
            peer.fit(workload, args.tiny, batches)
            between = batches.trace.between_replays()
            print("\n".join(rows_of(f"{workload.name}, {peer.name}", between, batches.trace.calls())))


if __name__ == "__main__":
    main()
