"""Step time of the `char_gpt` example: eager, with the callback, and in a hand-written graph loop.

All in one process, in turn, with the loader, clipping and the learning-rate schedule on; the two
Lightning runs also with `self.log` and TensorBoardLogger. Prints medians over the rounds, their
spread, and the ratios.

    python -m benchmarks.char_gpt
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.fits import synchronize
from examples.char_gpt import CharData, CharGPT
from lightning_cudagraph import CUDAGraphCallback

WARM_STEPS = 60


class Stopwatch(Callback):
    """Wall time of the steps after `WARM_STEPS`, the device idle at both ends."""

    def __init__(self) -> None:
        self.step_us = float("nan")
        self._started_s = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM_STEPS:
            synchronize()
            self._started_s = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        synchronize()
        steps = trainer.global_step - WARM_STEPS
        self.step_us = (time.perf_counter() - self._started_s) / steps * 1e6


def data_module(args: argparse.Namespace) -> CharData:
    data = CharData(batch_size=args.batch_size, train_batches=args.steps, max_chars=1_000_000)
    data.setup("fit")
    return data


def model(args: argparse.Namespace) -> CharGPT:
    pl.seed_everything(1, verbose=False)
    return CharGPT(decay_steps=args.steps, sample_chars=0)


def run_lightning(args: argparse.Namespace, callback: CUDAGraphCallback | None) -> float:
    """Microseconds of a step in a Trainer."""
    stopwatch = Stopwatch()
    callbacks: list[Callback] = [stopwatch] if callback is None else [stopwatch, callback]
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=args.steps,
            gradient_clip_val=1.0,
            logger=TensorBoardLogger(folder),
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            limit_val_batches=0,
        )
        trainer.fit(model(args), data_module(args).train_dataloader())
    return stopwatch.step_us


def run_by_hand(args: argparse.Namespace) -> float:
    """Microseconds of a step in a loop around one graph, as one would write it by hand."""
    net = model(args).cuda()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=torch.tensor(1e-3, device="cuda"),
        betas=(0.9, 0.99),
        fused=True,
        capturable=True,
    )
    lr_factor = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([torch.zeros(1)], lr=1e-3), T_max=args.steps
    )
    loader = data_module(args).train_dataloader()
    x, y = (t.cuda() for t in next(iter(loader)))

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = net._loss((x, y))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

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
    started_s = 0.0
    for index, (host_x, host_y) in enumerate(loader):
        if index == WARM_STEPS:
            torch.cuda.synchronize()
            started_s = time.perf_counter()
        x.copy_(host_x, non_blocking=True)
        y.copy_(host_y, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"].fill_(lr_factor.get_last_lr()[0])
        graph.replay()
        lr_factor.optimizer.step()
        lr_factor.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) / (args.steps - WARM_STEPS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    variants: dict[str, Callable[[], float]] = {
        "eager": lambda: run_lightning(args, None),
        "callback": lambda: run_lightning(args, CUDAGraphCallback()),
        "callback, no timings": lambda: run_lightning(args, CUDAGraphCallback(timings=None)),
        "hand-written loop": lambda: run_by_hand(args),
    }
    times_us: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, run in variants.items():
            times_us[name].append(run())
    by_hand_us = statistics.median(times_us["hand-written loop"])
    eager_us = statistics.median(times_us["eager"])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lightning {pl.__version__}")
    print(f"char_gpt, batch {args.batch_size} x 256, bf16-mixed, median of {args.rounds} rounds")
    for name, values in times_us.items():
        median_us = statistics.median(values)
        print(
            f"{name:<22} {median_us:8.0f} us/step  ({min(values):.0f} to {max(values):.0f})"
            f"  {median_us / by_hand_us:5.3f} x hand-written"
            f"  {eager_us / median_us:5.2f} x as fast as eager"
        )
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "step_us": times_us}))


if __name__ == "__main__":
    main()
