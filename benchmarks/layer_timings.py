"""The cost of timing every layer of a step, forward and backward, in every replay.

For each model, fits that differ in their timings alone, with `self.log` and TensorBoardLogger on, take
turns block by block in one process (`benchmarks/fits.py`). Prints median and quartiles of the step time
over the blocks, and of its ratio to the fit without timings, taken round by round.

    python -m benchmarks.layer_timings
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.fits import ON_GPU, BlockedBatches, Blocks, Measured, environment, fits_in_turn, pinned
from benchmarks.models import MODELS, Workload, leaf_names
from benchmarks.trainers import trainer_for
from lightning_cudagraph import CUDAGraphCallback, LayerTimings

BASELINE = "no timings"
SAMPLED_EVERY = 50
VARIANTS: dict[str, Callable[[list[str]], LayerTimings | None]] = {
    BASELINE: lambda leaves: None,
    "every leaf": lambda leaves: LayerTimings(modules=leaves, every_n_steps=1),
    "every leaf, serial": lambda leaves: LayerTimings(
        modules=leaves, every_n_steps=1, placement="serial"
    ),
    f"every leaf, one step in {SAMPLED_EVERY}": lambda leaves: LayerTimings(
        modules=leaves, every_n_steps=SAMPLED_EVERY
    ),
    "automatic": lambda leaves: LayerTimings(every_n_steps=1),
}
# Blocks hold whole periods of the sampling. So many rounds that the figures stand, by the step's length.
ROUNDS = {"MLP": 40, "GPT": 20, "ResNet-18": 20, "BERT-base": 10}


@dataclass
class Result:
    """The measurements of one model.

    Attributes:
        layers: number of timed layers in the variant that times every leaf.
        fits: the times of each variant, by name.
        took_s: duration of all fits in seconds.
    """

    workload: Workload
    layers: int
    fits: dict[str, Measured]
    took_s: float


def fit(
    workload: Workload, timings: LayerTimings | None, batches: BlockedBatches, streams: int, tiny: bool
) -> None:
    """Train on the batches, to their end.

    Raises:
        RuntimeError: if steps were not replayed.
    """
    torch.manual_seed(1)
    callback = CUDAGraphCallback(timings=timings, streams=streams)
    with trainer_for(workload, [callback]) as trainer:
        trainer.fit(workload.make(tiny), batches)
    counts = callback.summary.fit
    if counts.captures != 1 or counts.replayed + counts.warmed_up != len(batches):
        raise RuntimeError(f"Not all steps were replayed from one capture:\n{callback.summary}")


def measure(workload: Workload, variants: list[str], blocks: Blocks, tiny: bool, streams: int) -> Result:
    """Run all variants of one model in turn."""
    started_s = time.perf_counter()
    leaves = leaf_names(workload.make(tiny))
    fits: dict[str, Callable[[BlockedBatches], None]] = {
        name: lambda batches, name=name: fit(workload, VARIANTS[name](leaves), batches, streams, tiny)  # type: ignore[misc]
        for name in variants
    }
    with contextlib.redirect_stdout(io.StringIO()):  # samples, progress
        measured = fits_in_turn(fits, lambda: pinned(workload.batch(tiny)), blocks)
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return Result(workload, len(leaves), measured, time.perf_counter() - started_s)


def table(results: list[Result]) -> str:
    """The medians as a table in Markdown, with quartiles."""
    lines = [
        "| model (leaves) | timings | µs per step (quarter points) | against none (quarter points) |",
        "|---|---|---|---|",
    ]
    for result in results:
        baseline = result.fits.get(BASELINE)
        for name, measured in result.fits.items():
            model = f"{result.workload.name} ({result.layers})"
            if measured.failure is not None:
                said = str(measured.failure).splitlines()[0]
                lines.append(f"| {model} | {name} | {type(measured.failure).__name__}: {said} | |")
                continue
            low_us, high_us = measured.spread_us
            step = f"{measured.median_us:.0f} ({low_us:.0f} to {high_us:.0f})"
            against = ""
            if baseline is not None and baseline.failure is None and measured is not baseline:
                ratio, low, high = measured.ratio_to(baseline)
                against = f"{ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
            lines.append(f"| {model} | {name} | {step} | {against} |")
    return "\n".join(lines)


def main() -> int:
    names = [workload.name for workload in MODELS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=2 * SAMPLED_EVERY, help="steps of a block")
    parser.add_argument("--rounds", type=float, default=1.0, help="this many times as many rounds")
    # Not "auto": of the fits of one process, some came to fewer streams than others (H200).
    parser.add_argument("--streams", type=int, default=4, help="of the captures")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check that all runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results = []
    for workload in MODELS:
        if workload.name not in args.models:
            continue
        if not workload.is_here:
            print(f"{workload.name} is left out: it needs {workload.needs}")
            continue
        rounds = max(2, round(ROUNDS[workload.name] * args.rounds))
        blocks = Blocks(warm_steps=40, lead_steps=10, steps=args.steps, rounds=rounds)
        result = measure(workload, args.variants, blocks, args.tiny, args.streams)
        results.append(result)
        said = f"{workload.name}: {rounds} rounds, {result.took_s:.0f} s\n{table([result])}\n"
        print(said, file=sys.stderr, flush=True)
        for name, measured in result.fits.items():
            if measured.failure is not None:
                print(f"{workload.name}, {name}:", file=sys.stderr)
                traceback.print_exception(measured.failure)
    surroundings = environment()
    print(", ".join(f"{key} {value}" for key, value in surroundings.items()))
    print(f"blocks of {args.steps} steps, medians over the rounds\n")
    print(table(results))
    if args.json:
        rows = [
            {
                "model": result.workload.name,
                "description": result.workload.description,
                "layers": result.layers,
                "timings": name,
                "step_us": measured.step_us,
                "failure": None if measured.failure is None else str(measured.failure),
            }
            for result in results
            for name, measured in result.fits.items()
        ]
        args.json.write_text(json.dumps({**surroundings, "steps": args.steps, "rows": rows}))
    return any(fit.failure is not None for result in results for fit in result.fits.values())


if __name__ == "__main__":
    sys.exit(main())
