"""The shipped examples train the same with the callback as without it.

On a CPU in small settings; `tests/gpu` collects these tests again, in the full ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from examples.char_gpt import CharData, CharGPT
from examples.digits import DigitsCNN, DigitsData
from lightning_cudagraph import CUDAGraphCallback
from tests.harness import assert_same, make, train


def char_gpt(accelerator: str) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    size: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}
    if accelerator == "gpu":
        size = {}
    data = CharData(
        batch_size=8,
        block_size=size.get("block_size", 256),
        train_batches=20,
        val_batches=2,
        max_chars=200_000,
    )
    return lambda: CharGPT(**size, warmup_steps=5, sample_chars=20), data


def digits(accelerator: str) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    channels = 32 if accelerator == "gpu" else 4
    return lambda: DigitsCNN(channels=channels, lr_decay_epochs=1), DigitsData(batch_size=128)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("example", [char_gpt, digits])
def test_example(
    tmp_path: Path, accelerator: str, example: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuDNN's default gradients of convolutions differ from run to run, with or without a graph.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    build, data = example(accelerator)
    data.prepare_data()
    data.setup("fit")

    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        return train(
            make(build),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=data.train_dataloader(),
            val_loader=data.val_dataloader(),
            max_epochs=2,
            precision=precision,
            checkpoint_every=20,
            gradient_clip_val=1.0 if example is char_gpt else None,
        )

    plain, again, graph = run("a", None), run("b", None), run("c", CUDAGraphCallback())
    assert_same(plain, again)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed >= graph.final["global_step"] - 3 - 2
