"""Time from the first batch of a fit to the end of its first replay, by the number of streams.

The choice of the number of streams takes a trial. Fits with one stream and with the choice take turns;
the step time afterwards shows what the choice is worth.

    python -m benchmarks.first_replay

Without a GPU a small run on the emulator checks that it works: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.fits import ON_GPU, environment, pinned, synchronize
from benchmarks.models import WORKLOADS, Workload
from benchmarks.trainers import trainer_for
from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from lightning_cudagraph.capture.decisions.stream_choice import AskedStreams

_MODELS = ("GPT", "ResNet-18", "BERT-base")
_BATCHES = 8
_ROUNDS = 2


class _Watched:
    """Batches of a fit, until some steps after its first replay.

    Attributes:
        first_s: seconds from the first batch to the end of the first replay.
        step_us: mean step time afterwards, in microseconds.
    """

    def __init__(self, batches: list[Any], callback: CUDAGraphCallback, steps: int) -> None:
        self._batches = batches
        self._callback = callback
        self._steps = steps
        self.first_s = self.step_us = float("nan")

    def __iter__(self) -> Iterator[Any]:
        started_s = time.perf_counter()
        step = 0

        def some(steps: int) -> Iterator[Any]:
            nonlocal step
            for _ in range(steps):
                yield self._batches[step % len(self._batches)]
                step += 1

        while not self._callback.summary.fit.replayed:
            yield from some(1)
        synchronize()
        self.first_s = time.perf_counter() - started_s
        yield from some(self._steps)  # verified replays among them
        synchronize()
        started_s = time.perf_counter()
        yield from some(self._steps)
        synchronize()
        self.step_us = (time.perf_counter() - started_s) / self._steps * 1e6
        yield from some(1)


def fit(
    workload: Workload, streams: AskedStreams, timings: LayerTimings | None, steps: int
) -> list[str]:
    """Train, and return a row of the table."""
    torch.manual_seed(1)
    callback = CUDAGraphCallback(streams=streams, timings=timings)
    batches = [pinned(workload.batch(not ON_GPU)) for _ in range(_BATCHES)]
    watched = _Watched(batches, callback, steps)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with trainer_for(workload, [callback], limit_train_batches=10**6) as trainer:
            trainer.fit(workload.make(not ON_GPU), watched)
    gc.collect()
    capture_s = callback.summary.fit.capture_ms / 1e3
    note = next((note for note in callback.summary.notes if note.startswith("captured on")), "")
    times = f"{watched.first_s:.2f}", f"{capture_s:.2f}", f"{watched.step_us:.0f}"
    return [workload.name, str(streams), *times, note]


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print a table in Markdown."""
    names = [each.name for each in WORKLOADS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_replay", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=names, default=_MODELS, metavar="MODEL")
    parser.add_argument("--streams", nargs="+", default=["1", "auto"], help='numbers, or "auto"')
    parser.add_argument("--steps", type=int, default=100 if ON_GPU else 1)
    parser.add_argument("--timed", action="store_true", help="with the default times of layers")
    args = parser.parse_args(given)
    print(environment())
    print("| model | streams | s to the first replay | s of captures | µs a step | |")
    print("|---|---|---|---|---|---|")
    for workload in (each for each in WORKLOADS if each.name in args.models and each.is_here):
        asked: list[AskedStreams] = ["auto" if each == "auto" else int(each) for each in args.streams]
        timings = LayerTimings() if args.timed else None
        # What a process does once (handles, kernels) is done in a fit that is not printed.
        fit(workload, asked[0], timings, 1)
        for streams in asked * _ROUNDS:
            print(f"| {' | '.join(fit(workload, streams, timings, args.steps))} |", flush=True)


if __name__ == "__main__":
    main()
