"""The cost of safety: guards before every replay, and verified replays.

Steps of known models with all checks and without any take turns block by block in one process
(`benchmarks/fits.py`). Guards are timed alone, in microseconds of host time, as a whole and part by
part, for models of equal layers, AdamW fused with two param groups and a schedule. Runs on a GPU if
there is one, else on the CPU, where the figures mean nothing.

    python -m benchmarks.guards
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fits import ON_GPU, BlockedBatches, Blocks, Measured, environment, fits_in_turn, pinned
from benchmarks.models import WORKLOADS, Workload
from benchmarks.trainers import trainer_for
from lightning_cudagraph import (
    CUDAGraphCallback,
    Verification,
)

MODELS = ("GPT", "ResNet-18", "DLRM 4096", "DLRM 128", "MLP")
WARM_STEPS = 10
WIDTH = 16


class _Layer(nn.Module):
    """Four parameters, three modules and a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.scale = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Layers(pl.LightningModule):
    """A stack of layers.

    Args:
        parameters: number of parameters, a multiple of four.
    """

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Layer() for _ in range(parameters // 4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.blocks(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2]},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class _At(Callback):
    """Callback that calls functions after given steps, on an idle device."""

    def __init__(self, functions: dict[int, Callable[[], None]]) -> None:
        self._functions = functions

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in self._functions:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._functions[trainer.global_step]()


def fit(parameters: int, callback: CUDAGraphCallback, functions: dict[int, Callable[[], None]]) -> None:
    """Train up to the last of the steps at which a function is called."""
    pl.seed_everything(1, verbose=False)
    steps = max(functions)
    loader = DataLoader(TensorDataset(torch.randn(8 * steps, WIDTH)), batch_size=8)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps,
        callbacks=[callback, _At(functions)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Layers(parameters), loader)


def _host_us(function: Callable[[], object]) -> float:
    """The minimum of repeated times, because the host does other work too."""
    runs = 200
    return min(timeit.repeat(function, number=runs, repeat=7)) / runs * 1e6


def guards_us(parameters: int) -> dict[str, float]:
    """Host time of the guards of one replay, as a whole and by part."""
    callback = CUDAGraphCallback(timings=None, verify=None)
    times_us: dict[str, float] = {}

    def measure() -> None:
        assert callback._runs.training is not None
        guards = callback._runs.training._run.guards
        objects, walk = guards._structure, guards._walk
        assert objects is not None
        assert walk is not None
        times_us["all"] = _host_us(guards.changed)
        parts: dict[str, Callable[[], object]] = {
            "settings": guards._quick_now,
            "tensors": objects.tensors.have_moved,
            "members": objects.members.changed,
            "classes": objects.classes.changed,
            "modes": objects.modes.versions.changed,
            "Python objects": walk.quick_changes,
        }
        times_us.update({name: _host_us(function) for name, function in parts.items()})

    fit(parameters, callback, {WARM_STEPS: measure})
    return times_us


def step_ms(parameters: int, steps: int, **arguments: Any) -> float:
    """Wall time of a step in a Trainer."""
    at_s: list[float] = []

    def note() -> None:
        at_s.append(time.perf_counter())

    callback = CUDAGraphCallback(timings=None, **arguments)
    fit(parameters, callback, {WARM_STEPS: note, WARM_STEPS + steps: note})
    return (at_s[1] - at_s[0]) / steps * 1e3


class _Unguarded(Callback):
    """Switches the guards of a run off."""

    def __init__(self, callback: CUDAGraphCallback) -> None:
        self._callback = callback

    def on_train_start(self, *args: Any) -> None:
        assert self._callback._runs.training is not None
        guards: Any = self._callback._runs.training._run.guards
        guards.changed = lambda: None


def fit_of_model(workload: Workload, is_checked: bool, streams: int, batches: BlockedBatches) -> None:
    """Train a model with guards and verified replays at their defaults, or without any."""
    if is_checked:
        callbacks: list[Callback] = [CUDAGraphCallback(timings=None, streams=streams)]
    else:
        ours = CUDAGraphCallback(timings=None, streams=streams, verify=None)
        callbacks = [ours, _Unguarded(ours)]
    with trainer_for(workload, callbacks) as trainer:
        trainer.fit(workload.make(not ON_GPU), batches)


def price(name: str, streams: int, blocks: Blocks) -> dict[str, Measured]:
    """Steps of a model with all checks and without any."""
    (workload,) = [each for each in WORKLOADS if each.name == name]
    fits = {
        way: partial(fit_of_model, workload, is_checked, streams)
        for way, is_checked in (("all checks", True), ("none", False))
    }
    with contextlib.redirect_stdout(io.StringIO()):
        measured = fits_in_turn(fits, lambda: pinned(workload.batch(not ON_GPU)), blocks, None)
    for found in measured.values():
        if found.failure is not None:
            raise found.failure
    return measured


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100 if ON_GPU else 3)
    parser.add_argument("--rounds", type=int, default=6 if ON_GPU else 2, help="blocks of each fit")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    # One number for both: each fit would choose its own by a trial.
    parser.add_argument("--streams", type=int, default=4, help="of each capture")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(given)
    for logger in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(environment())
    blocks = Blocks(60 if ON_GPU else 8, 5, args.steps, args.rounds)
    print("| model | all checks, us a step (quartiles) | none | ratio (quartiles of the rounds) |")
    print("|---|---|---|---|")
    prices_us: dict[str, list[float]] = {}
    for name in args.models:
        checked, unchecked = price(name, args.streams, blocks).values()
        ratio, low, high = checked.ratio_to(unchecked)
        prices_us[name] = [checked.median_us, unchecked.median_us]
        cells = [
            f"{each.median_us:.0f} ({each.spread_us[0]:.0f} to {each.spread_us[1]:.0f})"
            for each in (checked, unchecked)
        ]
        print(f"| {name} | {' | '.join(cells)} | {ratio:.3f} ({low:.3f} to {high:.3f}) |", flush=True)
    guards = {count: guards_us(count) for count in (20, 200, 1000)}
    for count, times_us in guards.items():
        parts = ", ".join(f"{part} {value:.1f}" for part, value in times_us.items())
        print(f"guards, {count} parameters, us per replay: {parts}")
    steps = {
        "eager": step_ms(200, args.steps, backend="off"),
        "replay": step_ms(200, args.steps, verify=None),
        "verified replay": step_ms(200, args.steps, verify=Verification(replays=0, every_n_steps=1)),
    }
    print("step, 200 parameters, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in steps.items()))
    if args.json:
        found = {"environment": environment(), "prices_us": prices_us}
        args.json.write_text(json.dumps({**found, "guards_us": guards, "step_ms": steps}))


if __name__ == "__main__":
    main()
