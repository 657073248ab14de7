"""Plain Lightning and the callback in turn, on one model: step times, replayed share and equality."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.fits import ON_GPU, BlockedBatches, Blocks, Measured, environment, silent_fits_in_turn
from benchmarks.trainers import quiet_trainer
from lightning_cudagraph import Buckets, CUDAGraphCallback, StageSummary

__all__ = ["HEAD", "Fit", "Row", "line", "main", "measure", "train"]

HEAD = ("| model | plain, µs | callback, µs | callback ÷ plain | replayed | state |", f"|{'---|' * 6}")


@dataclass(frozen=True)
class Row:
    """A model and its batches.

    Attributes:
        make: builds the module.
        batches: returns a function that makes the next batch.
        ready_batches: number of distinct batches.
        buckets: what the callback pads batches to.
        arguments: of the Trainer.
        callback: arguments of the callback.
        in_one_thread: autograd uses one thread in both fits. With several, two plain fits with gradients
            of gradients can differ in the last bits (docs/same_numbers.md).
    """

    make: Callable[[], pl.LightningModule]
    batches: Callable[[], Callable[[], Any]]
    ready_batches: int
    buckets: Buckets | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    callback: dict[str, Any] = field(default_factory=dict)
    in_one_thread: bool = False


@dataclass
class Fit(Measured):
    """The times of one fit, and what it left.

    Attributes:
        left: the final state of module and optimizers, on the host, with the count of optimizer steps.
        summary: the counts of its steps.
    """

    left: list[Tensor] = field(default_factory=list)
    summary: StageSummary = field(default_factory=StageSummary)


def train(row: Row, has_graphs: bool, batches: Iterable[Any]) -> tuple[list[Tensor], StageSummary]:
    """Train on the batches, to their end.

    Returns:
        The `left` and the `summary` of a `Fit`.
    """
    # Switched off, it pads and does nothing else.
    backend: Any = "auto" if has_graphs else "off"
    ours = CUDAGraphCallback(timings=None, pad_to=row.buckets, backend=backend, **row.callback)
    module = row.make()
    one_thread = torch.autograd.set_multithreading_enabled(not row.in_one_thread)
    with one_thread, quiet_trainer([ours], **row.arguments) as trainer:
        trainer.fit(module, batches)
        states = [module.state_dict(), *(optimizer.state_dict() for optimizer in trainer.optimizers)]
    left = [leaf.detach().cpu() for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]
    return [*left, torch.tensor(trainer.global_step)], ours.summary.fit


def measure(row: Row, blocks: Blocks) -> tuple[Fit, Fit]:
    """Run a fit of plain Lightning and one with the callback in turn."""
    left: dict[str, tuple[list[Tensor], StageSummary]] = {}

    def fit(name: str, batches: BlockedBatches) -> None:
        left[name] = train(row, name == "graph", batches)

    names = ("plain", "graph")
    fits: dict[str, Callable[[BlockedBatches], None]] = {name: partial(fit, name) for name in names}
    measured = silent_fits_in_turn(fits, row.batches(), blocks, ready_batches=row.ready_batches)
    plain, graph = (
        Fit(measured[name].step_us, measured[name].begin_s, None, *left[name]) for name in names
    )
    return plain, graph


def line(name: str, plain: Fit, graph: Fit, goal: float) -> str:
    """A line of the table: medians, the median of the ratios in each round with quartiles, equality.

    Args:
        name: of the row.
        plain: plain Lightning.
        graph: the callback.
        goal: the most that the callback may take, as a share of plain Lightning's time.
    """
    ratio, low, high = graph.ratio_to(plain)
    missed = "" if ratio <= goal else f", goal {goal}"
    is_equal = len(plain.left) == len(graph.left) and all(map(torch.equal, plain.left, graph.left))
    cells = [name, *(f"{fit.median_us:.0f}" for fit in (plain, graph))]
    cells += [f"{ratio:.3f} ({low:.3f} to {high:.3f}{missed})", f"{graph.summary.replayed_share:.0%}"]
    return f"| {' | '.join(cells)} | {'equal' if is_equal else 'DIFFERENT'} |"


def main(
    name: str,
    description: str | None,
    rows: dict[str, Row],
    goal: float,
    warm_steps: int,
    given: Sequence[str] | None,
) -> None:
    """Measure the rows that the command line asks for, and print their table.

    Args:
        name: of the benchmark's module.
        description: for `--help`.
        rows: by name.
        goal: see `line`.
        warm_steps: steps before the first timed block, in which all graphs are captured.
        given: the command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--steps", type=int, default=60 if ON_GPU else 5, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5 if ON_GPU else 2, help="blocks of a fit")
    parser.add_argument("--row", default="", help="measure the rows with this in their names")
    args = parser.parse_args(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print(f"µs per step, {args.rounds} blocks of {args.steps} steps\n")
    blocks = Blocks(warm_steps, lead_steps=5, steps=args.steps, rounds=args.rounds)
    print("\n".join(HEAD))
    for key, row in rows.items():
        if args.row in key:
            print(line(key, *measure(row, blocks), goal), flush=True)
