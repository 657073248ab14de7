"""A small GAN with manual optimization: its whole `training_step` is one CUDA graph.

The graph holds the steps of both networks: forward and backward passes, and both optimizers.

The generator learns eight points on a circle; nothing is downloaded.

    python examples/gan.py fit
    lightning-cudagraph fit --config configs/gan.yaml
"""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

POINTS = 8
SPREAD = 0.05


def mlp(inputs: int, width: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(dropout),
        nn.Linear(width, outputs),
    )


class GAN(L.LightningModule):
    """A generator and a discriminator of points in the plane.

    Logged metrics: `discriminator_loss` and `generator_loss`, each step and each epoch.

    Args:
        latent: Numbers that the generator draws for a point.
        width: Width of both networks.
        lr: Learning rate of both optimizers at the start.
        points: Points of an epoch.
        batch_size: Points of a batch.
    """

    def __init__(
        self,
        latent: int = 16,
        width: int = 128,
        lr: float = 1e-3,
        points: int = 6400,
        batch_size: int = 64,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.lr = lr
        self.points, self.batch_size = points, batch_size
        self.generator = mlp(latent, width, 2)
        self.discriminator = mlp(2, width, 1, dropout=0.1)

    def _discriminator_step(self, real: Tensor) -> Tensor:
        _, optimizer = self.optimizers()
        with torch.no_grad():
            fake = self.generator(self._noise_like(real))
        scores = self.discriminator(torch.cat([real, fake]))
        wanted = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(fake[:, :1])])
        loss = F.binary_cross_entropy_with_logits(scores, wanted)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def _generator_step(self, real: Tensor) -> Tensor:
        optimizer, _ = self.optimizers()
        scores = self.discriminator(self.generator(self._noise_like(real)))
        loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def _noise_like(self, real: Tensor) -> Tensor:
        return torch.randn(len(real), self.latent, device=real.device)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        with self.toggled_optimizer(discriminator_optimizer):
            discriminator_loss = self._discriminator_step(real)
        with self.toggled_optimizer(generator_optimizer):
            generator_loss = self._generator_step(real)
        losses = {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}
        self.log_dict(losses, on_step=True, on_epoch=True, prog_bar=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return circle(self.points, self.batch_size)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizers = [
            torch.optim.Adam(net.parameters(), lr=self.lr, betas=(0.5, 0.999), fused=True)
            for net in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


def circle(points: int, batch_size: int = 64, seed: int = 0) -> DataLoader[tuple[Tensor, ...]]:
    """Points around eight centers on a circle."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randint(0, POINTS, (points,), generator=generator) * (2 * math.pi / POINTS)
    centers = torch.stack([angle.cos(), angle.sin()], dim=1)
    data = centers + SPREAD * torch.randn(points, 2, generator=generator)
    return DataLoader(TensorDataset(data), batch_size=batch_size, drop_last=False)


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
