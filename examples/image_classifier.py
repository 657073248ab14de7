"""A ResNet of torchvision on scikit-learn's digits, with augmentation and averaged weights.

The loader draws affine transforms and erased parts for each image, and CutMix or MixUp for each batch.
Lightning's `EMAWeightAveraging` keeps an exponential moving average of the weights, which is what
validation sees. Weights are random: there is nothing to download.

    pip install torchvision
    python examples/image_classifier.py fit
    lightning-cudagraph fit --config configs/image_classifier.yaml
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics.classification import MulticlassAccuracy

try:
    import torchvision
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"examples/image_classifier.py needs torchvision ({error}): install it from where your torch"
        " came, with `pip install torchvision`",
        name=error.name,
    ) from None
from torchvision.transforms import v2

NUM_CLASSES = 10
MAX_PIXEL = 16.0

Batch = tuple[Tensor, Tensor]


class ImageClassifier(L.LightningModule):
    """A model of `torchvision.models` for ten classes.

    Logged metrics: `train_loss` (each step and each epoch), `val_loss` and `val_accuracy`.

    Args:
        name: Name of the model in `torchvision.models`, such as `"resnet18"` or `"mobilenet_v3_small"`.
        lr: Highest learning rate of the one-cycle schedule.
        momentum: Highest momentum of SGD, which the schedule moves against the learning rate.
        weight_decay: Weight decay of SGD.
        label_smoothing: Share of the label that is spread over all classes.
    """

    def __init__(
        self,
        name: str = "resnet18",
        lr: float = 0.1,
        momentum: float = 0.95,
        weight_decay: float = 5e-4,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.label_smoothing = label_smoothing
        self.model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES)
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (batch, class) of images (batch, 3, height, width)."""
        return self.model(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, shares = batch  # shares of the classes in a mixed image
        loss = F.cross_entropy(self(images), shares, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=True,
            weight_decay=self.weight_decay,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.lr,
            max_momentum=self.momentum,
            total_steps=int(self.trainer.estimated_stepping_batches),
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class AugmentedDigits(L.LightningDataModule):
    """Scikit-learn's 1797 handwritten digits, as images of three channels; every tenth is held out.

    Args:
        batch_size: Images in a batch.
        image_size: Height and width to which the 8 x 8 images are scaled.
        num_workers: Worker processes of the training loader.
        split_seed: Seed of the split; both parts have the same share of each digit.
    """

    def __init__(
        self, batch_size: int = 64, image_size: int = 32, num_workers: int = 0, split_seed: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / MAX_PIXEL
        images = F.interpolate(images, size=self.image_size, mode="bilinear").expand(-1, 3, -1, -1)
        labels = torch.tensor(digits.target, dtype=torch.int64)
        train_idx, val_idx = train_test_split(
            range(len(labels)), test_size=0.1, stratify=digits.target, random_state=self.split_seed
        )
        augment = v2.Compose(
            [
                v2.RandomAffine(degrees=15, translate=(0.1, 0.1), scale=(0.9, 1.1)),
                v2.RandomErasing(p=0.25),
                v2.Normalize(mean=[0.5] * 3, std=[0.5] * 3),
            ]
        )
        self.train_set = Images(images[train_idx], labels[train_idx], augment)
        normalize = v2.Normalize(mean=[0.5] * 3, std=[0.5] * 3)
        self.val_set = Images(images[val_idx], labels[val_idx], normalize)

    def train_dataloader(self) -> DataLoader[Batch]:
        mixed = v2.RandomChoice([v2.CutMix(num_classes=NUM_CLASSES), v2.MixUp(num_classes=NUM_CLASSES)])
        return self._loader(
            self.train_set,
            shuffle=True,
            drop_last=True,  # the last batch would have a shape of its own
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=lambda samples: mixed(*default_collate(samples)),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.val_set)

    def _loader(self, dataset: Images, **kwargs: Any) -> DataLoader[Batch]:
        pinned = torch.cuda.is_available()
        return DataLoader(dataset, batch_size=self.batch_size, pin_memory=pinned, **kwargs)


class Images(Dataset[Batch]):
    """Images with their labels, transformed one by one."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Any) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.transform(self.images[index]), self.labels[index]


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
