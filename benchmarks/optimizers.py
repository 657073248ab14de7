"""Step times with AdamW in its forms: default, capturable and fused.

The default form keeps its step counters on the host, and the graph reads from a tensor what its Python
computes from them. Capturable AdamW computes the same numbers on the device. In fp16, a step that
overflows must write nothing: fused AdamW reads the flag, and the ops of the other forms take part of
that on themselves. All fits of a model take turns block by block in one
process (`benchmarks/fits.py`), in a Trainer with the callback, four streams and no times of layers.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --models MLP GPT --precisions 16-mixed

Without a GPU, tiny models check that everything runs: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.fits import ON_GPU, BlockedBatches, Blocks, environment, fits_in_turn, pinned
from benchmarks.models import WORKLOADS, Workload
from benchmarks.trainers import trainer_for
from lightning_cudagraph import CUDAGraphCallback

OWN = "own"
MODELS = ("MLP", "GPT", "BERT-base")
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "capturable": {"capturable": True},
    "fused": {"fused": True},
}


def in_form(optimizer: torch.optim.Optimizer, form: str) -> None:
    """Give an AdamW that has not stepped yet one of the forms."""
    flags = {"fused": None, "foreach": None, "capturable": False} | FORMS[form]
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update(flags)
    # `torch.amp.GradScaler` reads it: the fused kernel divides by the scale itself.
    optimizer._step_supports_amp_scaling = form == "fused"  # type: ignore[attr-defined]


def _optimizer_of(configured: Any) -> torch.optim.Optimizer:
    found = configured["optimizer"] if isinstance(configured, dict) else configured
    return found[0][0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def fit(workload: Workload, form: str, batches: BlockedBatches) -> None:
    """Train a model with AdamW in one form.

    Raises:
        RuntimeError: if the optimizer's step was not in the graph.
    """
    module: Any = workload.make(not ON_GPU)
    configure = module.configure_optimizers

    def configured() -> Any:
        made = configure()
        in_form(_optimizer_of(made), form)
        return made

    module.configure_optimizers = configured
    callback = CUDAGraphCallback(timings=None, streams=4 if ON_GPU else 1)
    with trainer_for(workload, [callback]) as trainer:
        trainer.fit(module, batches)
    if "steps eagerly" in str(callback.summary) or not callback.summary.fit.captures:
        raise RuntimeError(f"The optimizer's step is not in the graph:\n{callback.summary}")


def rows(name: str, precision: str | None, blocks: Blocks) -> list[str]:
    """The lines of the table for a model.

    Args:
        name: of the model.
        precision: of the Trainer; None for the model's own.
        blocks: the division of the steps into blocks.
    """
    (workload,) = [each for each in WORKLOADS if each.name == name]
    if precision is not None:  # in fp16, Lightning does not clip for fused optimizers
        workload = replace(workload, precision=precision, clip=None)
    fits: dict[str, Callable[[BlockedBatches], None]] = {
        form: partial(fit, workload, form) for form in FORMS
    }
    with contextlib.redirect_stdout(io.StringIO()):
        measured = fits_in_turn(fits, lambda: pinned(workload.batch(not ON_GPU)), blocks, None)
    lines = []
    base = measured["default"]
    for form, found in measured.items():
        if found.failure is not None:
            raise found.failure
        low, high = found.spread_us
        lines.append(
            f"| {name} | {workload.precision} | {form} | {found.median_us:.0f} ({low:.0f} to {high:.0f})"
            f" | {base.median_us / found.median_us:.3f} |"
        )
    return lines


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--steps", type=int, default=200 if ON_GPU else 3, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=6 if ON_GPU else 2, help="blocks of each fit")
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=[OWN, "16-mixed"] if ON_GPU else [OWN],
        choices=[OWN, "16-mixed"],
        help="of the Trainer; own: the model's",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    blocks = Blocks(40 if ON_GPU else 8, 5, arguments.steps, arguments.rounds)
    print(environment())
    print("| model | precision | AdamW | step, us (quartiles) | default / this |\n|---|---|---|---|---|")
    for name in arguments.models:
        for precision in arguments.precisions:
            print("\n".join(rows(name, None if precision == OWN else precision, blocks)), flush=True)


if __name__ == "__main__":
    main()
