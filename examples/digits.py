"""A small convolutional network on scikit-learn's handwritten digits.

The batch size does not divide the 1437 training images, so that the last batch of an epoch is
smaller than the others. BatchNorm updates its running statistics and Dropout draws random numbers
in every step.

    python examples/digits.py fit
    lightning-cudagraph fit --config configs/digits.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

NUM_CLASSES = 10
IMAGE_SIZE = 8
MAX_PIXEL = 16.0

Batch = tuple[Tensor, Tensor]


class DigitsCNN(L.LightningModule):
    """Two convolutions and a linear classifier for 8 x 8 grey images.

    Logged metrics: `train_loss` (each step and each epoch), `val_loss`, `val_accuracy` and
    `test_accuracy`.

    Args:
        channels: Channels of the first convolution; the second has twice as many.
        dropout: Probability of dropping a feature before the classifier.
        optimizer: `"adamw"` or `"sgd"` (with Nesterov momentum 0.9).
        lr: Learning rate before the first decay.
        weight_decay: Weight decay of the optimizer.
        lr_decay_epochs: Epochs between two decays of the learning rate.
        lr_decay: Factor of each decay.
    """

    def __init__(
        self,
        channels: int = 32,
        dropout: float = 0.25,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 2e-3,
        weight_decay: float = 1e-2,
        lr_decay_epochs: int = 5,
        lr_decay: float = 0.5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer_name = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.lr_decay_epochs = lr_decay_epochs
        self.lr_decay = lr_decay
        # No bias before a BatchNorm: it would be subtracted again.
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * (IMAGE_SIZE // 2) ** 2, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (batch, class) of images (batch, 1, 8, 8) with values from 0 to 1."""
        return self.classifier(self.features(images))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "adamw":
            optimizer = torch.optim.AdamW(
                self.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=True
            )
        else:
            optimizer = torch.optim.SGD(
                self.parameters(),
                lr=self.lr,
                momentum=0.9,
                nesterov=True,
                weight_decay=self.weight_decay,
                fused=True,
            )
        scheduler = torch.optim.lr_scheduler.StepLR(
            optimizer, step_size=self.lr_decay_epochs, gamma=self.lr_decay
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"},
        }


class DigitsData(L.LightningDataModule):
    """Scikit-learn's 1797 handwritten digits: 1437 to train, 180 to validate, 180 to test.

    Args:
        batch_size: Images in a batch. The last batch of an epoch holds what is left.
        num_workers: Worker processes of the training loader. A batch is two index operations, so
            that none is the fastest.
        split_seed: Seed of the split; every split has the same share of each digit.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        train_idx, held_out_idx = train_test_split(
            range(len(digits.target)),
            test_size=360,
            stratify=digits.target,
            random_state=self.split_seed,
        )
        val_idx, test_idx = train_test_split(
            held_out_idx,
            test_size=180,
            stratify=digits.target[held_out_idx],
            random_state=self.split_seed,
        )
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / MAX_PIXEL
        labels = torch.tensor(digits.target, dtype=torch.int64)
        self.train_set = BatchedTensors(images[train_idx], labels[train_idx])
        self.val_set = BatchedTensors(images[val_idx], labels[val_idx])
        self.test_set = BatchedTensors(images[test_idx], labels[test_idx])

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.train_set, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.test_set)

    def _loader(
        self, dataset: BatchedTensors, shuffle: bool = False, num_workers: int = 0
    ) -> DataLoader[Batch]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=False,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=already_collated,
            pin_memory=torch.cuda.is_available(),
        )


class BatchedTensors(TensorDataset):
    """A `TensorDataset` that indexes a whole batch at once instead of stacking single samples."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices)]


def already_collated(batch: Any) -> Any:
    """Collate function for a dataset that returns whole batches."""
    return batch


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
