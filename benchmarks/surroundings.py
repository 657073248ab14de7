"""Step time by what surrounds the step: callbacks, hooks, progress bar, metrics.

An MLP of four layers in a graph of some 0.15 ms, in Trainers that people have, as eager steps and with
the callback. All fits take turns block by block in one process (`benchmarks/fits.py`), so each row can
be compared with the first one, round by round. The loader, with batches in memory, reads the clock.
What the progress bar itself takes is measured in the eager steps, and named below the table. With few
rows (`--only`) and long blocks (`--steps 1000`) the figures vary less.

    python -m benchmarks.surroundings

Without a GPU a small run on the emulator checks that it works: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

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

NOTHING = "nothing"
EAGER, UNTIMED, DEFAULT = "eager", "`timings=None`", "default"
WAYS: dict[str, Callable[[], CUDAGraphCallback | None]] = {
    EAGER: lambda: None,
    UNTIMED: lambda: CUDAGraphCallback(timings=None),
    DEFAULT: CUDAGraphCallback,
}
_WIDTH, _CLASSES, _BATCH_SIZE = (512, 10, 256) if ON_GPU else (8, 3, 4)
_ITEM_EVERY = 50


class Mlp(pl.LightningModule):
    """Four layers, with a logged loss."""

    shown = False

    def __init__(self) -> None:
        super().__init__()
        widths = [_WIDTH] * 4 + [_CLASSES]
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        # None after the last one: logits of zero would give each step the same loss.
        between = [part for layer in layers[:-1] for part in (layer, nn.ReLU())]
        self.net = nn.Sequential(*between, layers[-1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        logits = self.net(inputs)
        loss = nn.functional.cross_entropy(logits, classes)
        self.log("loss", loss, prog_bar=self.shown)
        self.measure(logits, classes)
        return loss

    def measure(self, logits: Tensor, classes: Tensor) -> None:
        """Update metrics."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Shown(Mlp):
    """The loss is in the progress bar."""

    shown = True


class WithHook(Mlp):
    """An empty hook after the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Averaged(Mlp):
    """A moving average of the weights, by one foreach op."""

    def on_train_start(self) -> None:
        self.averages = [parameter.detach().clone() for parameter in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch._foreach_lerp_(self.averages, [*self.parameters()], 0.001)


class Keeping(Mlp):
    """Keeps the loss of each step on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.latest = outputs["loss"]
        self.losses.append(self.latest)


class Accurate(Mlp):
    """A torchmetrics accuracy, logged as an object."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(_CLASSES)

    def measure(self, logits: Tensor, classes: Tensor) -> None:
        self.accuracy(logits, classes)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)


class OneHook(Callback):
    """An empty hook after the step."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class TwoHooks(OneHook):
    """Empty hooks before and after the step."""

    def on_train_batch_start(self, *args: Any) -> None:
        pass


class ReadsLoss(Callback):
    """Reads the loss in one step of some."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % _ITEM_EVERY == 0:
            self.loss = outputs["loss"].item()


@dataclass(frozen=True)
class Surrounding:
    """Surroundings of the steps of a fit: callbacks, hooks, metrics.

    Attributes:
        build: makes the module.
        callbacks: make the callbacks.
        default: progress bar, checkpoints and `TensorBoardLogger` are on, as in a Trainer without
            arguments.
        tensorboard: `TensorBoardLogger` is on.
    """

    build: Callable[[], Mlp] = Mlp
    callbacks: tuple[Callable[[], Callback], ...] = ()
    default: bool = False
    tensorboard: bool = False


SURROUNDINGS = {
    NOTHING: Surrounding(),
    "default Trainer: bar, checkpoints": Surrounding(default=True),
    "the same, loss in the bar": Surrounding(Shown, default=True),
    "`LearningRateMonitor`, `ModelCheckpoint`, no bar": Surrounding(
        callbacks=(LearningRateMonitor, ModelCheckpoint), tensorboard=True
    ),
    "a callback with an empty hook": Surrounding(callbacks=(OneHook,)),
    "the same, two hooks": Surrounding(callbacks=(TwoHooks,)),
    f"a callback, `.item()` every {_ITEM_EVERY} steps": Surrounding(callbacks=(ReadsLoss,)),
    "`on_train_batch_end` of the module, empty": Surrounding(WithHook),
    "a moving average in that hook": Surrounding(Averaged),
    "the loss kept in that hook": Surrounding(Keeping),
    "`EMAWeightAveraging`": Surrounding(callbacks=(EMAWeightAveraging,)),
    "an accuracy of torchmetrics": Surrounding(Accurate),
}


class BarTime:
    """The mean time that a progress bar spends in its hook after each step."""

    def __init__(self) -> None:
        self._calls, self._taken_s = 0, 0.0

    @property
    def step_us(self) -> float:
        return self._taken_s / max(1, self._calls) * 1e6

    def watch(self, bar: TQDMProgressBar) -> None:
        """Measure a bar from now on."""
        hook = bar.on_train_batch_end

        def timed(*args: Any) -> None:
            began_s = time.perf_counter()
            hook(*args)
            self._taken_s += time.perf_counter() - began_s
            self._calls += 1

        bar.on_train_batch_end = timed  # type: ignore[method-assign]


def fit(
    around: Surrounding,
    make_callback: Callable[[], CUDAGraphCallback | None],
    batches: BlockedBatches,
    bar_time: BarTime | None = None,
) -> None:
    """Train on the batches, to their end.

    Args:
        around: the surroundings of the steps.
        make_callback: makes the callback, or returns None.
        batches: the loader.
        bar_time: measures the progress bar, if there is one; for eager fits, because the callback would
            take the measured hook for one of the user's.

    Raises:
        RuntimeError: if steps were not replayed.
    """
    ours = make_callback()
    callbacks: list[Callback] = [make() for make in around.callbacks]
    callbacks += [] if ours is None else [ours]
    if around.default:
        # By default it is that of Rich where that is installed, which draws one bar at a time.
        bar = TQDMProgressBar()
        if bar_time is not None:
            bar_time.watch(bar)
        callbacks.append(bar)
    keeps = around.default or ModelCheckpoint in around.callbacks
    with quiet_trainer(
        callbacks,
        around.default or around.tensorboard,
        enable_progress_bar=around.default,
        enable_checkpointing=keeps,
    ) as trainer:
        trainer.fit(around.build(), batches)
    counts = ours.summary.fit if ours is not None else None
    if counts is not None and counts.replayed + counts.warmed_up != len(batches):
        raise RuntimeError(f"Not all steps were replayed:\n{ours and ours.summary}")


def batch() -> Any:
    """A batch of the MLP."""
    return pinned([torch.randn(_BATCH_SIZE, _WIDTH), torch.randint(_CLASSES, (_BATCH_SIZE,))])


def measure(
    names: Sequence[str], blocks: Blocks
) -> tuple[dict[str, dict[str, Measured]], dict[str, BarTime]]:
    """Run the fits of some surroundings in turn.

    Returns:
        The times by surrounding and way, and those of progress bars by surrounding.
    """
    bars = {name: BarTime() for name in names if SURROUNDINGS[name].default}
    fits: dict[str, Callable[[BlockedBatches], None]] = {
        f"{name}: {way}": partial(
            fit, SURROUNDINGS[name], make, bar_time=bars.get(name) if way == EAGER else None
        )
        for name in names
        for way, make in WAYS.items()
    }
    measured = silent_fits_in_turn(fits, batch, blocks)
    return {name: {way: measured[f"{name}: {way}"] for way in WAYS} for name in names}, bars


def table(measured: dict[str, dict[str, Measured]]) -> list[str]:
    """The table in Markdown: medians with quartiles, and medians of the ratios in each round."""
    lines = [
        f"| around the step | {' | '.join(WAYS)} | {UNTIMED} ÷ {NOTHING} | {DEFAULT} ÷ {UNTIMED} |",
        f"|{'---|' * (len(WAYS) + 3)}",
    ]
    first = measured[NOTHING][UNTIMED]
    for name, ways in measured.items():
        cells = [name, *map(_with_spread, ways.values())]
        for ratio, *spread in (ways[UNTIMED].ratio_to(first), ways[DEFAULT].ratio_to(ways[UNTIMED])):
            cells.append(f"{ratio:.2f} ({' to '.join(f'{end:.2f}' for end in spread)})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lines_of_bars(measured: dict[str, dict[str, Measured]], bars: dict[str, BarTime]) -> list[str]:
    """A line for each progress bar: its time, and the step time without it beside the first row's."""
    first_us = measured[NOTHING][UNTIMED].median_us
    return [
        f"{name}: the bar takes {bar.step_us:.0f} of {measured[name][UNTIMED].median_us:.0f} µs;"
        f" without it {(measured[name][UNTIMED].median_us - bar.step_us) / first_us:.2f} of {NOTHING}"
        for name, bar in bars.items()
    ]


def _with_spread(times: Measured) -> str:
    low_us, high_us = times.spread_us
    return f"{times.median_us:.0f} ({low_us:.0f} to {high_us:.0f})"


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.surroundings", description=__doc__)
    parser.add_argument("--steps", type=int, default=100 if ON_GPU else 5, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5 if ON_GPU else 2, help="blocks of a fit")
    parser.add_argument("--only", nargs="*", choices=SURROUNDINGS, default=[*SURROUNDINGS])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    blocks = Blocks(warm_steps=280 if ON_GPU else 8, lead_steps=5, steps=args.steps, rounds=args.rounds)
    described = environment()
    print(", ".join(f"{key} {value}" for key, value in described.items()))
    print(f"µs per step, {args.rounds} blocks of {args.steps} steps each\n", flush=True)
    measured, bars = measure(list(dict.fromkeys([NOTHING, *args.only])), blocks)
    print("\n".join([*table(measured), "", *lines_of_bars(measured, bars)]))
    if args.json:
        rows = {
            name: {way: times.step_us for way, times in ways.items()} for name, ways in measured.items()
        }
        args.json.write_text(json.dumps({**described, "steps": args.steps, "rows": rows}))


if __name__ == "__main__":
    main()
