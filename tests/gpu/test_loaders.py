"""Loaders that make CUDA calls of their own while a capture is under way."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, assert_same, make, train


def test_pinning_threads(tmp_path: Path, accelerator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(200, 12, generator=generator), torch.randint(0, 4, (200,), generator=generator)
    )
    batches: DataLoader[Any] = DataLoader(
        data, batch_size=8, num_workers=2, pin_memory=True, persistent_workers=True
    )
    kwargs: dict[str, Any] = {"accelerator": accelerator, "train_loader": batches}
    plain = train(make(Net), tmp_path / "plain", **kwargs)
    graph = train(make(Net), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
