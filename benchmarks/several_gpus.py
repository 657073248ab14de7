"""Step time on several GPUs: eager, by hand, with the callback, and with the callback without timings.

All fits of a model are in one group of processes, in turn, with `self.log` and TensorBoardLogger; every
process has its own batches. A loop by hand, with the step and its all-reduces in one graph, has no
Trainer and no logs. Each round ends with the callback without timings on one GPU, in a process without a
group. A step time is the median of blocks of steps. Rank 0 prints for each way the median, minimum and
maximum over the rounds, and the speedup over the first way, taken round by round.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.several_gpus

The strategy is DDP; with `--sharded`, `fully_shard` is called on each member of the module's outermost
lists and sequences of layers, and on the module itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.by_hand import GraphedByHand
from benchmarks.fits import ON_GPU, environment, pinned
from benchmarks.models import MODELS, Workload
from benchmarks.stopwatch import BLOCK_STEPS, WARM_STEPS, Blockwise, Stopwatch
from benchmarks.trainers import trainer_for
from lightning_cudagraph import CUDAGraphCallback

# Arguments of DDP (docs/several_gpus.md#buckets).
SMALL_BUCKETS = {"bucket_cap_mb": 5, "gradient_as_bucket_view": True}


@dataclass(frozen=True)
class Variant:
    """One way to train: the callbacks, and arguments of DDP."""

    callbacks: Callable[[], list[Callback]]
    of_ddp: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    "eager": Variant(list),
    "eager, small buckets": Variant(list, SMALL_BUCKETS),
    "callback": Variant(lambda: [CUDAGraphCallback()]),
    "callback, no timings": Variant(lambda: [CUDAGraphCallback(timings=None)]),
    "one stream, no timings": Variant(lambda: [CUDAGraphCallback(timings=None, streams=1)]),
    "callback, small buckets": Variant(lambda: [CUDAGraphCallback()], SMALL_BUCKETS),
    "no timings, small buckets": Variant(lambda: [CUDAGraphCallback(timings=None)], SMALL_BUCKETS),
}
# On GPUs, after a fit in the Trainer, which makes the process group.
OTHERS = ("by hand", "by hand, small buckets", "one GPU, no timings")
# DDP looks at its buckets in the tenth step, and a capture comes after it.
_WARM_UP_STEPS = 11
# More would only take memory of the host.
DIFFERENT_BATCHES = 8


def _batches(workload: Workload, steps: int, tiny: bool) -> DataLoader[Any]:
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    batches = [workload.batch(tiny) for _ in range(DIFFERENT_BATCHES)]
    batches = pinned(batches)
    every: Any = [batches[index % DIFFERENT_BATCHES] for index in range(steps)]
    return DataLoader(every, batch_size=None)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists and sequences of a module."""
    for child in module.children():
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
        yield from child.children() if is_list else _layers(child)


def _sharded(module: pl.LightningModule) -> pl.LightningModule:
    """Let a module split its weights between the processes, when it is set up."""

    def configure_model() -> None:
        mesh = module.device_mesh["data_parallel"]
        for layer in _layers(module):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)

    module.configure_model = configure_model  # type: ignore[method-assign]
    return module


def step_us(
    workload: Workload, variant: Variant, steps: int, tiny: bool, sharded: bool = False
) -> float:
    """Step time in microseconds, without the first steps.

    Args:
        workload: the model.
        variant: the callbacks, and the arguments of DDP unless weights are sharded.
        steps: number of all steps.
        tiny: the model in its tiny size.
        sharded: weights are sharded over the processes.

    Raises:
        RuntimeError: if steps were not replayed.
    """
    size = int(os.environ["WORLD_SIZE"])
    loader = _batches(workload, steps, tiny)
    pl.seed_everything(1, verbose=False)
    stopwatch, callbacks = Stopwatch(), variant.callbacks()
    in_group = {
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        "num_nodes": size // int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        "strategy": ModelParallelStrategy(size, 1) if sharded else DDPStrategy(**variant.of_ddp),
        "use_distributed_sampler": False,
        "max_epochs": None,
        "max_steps": steps,
        "limit_val_batches": 0,
    }
    with trainer_for(workload, [stopwatch, *callbacks], **in_group) as trainer:
        module = workload.make(tiny)
        trainer.fit(_sharded(module) if sharded else module, loader)
    for callback in callbacks:
        assert isinstance(callback, CUDAGraphCallback)
        counts = callback.summary.fit
        if counts.captures != 1 or counts.replayed + counts.warmed_up != steps:
            raise RuntimeError(f"Not all steps were replayed from one capture:\n{callback.summary}")
        if trainer.is_global_zero:
            notes = [line for line in str(callback.summary).splitlines() if "captured on" in line]
            print(*notes, sep="\n", flush=True)
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return stopwatch.step_us


class _Loss(nn.Module):
    """The loss of a batch, for `DistributedDataParallel`."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)


def step_by_hand_us(workload: Workload, of_ddp: Mapping[str, Any], steps: int, tiny: bool) -> float:
    """Step time in microseconds of a loop by hand, in the process group that is there."""
    loader = _batches(workload, steps, tiny)
    torch.manual_seed(1)
    loop = GraphedByHand(workload, tiny)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # a wrapper made on the default stream cannot be captured
        loop.loss = DistributedDataParallel(
            _Loss(loop.module), device_ids=[torch.cuda.current_device()], **of_ddp
        )
    stream.synchronize()
    blocks = Blockwise()
    for index, batch in enumerate(loader):
        blocks.begin_step(index)
        if index < _WARM_UP_STEPS:
            loop.warm_up(batch)
            continue
        if index == _WARM_UP_STEPS:
            loop.capture()
        loop.train_step(batch)
    blocks.begin_step(steps)
    return blocks.step_us


def _alone_us(workload: Workload, steps: int, tiny: bool) -> float:
    """The step time in a process that knows of no group, for the first process."""
    if int(os.environ["RANK"]) != 0:
        dist.barrier()
        return float("nan")
    of_group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_")
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*of_group, "TORCHELASTIC"))
    }
    how = ["--models", workload.name, "--steps", str(steps), *(["--tiny"] if tiny else [])]
    command = [sys.executable, "-m", "benchmarks.several_gpus", "--only-alone", *how]
    done = subprocess.run(command, env=plain, stdout=subprocess.PIPE, text=True, check=True)
    dist.barrier()
    return float(done.stdout.split()[-1])


def _step_alone_us(workload: Workload, steps: int, tiny: bool) -> float:
    stopwatch, callback = Stopwatch(), CUDAGraphCallback(timings=None)
    how = {"max_epochs": None, "max_steps": steps, "limit_val_batches": 0}
    pl.seed_everything(1, verbose=False)
    with trainer_for(workload, [stopwatch, callback], **how) as trainer:
        trainer.fit(workload.make(tiny), _batches(workload, steps, tiny))
    return stopwatch.step_us


def _ways(args: argparse.Namespace) -> dict[str, Callable[[Workload], float]]:
    """The ways to train that were asked for, in their order in a round."""
    how = {"steps": args.steps, "tiny": args.tiny}
    ways: dict[str, Callable[[Workload], float]] = {
        name: partial(step_us, variant=variant, sharded=args.sharded, **how)
        for name, variant in VARIANTS.items()
        if not (args.sharded and variant.of_ddp)
    }
    if ON_GPU and not args.sharded:
        by_hand, small, alone = OTHERS
        ways[by_hand] = partial(step_by_hand_us, of_ddp={}, **how)
        ways[small] = partial(step_by_hand_us, of_ddp=SMALL_BUCKETS, **how)
        ways[alone] = partial(_alone_us, **how)
    return {name: way for name, way in ways.items() if name in (args.rows or ways)}


def main() -> None:
    names = [workload.name for workload in MODELS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=names, default=["GPT"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sharded", action="store_true", help="split weights between the processes")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check that all runs")
    parser.add_argument("--rows", nargs="*", choices=(*VARIANTS, *OTHERS), help="these alone")
    parser.add_argument("--only-alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if args.rows and set(args.rows) <= set(OTHERS):
        parser.error("--rows: expected one in the Trainer too, which makes the process group")
    if args.steps < WARM_STEPS + BLOCK_STEPS:
        least = f"{WARM_STEPS}, which are not timed, and a block of {BLOCK_STEPS}"
        parser.error(f"--steps: expected at least {least}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for workload in MODELS:
        if workload.name not in args.models:
            continue
        if args.only_alone:
            print(_step_alone_us(workload, args.steps, args.tiny))
            continue
        if not workload.is_here:
            print(f"{workload.name} is left out: it needs {workload.needs}")
            continue
        ways = _ways(args)
        times_us: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                times_us[name].append(way(workload))
                if int(os.environ["RANK"]) == 0:
                    print(f"{workload.name}, {name}: {times_us[name][-1]:.0f} us", flush=True)
        if int(os.environ["RANK"]) != 0:
            continue
        first = next(iter(times_us.values()))
        for name, times in times_us.items():
            faster = [eager / time for eager, time in zip(first, times, strict=True)]
            print(
                f"{workload.name:10s} {name:26s} {statistics.median(times):8.0f} us"
                f" ({min(times):.0f} to {max(times):.0f}), {statistics.median(faster):5.2f} x as fast"
                f" ({min(faster):.2f} to {max(faster):.2f})",
                flush=True,
            )
            rows.append({"model": workload.name, "variant": name, "step_us": times})
    if args.json and int(os.environ["RANK"]) == 0:
        how = {"gpus": int(os.environ["WORLD_SIZE"]), "steps": args.steps, "sharded": args.sharded}
        found = {**environment(), **how}
        args.json.write_text(json.dumps({**found, "rows": rows}))


if __name__ == "__main__":
    main()
