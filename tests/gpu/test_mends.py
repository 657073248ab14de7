"""Constants and copies from the host that a capture puts right, on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.harness import Net, assert_same, make, train


class Constants(Net):
    """All the ways to write a constant."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        scale = torch.tensor(0.5, device=x.device) + torch.tensor(2, device="cuda")
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        table = torch.as_tensor([[1, 2], [3, 4]], dtype=torch.float64, device=x.device)
        extra = logits.new_tensor([0.25, 0.75]).sum() + table.float().mean()
        made_on_host = torch.arange(4).to(x.device) * torch.linspace(0, 1, 4).cuda()
        half = torch.tensor([1.5, 2.5]).to(x.device, torch.float16).float().sum()
        picked = logits[:, [0, 2]].sum() + logits[[1, 2]].mean()
        target = torch.zeros(3, 2, device=x.device)
        target.copy_(torch.tensor([1.0, 2.0]))
        extra = extra + target.sum() * 1e-3 + half * 1e-3 + made_on_host.sum() * 1e-3
        loss = nn.functional.cross_entropy(logits, y, weight=weights)
        return loss * scale + extra * picked * 1e-3


class Addresses(Net):
    """Hands an array of addresses to the device from pinned memory that it then lets go of."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        numbers = torch.tensor([1.0, 3.0]).pin_memory().to(self.device, non_blocking=True)
        return loss * numbers.mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Takes pinned memory that is free, and overwrites it.
        for size in (2, 64, 128, 1024):
            torch.empty(size).pin_memory().fill_(-9.0)


class Staging(Net):
    """A pinned tensor that the host fills before every step: each replay reads it anew."""

    def on_fit_start(self) -> None:
        self.staging = torch.ones(1).pin_memory()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.staging.fill_(1.0 + self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * self.staging.to(self.device, non_blocking=True).sum()


class HostScalar(Net):
    """A number in host memory, which changes once an epoch."""

    def on_fit_start(self) -> None:
        self.scale = torch.tensor(1.0)

    def on_train_epoch_start(self) -> None:
        self.scale.fill_(1.0 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * self.scale


@pytest.mark.parametrize(
    ("cls", "captures"), [(Constants, 1), (Addresses, 1), (Staging, 1), (HostScalar, 3)]
)
def test_mended(tmp_path: Path, accelerator: str, cls: type[Net], captures: int) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 3}
    plain = train(make(cls), tmp_path / "plain", **kwargs)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    if cls is Constants:
        plain.csv = graph.csv = "nothing is logged in training"
    assert_same(plain, graph)
    assert graph.counts.captures == captures
    assert graph.counts.replayed >= 8


class ByDefault(Net):
    """Constants where `torch.set_default_device` says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.tensor(0.5)
        picked = logits[:, [0, 2]].sum() * torch.ones(())
        return nn.functional.cross_entropy(logits, y, weight=weights) + picked * 1e-3


def test_a_default_device(tmp_path: Path, accelerator: str) -> None:
    def fit(*args: Any, **kwargs: Any) -> None:
        torch.set_default_device("cuda")
        try:
            pl.Trainer.fit(*args, **kwargs)
        finally:
            torch.set_default_device(None)

    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 3, "fit": fit}
    plain = train(make(ByDefault), tmp_path / "plain", **kwargs)
    graph = train(make(ByDefault), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    plain.csv = graph.csv = "nothing is logged in training"
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed >= 8


class TooLarge(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * torch.ones(1 << 19).to(self.device).mean()


def test_too_many_constants(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)constants of more than 1 MiB.*test_mends.py"):
        train(make(TooLarge), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class FromTensors(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * torch.tensor([loss.detach(), 2.0], device=self.device).mean()


def test_a_tensor_of_tensors_is_refused(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"test_mends.py"):
        train(make(FromTensors), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
