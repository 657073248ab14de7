"""The equivalences of `tests/test_examples.py` in the full settings, and a ResNet-18."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import assert_same, make, train
from tests.test_examples import *  # noqa: F403

torchvision = pytest.importorskip("torchvision")


class ResNet18(pl.LightningModule):
    """torchvision's, with its in-place ReLUs, and a dropout before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)
        self.net.fc = nn.Sequential(nn.Dropout(0.2), self.net.fc)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(images), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resnet18(
    tmp_path: Path, accelerator: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(330, 3, 64, 64, generator=generator),
        torch.randint(0, 10, (330,), generator=generator),
    )
    batches = DataLoader(data, batch_size=32, pin_memory=True)

    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        return train(
            make(ResNet18),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=batches,
            val_loader=batches,
            max_epochs=4,
            precision=precision,
            checkpoint_every=20,
            gradient_clip_val=1.0,
        )

    plain, again, graph = run("a", None), run("b", None), run("c", CUDAGraphCallback())
    assert_same(plain, again)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed == 44 - 3 - 3 - 1
