"""Step time of the `char_gpt` example on several GPUs: eager, and with the callback.

All fits are in one group of processes, in turn, with `strategy="ddp"`, clipping and a schedule; every
GPU has its own batch. Rank 0 prints medians over the rounds, and the ratios.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.several_gpus
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from benchmarks.char_gpt import Stopwatch
from examples.char_gpt import CharData, CharGPT
from lightning_cudagraph import CUDAGraphCallback

VARIANTS = {
    "eager": lambda: [],
    "callback": lambda: [CUDAGraphCallback()],
    "callback, no timings": lambda: [CUDAGraphCallback(timings=None)],
}


def step_us(args: argparse.Namespace, callbacks: list[Callback]) -> float:
    """Microseconds of a step, without the first ones."""
    size = int(os.environ["WORLD_SIZE"])
    data = CharData(batch_size=args.batch_size, train_batches=args.steps * size, max_chars=1_000_000)
    data.setup("fit")
    pl.seed_everything(1, verbose=False)
    stopwatch = Stopwatch()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=size,
        strategy="ddp",
        precision="bf16-mixed",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[stopwatch, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(CharGPT(decay_steps=args.steps, sample_chars=0), data.train_dataloader())
    return stopwatch.step_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    times_us: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name, callbacks in VARIANTS.items():
            times_us[name].append(step_us(args, callbacks()))
    if int(os.environ["RANK"]) != 0:
        return
    medians_us = {name: statistics.median(times) for name, times in times_us.items()}
    for name, median_us in medians_us.items():
        low_us, high_us = min(times_us[name]), max(times_us[name])
        faster = medians_us["eager"] / median_us
        print(f"{name:24s} {median_us:8.0f} us ({low_us:.0f} to {high_us:.0f}), {faster:.2f} x as fast")
    if args.json:
        args.json.write_text(json.dumps(times_us))


if __name__ == "__main__":
    main()
