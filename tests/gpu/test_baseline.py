"""The same on CUDA, where the first line of a report is a verdict."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, loader, make
from tests.test_baseline import *  # noqa: F403
from tests.test_baseline import LONG, Stops


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_verdict(tmp_path: Path, accelerator: str) -> None:
    """A small model is bound by launches."""
    callback = CUDAGraphCallback(timings=None)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=LONG,
        callbacks=[callback, Stops(300)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(make(Net), loader(ragged=False, batches=400))
    stage = callback.summary.fit
    assert stage.plain_steps == 3
    assert stage.speedup is not None
    assert stage.speedup > 1.05
    first, *_ = str(callback.summary).splitlines()
    digits = 1 if stage.speedup >= 2 else 2
    assert first.startswith(f"lightning_cudagraph: {stage.speedup:.{digits}f}x your plain step; ")
