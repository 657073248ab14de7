"""A recommender in the form of DLRM: embedding tables, dot products between them, two small MLPs.

Clicks are drawn from a hidden model of the same form: there is nothing to download. Most of the step is
small kernels, 26 lookups and their gradients, so the GPU waits for the CPU in an eager run.

    python examples/dlrm.py fit
    lightning-cudagraph fit --config configs/dlrm.yaml
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

DENSE_FEATURES = 13  # as in Criteo's data, as are the 26 tables

Batch = tuple[Tensor, Tensor, Tensor]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with a ReLU between two of them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(L.LightningModule):
    """Predicts clicks from numbers and categories.

    Logged metrics: `train_loss` (each step and each epoch), `val_loss` and `val_auroc`.

    Args:
        tables: Number of categorical features; each has an embedding table.
        rows: Categories of each feature.
        embedding_dim: Width of an embedding.
        bottom: Widths of the hidden layers of the MLP on the numbers.
        top: Widths of the hidden layers of the MLP on the interactions.
        lr: Learning rate of Adagrad.
    """

    def __init__(
        self,
        tables: int = 26,
        rows: int = 10_000,
        embedding_dim: int = 16,
        bottom: Sequence[int] = (256, 64),
        top: Sequence[int] = (256, 128),
        lr: float = 0.02,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.tables = nn.ModuleList(nn.Embedding(rows, embedding_dim) for _ in range(tables))
        for table in self.tables:
            nn.init.normal_(table.weight, std=embedding_dim**-0.5)
        self.bottom = mlp([DENSE_FEATURES, *bottom, embedding_dim])
        n_vectors = tables + 1
        self.top = mlp([embedding_dim + n_vectors * (n_vectors - 1) // 2, *top, 1])
        pairs = torch.tril_indices(n_vectors, n_vectors, offset=-1)
        self.register_buffer("pairs", pairs[0] * n_vectors + pairs[1], persistent=False)
        self.val_auroc = BinaryAUROC(thresholds=200)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return the logits of clicks, from numbers (batch, 13) and categories (batch, tables)."""
        dense = self.bottom(numbers)
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        numbers, categories, clicks = batch
        loss = F.binary_cross_entropy_with_logits(self(numbers, categories), clicks)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        numbers, categories, clicks = batch
        logits = self(numbers, categories)
        self.val_auroc(logits.sigmoid(), clicks.long())
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, clicks))
        self.log("val_auroc", self.val_auroc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=self.lr)


class ClicksData(L.LightningDataModule):
    """Clicks drawn from a hidden model of factors; often seen categories are most of the data.

    Args:
        batch_size: Clicks and non-clicks in a batch.
        tables: Number of categorical features.
        rows: Categories of each feature.
        train_batches: Batches of an epoch.
        val_batches: Batches of a validation.
        seed: Seed of the data.
    """

    def __init__(
        self,
        batch_size: int = 128,
        tables: int = 26,
        rows: int = 10_000,
        train_batches: int = 4000,
        val_batches: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.tables = tables
        self.rows = rows
        self.train_batches = train_batches
        self.val_batches = val_batches
        self.seed = seed

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        n_samples = self.batch_size * (self.train_batches + self.val_batches)
        numbers = torch.randn(n_samples, DENSE_FEATURES, generator=generator)
        uniform = torch.rand(n_samples, self.tables, generator=generator)
        categories = (self.rows * uniform**4).long()  # of 10000 rows, 1000 are 56 % of the data
        bias = torch.randn(self.tables, self.rows, generator=generator)
        factors = torch.randn(self.tables, self.rows, 2, generator=generator)
        columns = torch.arange(self.tables)
        score = bias[columns, categories].sum(1)
        # The sum of the products of all pairs, by the square of a sum.
        total = factors[columns, categories].sum(1)
        score += (total.square().sum(1) - factors[columns, categories].square().sum((1, 2))) / 2
        score += numbers @ torch.randn(DENSE_FEATURES, generator=generator)
        clicks = torch.bernoulli((2 * score / score.std()).sigmoid(), generator=generator)
        held_out = self.batch_size * self.val_batches
        parts = (numbers, categories, clicks)
        self.val_set = TensorDataset(*(part[:held_out] for part in parts))
        self.train_set = TensorDataset(*(part[held_out:] for part in parts))

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_set)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_set)

    def _loader(self, dataset: TensorDataset) -> DataLoader[Any]:
        return DataLoader(
            dataset, batch_size=self.batch_size, drop_last=True, pin_memory=torch.cuda.is_available()
        )


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
