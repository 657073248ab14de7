"""Callbacks that average and prune weights beside ours: the same as without ours, bit for bit.

`tests/gpu/test_rows_weights.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, Trace, assert_same, differences, make, train
from tests.rows import became, refused, row

RAGGED = "another batch signature"


class Steady(Net):
    """Without a schedule: averaging of weights brings its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class WithoutNorm(Steady):
    def __init__(self) -> None:
        super().__init__()
        del self.features[1]


def swa(**kwargs: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {
        "callbacks": (StochasticWeightAveraging(swa_lrs=1e-2, **kwargs),),
        "max_epochs": 5,
    }


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("annealing", ["cos", "linear"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_swa(tmp_path: Path, accelerator: str, annealing: str, precision: str, watched: bool) -> None:
    setting = swa(swa_epoch_start=2, annealing_epochs=2, annealing_strategy=annealing)
    done = row(tmp_path, accelerator, WithoutNorm, setting, watched=watched, precision=precision)
    became(done.graph, replayed=32, eager={RAGGED: 5})


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_swa_with_batch_norm(tmp_path: Path, accelerator: str, accumulate: int, watched: bool) -> None:
    """One more epoch at the end only updates the statistics, in buffers that are new."""
    setting = swa(swa_epoch_start=0.4)
    done = row(
        tmp_path, accelerator, Steady, setting, watched=watched, accumulate_grad_batches=accumulate
    )
    counts = done.graph.counts
    assert counts.replayed == {1: 32, 3: 26}[accumulate]
    assert not counts.recaptures
    # All eight batches of that epoch; every batch is counted once.
    assert sum(n for reason, n in counts.eager.items() if "StochasticWeightAveraging" in reason) == 8
    assert counts.warmed_up + counts.replayed + sum(counts.eager.values()) == 48
    assert not differences(
        done.plain.module.state_dict(),  # type: ignore[union-attr]
        done.graph.module.state_dict(),  # type: ignore[union-attr]
    )


AVERAGES: dict[str, Callable[[], Any]] = {
    "mean": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "EMA-without-buffers": lambda: EMAWeightAveraging(decay=0.9, use_buffers=False),
    "EMA-seldom": lambda: EMAWeightAveraging(update_every_n_steps=3, update_starting_at_step=5),
}


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    # The averages take the place of the weights in validation, here also between two replays.
    done = row(
        tmp_path,
        accelerator,
        setting=lambda folder: {"callbacks": (AVERAGES[name](),)},
        watched=watched,
        val_check_interval=3,
    )
    became(done.graph, replayed=18, eager={RAGGED: 3})
    assert "averaging_state" in done.graph.checkpoints["last.ckpt"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("name", ["EMA", "SWA"])
def test_averages_resumed(tmp_path: Path, accelerator: str, name: str) -> None:
    def callbacks() -> tuple[Any, ...]:
        if name == "EMA":
            return (EMAWeightAveraging(decay=0.9),)
        return (StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2),)

    def run(folder: str, ours: CUDAGraphCallback | None, **kwargs: Any) -> Trace:
        kwargs |= {"accelerator": accelerator, "checkpoint_every": 8, "max_epochs": 5}
        return train(make(Steady), tmp_path / folder, ours, callbacks=callbacks(), **kwargs)

    first = run("first", CUDAGraphCallback())
    middle = str(next((tmp_path / "first" / "ckpt").glob("*step=24.ckpt")))
    plain = run("plain", None, ckpt_path=middle)
    graph = run("graph", CUDAGraphCallback(), ckpt_path=middle)
    assert_same(plain, graph)
    assert first.counts.replayed == 32
    assert graph.counts.replayed == 11


def pruning(**kwargs: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {
        "callbacks": (ModelPruning("l1_unstructured", amount=0.2, **kwargs),),
        "max_epochs": 4,
    }


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_pruning(tmp_path: Path, accelerator: str, watched: bool) -> None:
    match = "sets or changes `weight` of `features.0`"
    done = refused(tmp_path, accelerator, Steady, pruning(), match=match, watched=watched)
    (reason,) = [part for part in done.graph.counts.eager if "`weight`" in part]
    assert (done.graph.counts.replayed, done.graph.counts.eager[reason]) == (4, 21)


def everything(folder: Path) -> dict[str, Any]:
    return {
        "callbacks": (
            EMAWeightAveraging(decay=0.9),
            GradientAccumulationScheduler({0: 1, 2: 2}),
            LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
            EarlyStopping("val_loss", patience=20),
            ModelCheckpoint(folder / "more", monitor="val_loss", save_top_k=2, save_last=True),
        ),
        "max_epochs": 5,
        "val_check_interval": 4,
        "gradient_clip_val": 0.5,
    }


@pytest.mark.parametrize("position", [0, 3, -1])
def test_many_together(tmp_path: Path, accelerator: str, position: int) -> None:
    """In whichever place among the others ours stands."""
    done = row(tmp_path, accelerator, Steady, everything, position=position)
    became(
        done.graph,
        replayed=26,
        captures=3,
        because=["`accumulate_grad_batches` of the trainer changed from 1 to 2"],
        eager={RAGGED: 5},
    )


def test_copies_of_a_module_that_is_trained(tmp_path: Path, accelerator: str) -> None:
    """What SWA and EMA do when they start works in the middle of a run too."""

    class Copied(Steady):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step in (2, 12):
                twin = copy.deepcopy(self)
                with torch.no_grad():
                    for mine, its in zip(self.parameters(), twin.parameters(), strict=True):
                        mine.copy_(its * 0.5)

    done = row(tmp_path, accelerator, Copied)
    became(done.graph, replayed=18, eager={RAGGED: 3})
