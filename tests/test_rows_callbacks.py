"""Lightning's own callbacks beside ours: a row for each, the same as without ours, bit for bit.

`tests/gpu/test_rows_callbacks.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net
from tests.rows import became, row

O = torch.optim  # noqa: E741


class Drifts(Net):
    """Ends elsewhere if it is watched by somebody."""

    def on_train_start(self) -> None:
        if any(isinstance(callback, CUDAGraphCallback) for callback in self.trainer.callbacks):
            self.head.bias.data.add_(1e-7)


def test_a_row_sees_a_difference(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(AssertionError, match="differ at"):
        row(tmp_path, accelerator, Drifts)


def saving(**kwargs: Any) -> Any:
    return lambda folder: {"callbacks": (ModelCheckpoint(folder / "more", **kwargs),)}


SAVERS: dict[str, dict[str, Any]] = {
    "top-k": {"monitor": "val_loss", "save_top_k": 2, "filename": "{val_loss:.9f}", "save_last": "link"},
    "every-2-steps": {"monitor": "loss_step", "save_top_k": 3, "every_n_train_steps": 2, "mode": "max"},
    "every-step": {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True},
    "train-epoch-end": {
        "monitor": "loss",
        "save_on_train_epoch_end": True,
        "every_n_epochs": 2,
        "save_weights_only": True,
    },
    "every-epoch": {"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": False},
}


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_model_checkpoint(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    done = row(
        tmp_path, accelerator, setting=saving(**SAVERS[name]), watched=watched, checkpoint_every=0
    )
    became(done.graph, replayed=18, eager={"another batch signature": 3})
    assert [*done.graph.checkpoints]
