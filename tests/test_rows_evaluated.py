"""Callbacks beside ours where validation is captured too: the same as without ours, bit for bit.

`tests/gpu/test_rows_evaluated.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, loader
from tests.rows import row


class Tuned(Net):
    """With a learning rate that can be searched for, and a backbone that can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2
        self.backbone = self.features

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class HeadFirst(Tuned):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=self.lr, fused=True)


def one(make_callback: Callable[[], Any], **kwargs: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"callbacks": (make_callback(),), **kwargs}


SETTINGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "EMA": one(lambda: EMAWeightAveraging(decay=0.9), val_check_interval=3),
    "SWA": one(lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2), max_epochs=4),
    "pruning": one(lambda: ModelPruning("l1_unstructured", amount=0.2), max_epochs=4),
    "pruning-after-validation": one(
        lambda: ModelPruning("l1_unstructured", amount=0.2, prune_on_train_epoch_end=False),
        max_epochs=4,
    ),
    "finetuning": one(lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1), max_epochs=4),
    "accumulation": one(lambda: GradientAccumulationScheduler({0: 1, 2: 2}), max_epochs=4),
    "search": one(lambda: LearningRateFinder(num_training_steps=20, early_stop_threshold=None)),
    "stopping": one(lambda: EarlyStopping("val_loss", patience=2), val_check_interval=4),
    "saving": lambda folder: {
        "callbacks": (ModelCheckpoint(folder / "more", monitor="val_loss", save_top_k=2),)
    },
    "simple profiler": lambda folder: {"profiler": "simple"},
    "advanced profiler": lambda folder: {"profiler": "advanced"},
}


@pytest.mark.long
@pytest.mark.spread(3)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", SETTINGS)
def test_with_captured_validation(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    done = row(
        tmp_path,
        accelerator,
        HeadFirst if name == "finetuning" else Tuned,
        SETTINGS[name],
        ours=lambda: CUDAGraphCallback(evaluation=True),
        val_loader=loader(seed=1, batches=9),
        watched=watched,
    )
    assert done.graph.counts.replayed >= 8
    evaluated = done.graph.callback.summary.validate  # type: ignore[union-attr]
    assert evaluated is not None
    assert evaluated.replayed >= 20
    assert not evaluated.eager
