"""Host time of a step with a minimal graph, by number of logged values.

An `nn.Linear(8, 1)` with 0, 1, 3 and 10 values logged in every step, with and without progress bar and
TensorBoardLogger, in the plain Trainer and with the callback. Fits with the same surroundings take turns
block by block in one process (`benchmarks/fits.py`); medians and quartiles over the blocks. No hook is
used for the timing: the loader, with batches ready in memory, reads the clock.

    python -m benchmarks.host_floor

Without a GPU a small run on the emulator checks that it works: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import Tensor, nn

from benchmarks.fits import (
    ON_GPU,
    BlockedBatches,
    Blocks,
    Measured,
    environment,
    pinned,
    silent_fits_in_turn,
)
from benchmarks.trainers import quiet_trainer
from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.trainer.logs.logged_step import LoggedStep
from lightning_cudagraph.trainer.logs.recorder import Logs

LOGGED_VALUES = (0, 1, 3, 10)
PLAIN = "plain"
CALLBACKS: dict[str, Callable[[], CUDAGraphCallback | None]] = {
    PLAIN: lambda: None,
    "callback": CUDAGraphCallback,
    "callback, no timings": lambda: CUDAGraphCallback(timings=None),
}
HANDING_OVER = "handing over"


@dataclass(frozen=True)
class Surroundings:
    """Other work of the Trainer in every step.

    Attributes:
        bar: the progress bar is on.
        tensorboard: TensorBoardLogger is on, every 50 steps.
        shown: the first value is logged with `prog_bar=True`, which reads it back in every step.
    """

    bar: bool = False
    tensorboard: bool = False
    shown: bool = False


SURROUNDINGS = {
    "nothing": Surroundings(),
    "progress bar": Surroundings(bar=True),
    "TensorBoard": Surroundings(tensorboard=True),
    "both": Surroundings(bar=True, tensorboard=True),
    "both, first value shown": Surroundings(bar=True, tensorboard=True, shown=True),
}


class Line(pl.LightningModule):
    """One layer, with logged values.

    Args:
        values: number of values that each step logs.
        shown: the first one is shown in the progress bar.
    """

    def __init__(self, values: int, shown: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.names = [f"value_{index}" for index in range(values)]
        self.shown = shown

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        for index, name in enumerate(self.names):
            shown = self.shown and index == 0
            self.log(name, loss, on_step=True, on_epoch=True, prog_bar=shown)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def fit(
    values: int,
    around: Surroundings,
    make_callback: Callable[[], CUDAGraphCallback | None],
    batches: BlockedBatches,
) -> None:
    """Train on the batches, to their end.

    Raises:
        RuntimeError: if steps were not replayed.
    """
    callback = make_callback()
    callbacks: list[Callback] = [] if callback is None else [callback]
    if around.bar:
        # By default it is that of Rich where that is installed, which draws one bar at a time.
        callbacks.append(TQDMProgressBar())
    with quiet_trainer(callbacks, around.tensorboard, enable_progress_bar=around.bar) as trainer:
        trainer.fit(Line(values, around.shown), batches)
    counts = callback.summary.fit if callback is not None else None
    if counts is not None and counts.replayed + counts.warmed_up != len(batches):
        raise RuntimeError(f"Not all steps were replayed:\n{callback.summary}")


def in_turn(fits: dict[str, Callable[[BlockedBatches], None]], blocks: Blocks) -> dict[str, Measured]:
    """Run some fits in turn."""
    return silent_fits_in_turn(fits, lambda: pinned(torch.randn(8, 8)), blocks)


def handing_over_us(values: int, blocks: Blocks) -> float:
    """Host time of one step's logged values before and after its replay, in microseconds.

    Measured in steps that show no values, as are all but one in `log_every_n_steps`.
    """
    times_s: list[float] = []
    before, after = Logs.before_replay, Logs.put_off

    def timed_before(self: Logs, logged: LoggedStep | None) -> None:
        started_s = time.perf_counter()
        before(self, logged)
        times_s.append(time.perf_counter() - started_s)

    def timed_after(self: Logs, logged: LoggedStep) -> None:
        started_s = time.perf_counter()
        after(self, logged)
        times_s[-1] += time.perf_counter() - started_s

    Logs.before_replay = timed_before  # type: ignore[method-assign]
    Logs.put_off = timed_after  # type: ignore[method-assign]
    try:
        untimed = CALLBACKS["callback, no timings"]
        in_turn({HANDING_OVER: partial(fit, values, Surroundings(), untimed)}, blocks)
    finally:
        Logs.before_replay = before  # type: ignore[method-assign]
        Logs.put_off = after  # type: ignore[method-assign]
    return statistics.median(times_s[-blocks.rounds * blocks.steps :]) * 1e6


@dataclass
class Row:
    """The times of one variant.

    Attributes:
        group: the variants that it is compared with.
        values: number of values that each step logs.
    """

    group: str
    values: int
    name: str
    times: Measured


def rows(groups: list[str], blocks: Blocks) -> Iterator[Row]:
    """Measure all variants, group by group."""
    for group, around in SURROUNDINGS.items():
        if group not in groups:
            continue
        variants = [
            (values, name)
            for values in LOGGED_VALUES
            if values or not around.shown
            for name in CALLBACKS
        ]
        fits: dict[str, Callable[[BlockedBatches], None]] = {
            f"{values} {name}": partial(fit, values, around, CALLBACKS[name])
            for values, name in variants
        }
        measured = in_turn(fits, blocks)
        for values, name in variants:
            yield Row(group, values, name, measured[f"{values} {name}"])
    if HANDING_OVER in groups:
        for values in LOGGED_VALUES:
            yield Row(HANDING_OVER, values, "alone", Measured([handing_over_us(values, blocks)]))


def line(row: Row) -> str:
    """A row of the table in Markdown: the median, with quartiles."""
    low_us, high_us = row.times.spread_us
    spread = f"({low_us:.0f} to {high_us:.0f})"
    return f"| {row.group} | {row.values} | {row.name} | {row.times.median_us:.0f} {spread} |"


def main() -> None:
    names = [*SURROUNDINGS, HANDING_OVER]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100 if ON_GPU else 10, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5 if ON_GPU else 2, help="blocks of a fit")
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="groups of variants")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    blocks = Blocks(warm_steps=280 if ON_GPU else 10, lead_steps=5, steps=args.steps, rounds=args.rounds)
    surroundings = environment()
    print(", ".join(f"{key} {value}" for key, value in surroundings.items()))
    print(f"{args.rounds} blocks of {args.steps} steps each\n")
    print("| around the step | logged values | | µs per step |\n|---|---|---|---|", flush=True)
    numbers: list[dict[str, Any]] = []
    for row in rows(args.only, blocks):  # what was measured is there even if the rest is cut off
        print(line(row), flush=True)
        step_us = row.times.step_us
        numbers.append({"group": row.group, "values": row.values, "name": row.name, "step_us": step_us})
        if args.json:
            args.json.write_text(json.dumps({**surroundings, "steps": args.steps, "rows": numbers}))


if __name__ == "__main__":
    main()
