"""Outcomes of every optimizer in a graph, in every precision, with every clipping and schedule.

`outcomes` runs the cells of one form; `tests/test_family.py` compares them with `tests/family.json`,
from which `render` makes the table of docs/same_numbers.md. After an intended change of an outcome::

    python -m tests.family cpu     # or: gpu

writes the outcomes of this machine into the file, and the table into that page.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from tests.harness import differences
from tests.optimizers import CountsInState, Own

O = torch.optim  # noqa: E741

STEPS = 11
WARMUP_STEPS = 3
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
CLIPS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
SCHEDULES = ("constant", "cosine", "OneCycle")
CELLS = tuple(itertools.product(PRECISIONS, CLIPS, SCHEDULES))
# A third of them, in which each two settings meet once: a Latin square.
PAIRED_CELLS = tuple(
    cell for cell in CELLS if sum(map(tuple.index, (PRECISIONS, tuple(CLIPS), SCHEDULES), cell)) % 3 == 0
)

FORMS: dict[str, Callable[[Any], O.Optimizer]] = {
    "Adam": lambda p: O.Adam(p, lr=1e-2),
    "Adam(foreach, amsgrad)": lambda p: O.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "Adam(fused)": lambda p: O.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: O.AdamW(p, lr=1e-2),
    "AdamW(foreach=False, maximize)": lambda p: O.AdamW(p, lr=1e-4, foreach=False, maximize=True),
    "AdamW(fused)": lambda p: O.AdamW(p, lr=1e-2, fused=True),
    "AdamW(fused, amsgrad)": lambda p: O.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "NAdam": lambda p: O.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: O.RAdam(p, lr=1e-2),
    "Adamax": lambda p: O.Adamax(p, lr=1e-2),
    "RMSprop": lambda p: O.RMSprop(p, lr=1e-3),
    "RMSprop(momentum, centered)": lambda p: O.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "RMSprop(foreach=False)": lambda p: O.RMSprop(p, lr=1e-3, weight_decay=0.1, foreach=False),
    "Adadelta": lambda p: O.Adadelta(p, lr=1.0),
    "Adadelta(foreach=False)": lambda p: O.Adadelta(p, lr=1.0, weight_decay=0.1, foreach=False),
    "ASGD": lambda p: O.ASGD(p, lr=1e-2),
    "Rprop": lambda p: O.Rprop(p),
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD(momentum, dampening)": lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD(nesterov, foreach)": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD(foreach=False, maximize)": lambda p: O.SGD(
        p, lr=1e-3, momentum=0.9, weight_decay=0.1, foreach=False, maximize=True
    ),
    "SGD(fused, momentum)": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Muon": lambda p: O.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.01),
    "Adagrad(fused)": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.01, fused=True),
    "Adafactor": lambda p: O.Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: O.LBFGS(p, lr=0.1, max_iter=2),
    "SparseAdam": lambda p: O.SparseAdam(p),
    "custom, all on the device": Own,
    "custom, counts on the host": CountsInState,
}

SAME, SAME_ARITHMETIC, BEHIND, REFUSED, PLAIN_FAILS = "=", "~", "b", "r", "x"
WORDS = {
    SAME: "in the graph, =",
    SAME_ARITHMETIC: "in the graph, ≈",
    BEHIND: "after the replay, =",
    REFUSED: "refused",
    PLAIN_FAILS: "fails without the callback too",
}


class FamilyNet(pl.LightningModule):
    """A small net with dropout; in fp16, gradients of some batches overflow."""

    def __init__(
        self, make_optimizer: Callable[[Any], O.Optimizer], schedule: str, steps: int = STEPS
    ) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.schedule = schedule
        self.steps = steps
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16, bias=False), nn.Linear(16, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, boost = batch
        return nn.functional.cross_entropy(self.net(x), y) * boost.mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.schedule == "constant":
            return optimizer
        scheduler: Any = (
            O.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
            if self.schedule == "cosine"
            else O.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=2 * self.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Watcher(Callback):
    def __init__(self, saved: Path | None = None, save_at: int = 0) -> None:
        self.seen: dict[str, Any] = {"losses": [], "scales": []}
        self.saved = saved
        self.save_at = save_at

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen["losses"].append(outputs["loss"])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.seen["scales"].append(scaler._scale.clone())
        if self.saved is not None and batch_idx + 1 == self.save_at:
            trainer.save_checkpoint(self.saved)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen |= copy.deepcopy(
            {
                "weights": pl_module.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "precision": trainer.precision_plugin.state_dict(),
                "global_step": trainer.global_step,
                "rng": torch.cuda.get_rng_state()
                if pl_module.device.type == "cuda"
                else torch.get_rng_state(),
            }
        )


def _loader(overflowing: bool, steps: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    boost = torch.ones(steps, 4)
    if overflowing:
        boost[[1, 6, 8]] = 1e7
    data = TensorDataset(
        torch.randn(steps * 4, 6, generator=generator),
        torch.randint(0, 3, (steps * 4,), generator=generator),
        boost.flatten(),
    )
    return DataLoader(data, batch_size=4)


def run(
    form: str,
    cell: tuple[str, str, str],
    accelerator: str,
    callback: CUDAGraphCallback | None,
    steps: int = STEPS,
    saved: Path | None = None,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """One fit of a cell.

    Args:
        form: of the optimizer.
        cell: precision, clipping and schedule.
        accelerator: ``"cpu"`` or ``"gpu"``.
        callback: the callback under test, or None.
        steps: number of steps.
        saved: a checkpoint to write in its middle.
        ckpt_path: a checkpoint to resume from.
        kwargs: for the `Trainer`.

    Returns:
        Everything that must not depend on the callback.
    """
    precision, clip, schedule = cell
    watcher = _Watcher(saved, steps // 2)
    plugins = []
    if precision == "16-mixed":
        device = "cuda" if accelerator == "gpu" else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=2)
        plugins = [MixedPrecision("16-mixed", device, scaler)]
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watcher, *([callback] if callback else [])],
        plugins=plugins or None,
        precision=None if plugins else precision,  # type: ignore[arg-type]
        **CLIPS[clip],
        **kwargs,
    )
    pl.seed_everything(5, verbose=False)
    module = FamilyNet(FORMS[form], schedule, steps)
    trainer.fit(module, _loader(precision == "16-mixed", steps), ckpt_path=ckpt_path, weights_only=False)
    if precision == "16-mixed" and form != "LBFGS" and ckpt_path is None:
        scales = torch.stack(watcher.seen["scales"])
        assert (scales[1:] < scales[:-1]).sum() >= 2, f"nothing overflowed: {scales}"
    return watcher.seen


def _run_or_error(*args: Any) -> dict[str, Any] | Exception:
    try:
        return run(*args)
    except (RuntimeError, ValueError, MisconfigurationException) as error:
        return error


def outcome(form: str, cell: tuple[str, str, str], accelerator: str) -> str:
    """Run a cell, and return its outcome."""
    plain = _run_or_error(form, cell, accelerator, None)
    callback = CUDAGraphCallback()
    graph = _run_or_error(form, cell, accelerator, callback)
    if isinstance(graph, UnsupportedError):
        return REFUSED
    if isinstance(plain, Exception) or isinstance(graph, Exception):
        assert repr(plain) == repr(graph), f"{form} {cell}: {plain!r} is not {graph!r}"
        return PLAIN_FAILS
    counts = callback.summary.fit
    assert counts is not None
    # From its sixth step on, RAdam divides by what it has divided by nothing before: another graph.
    assert counts.captures == 1 + (form == "RAdam"), callback.summary
    assert counts.replayed >= 3, callback.summary
    is_plain = not differences(plain, graph)
    if "optimizer steps eagerly" in str(callback.summary):
        assert is_plain, f"{form} {cell}: {differences(plain, graph)[:5]}"
        return BEHIND
    if is_plain:
        return SAME
    never = run(form, cell, accelerator, CUDAGraphCallback(warmup_steps=10**6))
    found = differences(never, graph)
    assert not found, f"{form} {cell}: {found[:5]}"
    return SAME_ARITHMETIC


def outcomes(form: str, accelerator: str, cells: Sequence[tuple[str, str, str]] = CELLS) -> str:
    """The outcomes of some cells of a form, as letters."""
    return "".join(outcome(form, cell, accelerator) for cell in cells)


def quiet() -> None:
    """Silence Lightning's messages about each of a thousand small runs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


PATH = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parent.parent / "docs" / "same_numbers.md"
MARKS = ("<!-- optimizers: written by tests/family.py -->", "<!-- end of optimizers -->")


def render(found: dict[str, str]) -> str:
    """The table of the page."""
    lines = [
        "| optimizer | fp32 | bf16-mixed | 16-mixed | OneCycle, momentum cycling on |",
        "|---|---|---|---|---|",
    ]
    for form, letters in found.items():
        by_cell = list(zip(CELLS, letters, strict=True))
        columns = [
            {letter for (p, _, schedule), letter in by_cell if p == precision and schedule != "OneCycle"}
            for precision in PRECISIONS
        ]
        columns.append({letter for (_, _, schedule), letter in by_cell if schedule == "OneCycle"})
        for column in columns:
            if len(column) > 1:  # Lightning itself does not clip for fused optimizers in mixed precision
                column.discard(PLAIN_FAILS)
        shown = ("; ".join(WORDS[letter] for letter in sorted(column)) for column in columns)
        lines.append(f"| {form} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def shown_table() -> str:
    """The table that the page shows."""
    text = PAGE.read_text()
    return text.split(MARKS[0])[1].split(MARKS[1])[0].strip()


def main(accelerator: str) -> None:
    """Run everything here, and write the outcomes."""
    quiet()
    found = {}
    for form in FORMS:
        found[form] = outcomes(form, accelerator)
        print(form, found[form], flush=True)
    stored = json.loads(PATH.read_text()) if PATH.exists() else {}
    stored[accelerator] = found
    PATH.write_text(json.dumps(stored, indent=1) + "\n")
    text = PAGE.read_text()
    if MARKS[0] in text and "gpu" in stored:
        before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n{render(stored['gpu'])}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
