"""Batches of many lengths: step time and memory, padded to the longest of each batch and to buckets.

The GPT of `examples/char_gpt.py` on batches of 17 to 256 characters, each length equally often. Plain
Lightning and the callback take turns, block by block in one process (`benchmarks/fits.py`), and must
end with the same weights. The memory is that of fits that follow, beside one on the longest batches
alone, which has one graph.

    python -m benchmarks.shapes

Without a GPU a small run on the emulator checks that it works: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fits import (
    ON_GPU,
    BlockedBatches,
    Blocks,
    Measured,
    environment,
    pinned,
    silent_fits_in_turn,
)
from benchmarks.models import MODELS
from benchmarks.trainers import trainer_for
from examples.char_gpt import VOCABULARY
from lightning_cudagraph import Buckets, CUDAGraphCallback

__all__ = ["ROWS", "Fit", "measure", "measure_memory", "table"]

_GPT = next(model for model in MODELS if model.name == "GPT")
_LENGTHS = range(17, 257) if ON_GPU else range(3, 17)
_ROWS_OF_BATCH = 8 if ON_GPU else 2
_IGNORED = -100

BUCKETS = Buckets.from_sample(_LENGTHS, 8 if ON_GPU else 2, values={0: 0, 1: _IGNORED})
LONGEST, IN_BUCKETS = "the longest of the batch", f"{len(BUCKETS.lengths)} buckets"
ROWS: dict[str, Buckets | None] = {LONGEST: None, IN_BUCKETS: BUCKETS}
# The most that a row may take, as a share of plain Lightning's time.
_REGRET = 1.03


@dataclass
class Fit(Measured):
    """The times of one fit, and what it left.

    Attributes:
        weights: the final weights, on the host.
        replayed_share: the share of replays among all its steps; 0 without graphs.
    """

    weights: list[Tensor] = field(default_factory=list)
    replayed_share: float = 0.0


def _batches() -> Callable[[], Any]:
    """A function that makes the next batch, of another length each time."""
    lengths = [*_LENGTHS]
    random.Random(0).shuffle(lengths)
    return map(batch_of, itertools.cycle(lengths)).__next__


def batch_of(length: int) -> Any:
    """A batch whose longest text has this length; the others are up to a tenth shorter."""
    tokens = torch.randint(len(VOCABULARY), (2, _ROWS_OF_BATCH, length))
    for row in range(1, _ROWS_OF_BATCH):
        shorter = length - random.Random(row).randrange(1 + length // 10)
        tokens[0, row, shorter:] = 0
        tokens[1, row, shorter:] = _IGNORED
    return pinned((tokens[0].contiguous(), tokens[1].contiguous()))


def train(buckets: Buckets | None, has_graphs: bool, batches: Iterable[Any]) -> tuple[Any, float]:
    """Train on the batches, to their end.

    Returns:
        The module, and the share of replayed steps.
    """
    # Switched off, it pads and does nothing else.
    ours = CUDAGraphCallback(timings=None, pad_to=buckets, backend="auto" if has_graphs else "off")
    module = _GPT.make(not ON_GPU)
    with trainer_for(_GPT, [ours]) as trainer:
        trainer.fit(module, batches)
    return module, ours.summary.fit.replayed_share


def measure(blocks: Blocks) -> dict[str, tuple[Fit, Fit]]:
    """Run all fits in turn.

    Returns:
        For each row the fit of plain Lightning and that with the callback.
    """
    left: dict[tuple[str, bool], tuple[list[Tensor], float]] = {}

    def fit(row: str, has_graphs: bool, batches: BlockedBatches) -> None:
        module, share = train(ROWS[row], has_graphs, batches)
        left[row, has_graphs] = [p.detach().cpu() for p in module.parameters()], share

    keys = [(row, has_graphs) for row in ROWS for has_graphs in (False, True)]
    fits: dict[str, Callable[[BlockedBatches], None]] = {f"{key}": partial(fit, *key) for key in keys}
    measured = silent_fits_in_turn(fits, _batches(), blocks, ready_batches=len(_LENGTHS))
    found = {
        key: Fit(measured[f"{key}"].step_us, measured[f"{key}"].begin_s, None, *left[key])
        for key in keys
    }
    return {row: (found[row, False], found[row, True]) for row in ROWS}


def measure_memory() -> dict[str, tuple[int, int]]:
    """The peaks of allocated and reserved memory in bytes, with one graph and with one a bucket."""
    lengths = BUCKETS.lengths
    found = {}
    for name, of_fit in (("the longest alone", lengths[-1:]), (IN_BUCKETS, lengths)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        batches = [batch_of(length) for _ in range(8) for length in of_fit]
        train(BUCKETS, True, batches)
        found[name] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return found


def table(measured: dict[str, tuple[Fit, Fit]]) -> list[str]:
    """The table in Markdown: medians with quartiles, and the median of the ratios in each round."""
    lines = [
        "| padded to | plain, µs | callback, µs | callback ÷ plain | replayed | weights |",
        f"|{'---|' * 6}",
    ]
    for row, (plain, graph) in measured.items():
        ratio, low, high = graph.ratio_to(plain)
        missed = "" if ratio <= _REGRET else f", goal {_REGRET}"
        is_equal = all(map(torch.equal, plain.weights, graph.weights))
        cells = [row, *(f"{fit.median_us:.0f}" for fit in (plain, graph))]
        cells += [f"{ratio:.3f} ({low:.3f} to {high:.3f}{missed})", f"{graph.replayed_share:.0%}"]
        lines.append(f"| {' | '.join(cells)} | {'equal' if is_equal else 'DIFFERENT'} |")
    return lines


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("--steps", type=int, default=60 if ON_GPU else 5, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5 if ON_GPU else 2, help="blocks of a fit")
    args = parser.parse_args(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print(f"buckets {BUCKETS.lengths}; µs per step, {args.rounds} blocks of {args.steps} steps\n")
    # Within these steps each bucket has earned its graph.
    blocks = Blocks(160 if ON_GPU else 30, lead_steps=5, steps=args.steps, rounds=args.rounds)
    print("\n".join(table(measure(blocks))), flush=True)
    if ON_GPU:
        print("\n| graphs | peak allocated, MiB | reserved, MiB |\n|---|---|---|")
        for name, peaks in measure_memory().items():
            print(f"| {name} | {' | '.join(f'{peak / 2**20:.0f}' for peak in peaks)} |")


if __name__ == "__main__":
    main()
