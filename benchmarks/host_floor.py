"""What a step costs on the host where its graph is next to nothing, by number of logged values.

An `nn.Linear(8, 1)` with 0, 1, 3 and 10 values logged in every step, with and without progress bar and
TensorBoardLogger, in the plain Trainer and with the callback; then two small critics of reinforcement
learning beside their own hand-written graph loop. All in one process, in turn; median of rounds. No hook
is used for the timing: the loader, whose batches lie ready in memory, looks at the clock.

    python -m benchmarks.host_floor

Without a GPU it runs on the emulator, in small, to see that it runs: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.logged_step import LoggedStep
from lightning_cudagraph.logs import Logs

# Warm-up, capture, verified replays, and some for the allocator to settle.
WARM_STEPS = 40
ON_GPU = torch.cuda.is_available()
LOGGED_VALUES = (0, 1, 3, 10)
CALLBACKS: dict[str, Callable[[], CUDAGraphCallback | None]] = {
    "plain": lambda: None,
    "callback": CUDAGraphCallback,
    "callback, no timings": lambda: CUDAGraphCallback(timings=None),
}


@dataclass(frozen=True)
class Surroundings:
    """What else the Trainer does in every step.

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
    """One layer, and as many logged values as are asked for.

    Args:
        values: how many values each step logs.
        shown: whether the first is shown in the progress bar.
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


class Critics(pl.LightningModule):
    """Two critics, 24 to 256 to 256 to 1, and one logged value."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleList(
            nn.Sequential(
                nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
            )
            for _ in range(2)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        observation, target = batch
        one, other = (nn.functional.mse_loss(critic(observation), target) for critic in self.critics)
        return one + other

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class TimedBatches:
    """Batches that lie ready, and the wall time of the steps after `WARM_STEPS`.

    Args:
        make: makes one batch.
        steps: how many steps are timed.
    """

    def __init__(self, make: Callable[[], Any], steps: int) -> None:
        self._batches = [make() for _ in range(16)]
        self._steps = steps
        self._marks_s: list[float] = []

    def __len__(self) -> int:
        return WARM_STEPS + self._steps + 1

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            if index in (WARM_STEPS, WARM_STEPS + self._steps):
                if ON_GPU:
                    torch.cuda.synchronize()
                self._marks_s.append(time.perf_counter())
            yield self._batches[index % len(self._batches)]

    @property
    def step_us(self) -> float:
        """Microseconds of a step, the device idle at both ends."""
        started_s, ended_s = self._marks_s
        return (ended_s - started_s) / self._steps * 1e6


def _random(*shape: int) -> Tensor:
    values = torch.randn(*shape)
    return values.pin_memory() if ON_GPU else values


def _line_batch() -> Tensor:
    return _random(8, 8)


def _critics_batch() -> tuple[Tensor, Tensor]:
    return _random(256, 24), _random(256, 1)


def fit_us(
    module: pl.LightningModule,
    batches: TimedBatches,
    around: Surroundings,
    callback: CUDAGraphCallback | None,
) -> float:
    """Microseconds of a step in a Trainer."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # The bar is drawn, but not by a terminal.
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        trainer = pl.Trainer(
            accelerator="gpu" if ON_GPU else "cpu",
            devices=1,
            max_epochs=1,
            logger=TensorBoardLogger(folder) if around.tensorboard else False,
            callbacks=[callback] if callback is not None else [],
            enable_progress_bar=around.bar,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, batches)
    if callback is not None:
        assert callback.counts is not None
        assert callback.counts.replayed >= len(batches) - WARM_STEPS, callback.report
    return batches.step_us


def line_us(values: int, around: Surroundings, callback: CUDAGraphCallback | None, steps: int) -> float:
    """Microseconds of a step around next to nothing."""
    pl.seed_everything(1, verbose=False)
    return fit_us(Line(values, around.shown), TimedBatches(_line_batch, steps), around, callback)


def handing_over_us(values: int, steps: int) -> float:
    """Microseconds of host time that one step's values take, before its replay and after it.

    In steps whose values nobody looks at, as all but one in `log_every_n_steps` are.
    """
    times_s: list[float] = []
    before, after = Logs.before_replay, Logs.put_off

    def timed_before(self: Logs, place: Any) -> None:
        started_s = time.perf_counter()
        before(self, place)
        times_s.append(time.perf_counter() - started_s)

    def timed_after(self: Logs, place: Any, logged: LoggedStep) -> None:
        started_s = time.perf_counter()
        after(self, place, logged)
        times_s[-1] += time.perf_counter() - started_s

    Logs.before_replay = timed_before  # type: ignore[method-assign]
    Logs.put_off = timed_after  # type: ignore[method-assign]
    try:
        line_us(values, Surroundings(), CUDAGraphCallback(timings=None), steps)
    finally:
        Logs.before_replay = before  # type: ignore[method-assign]
        Logs.put_off = after  # type: ignore[method-assign]
    return statistics.median(times_s[-steps:]) * 1e6


def critics_us(callback: CUDAGraphCallback | None, steps: int) -> float:
    """Microseconds of a step of the critics in a Trainer."""
    pl.seed_everything(1, verbose=False)
    batches = TimedBatches(_critics_batch, steps)
    return fit_us(Critics(), batches, Surroundings(tensorboard=True), callback)


def critics_by_hand_us(steps: int, copies: bool) -> float:
    """Microseconds of a step of the critics in a loop around one graph, as one would write it by hand.

    Args:
        steps: how many are timed.
        copies: whether every step has a batch of its own; without, these are replays alone.
    """
    pl.seed_everything(1, verbose=False)
    module = Critics().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True, capturable=True)
    static = tuple(part.cuda() for part in _critics_batch())

    def step() -> None:
        loss = module.loss(static)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    batches = TimedBatches(_critics_batch, steps)
    for batch in batches:
        if copies:
            for target, source in zip(static, batch, strict=True):
                target.copy_(source, non_blocking=True)
        graph.replay()
    return batches.step_us


@dataclass
class _Row:
    """One variant, and what its rounds came to.

    Attributes:
        group: what it is compared within.
        values: how many values it logs.
        name: of the variant.
        run: measures it, in microseconds.
        rounds_us: the measurements.
    """

    group: str
    values: int
    name: str
    run: Callable[[], float]
    rounds_us: list[float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)


def rows(steps: int, groups: list[str]) -> list[_Row]:
    """All variants."""
    found = [
        _Row(
            group,
            values,
            name,
            lambda v=values, a=around, c=make: line_us(v, a, c(), steps),  # type: ignore[misc]
            [],
        )
        for group, around in SURROUNDINGS.items()
        for values in LOGGED_VALUES
        if values or not around.shown
        for name, make in CALLBACKS.items()
    ]
    found += [
        _Row("handing over", values, "alone", lambda v=values: handing_over_us(v, steps), [])  # type: ignore[misc]
        for values in LOGGED_VALUES
    ]
    found += [
        _Row("two critics", 1, name, lambda c=make: critics_us(c(), steps), [])  # type: ignore[misc]
        for name, make in CALLBACKS.items()
    ]
    if ON_GPU:
        found += [
            _Row("two critics", 0, "hand-written loop", lambda: critics_by_hand_us(steps, True), []),
            _Row("two critics", 0, "replays alone", lambda: critics_by_hand_us(steps, False), []),
        ]
    return [row for row in found if row.group in groups]


def table(found: list[_Row]) -> str:
    """The medians as a table in Markdown, and the spread of the rounds."""
    lines = ["| around the step | logged values | | µs per step |", "|---|---|---|---|"]
    for row in found:
        spread = f"({min(row.rounds_us):.0f} to {max(row.rounds_us):.0f})"
        lines.append(f"| {row.group} | {row.values} | {row.name} | {row.median_us:.0f} {spread} |")
    return "\n".join(lines)


def main() -> None:
    names = [*SURROUNDINGS, "handing over", "two critics"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400 if ON_GPU else 40)
    parser.add_argument("--rounds", type=int, default=3 if ON_GPU else 1)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="groups of variants")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found = rows(args.steps, args.only)
    for _ in range(args.rounds):
        for row in found:
            row.rounds_us.append(row.run())
    device = torch.cuda.get_device_name() if ON_GPU else "CPU emulator: these figures mean nothing"
    print(f"{device}, torch {torch.__version__}, lightning {pl.__version__}")
    print(f"{args.steps} steps each, median of {args.rounds} round(s)\n")
    print(table(found))
    if args.json:
        numbers = [
            {"group": row.group, "values": row.values, "name": row.name, "step_us": row.rounds_us}
            for row in found
        ]
        args.json.write_text(json.dumps({"device": device, "steps": args.steps, "rows": numbers}))


if __name__ == "__main__":
    main()
