"""Steps that draw on the host, and hand what they draw to the device.

On the emulator the host is the device. `tests/gpu/test_host_draws.py` collects these tests again, on
CUDA; `test_host_ops.py` has the mechanism, without a GPU.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_cudagraph import CaptureError, CUDAGraphCallback, GraphedStep
from tests.harness import Net, Trace, assert_same, make, train

BATCHES = 8

pytestmark = [
    # Lightning's advice on what to checkpoint, and on a GAN without a validation step.
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`"),
]


def layers(*sizes: int) -> nn.Sequential:
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        found += [
            nn.Linear(inputs, outputs),
            nn.BatchNorm1d(outputs, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*found[:-2])


class Images(Dataset[Any]):
    """Images that are drawn when they are asked for, in the process of the loop, and their numbers."""

    def __len__(self) -> int:
        return 8 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1, 4, 4) * 2 - 1, index


def images() -> DataLoader[Any]:
    return DataLoader(Images(), batch_size=8, shuffle=True)


class GAN(pl.LightningModule):
    """The GAN of Lightning's examples in small: noise and labels are made on the host, in the step."""

    def __init__(
        self, latent_dim: int = 6, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(layers(latent_dim, 16, 24, 16), nn.Tanh())
        self.discriminator = layers(16, 24, 1)
        self.validation_z = torch.randn(8, latent_dim)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z).view(len(z), 1, 4, 4)  # type: ignore[no-any-return]

    def judged(self, imgs: Tensor, label: Tensor) -> Tensor:
        logits = self.discriminator(imgs.view(imgs.size(0), -1))
        return nn.functional.binary_cross_entropy_with_logits(logits, label)

    def training_step(self, batch: Any) -> None:
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim)
        z = z.type_as(imgs)
        valid = torch.ones(imgs.size(0), 1)
        valid = valid.type_as(imgs)

        self.toggle_optimizer(opt_g)
        g_loss = self.judged(self(z), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        valid = torch.ones(imgs.size(0), 1)
        valid = valid.type_as(imgs)
        self.toggle_optimizer(opt_d)
        real_loss = self.judged(imgs, valid)
        fake = torch.zeros(imgs.size(0), 1)
        fake = fake.type_as(imgs)
        fake_loss = self.judged(self(z).detach(), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def on_train_epoch_end(self) -> None:
        z = self.validation_z.type_as(self.generator[0][0].weight)
        self.log("sample", self(z).mean())

    def configure_optimizers(self) -> Any:
        betas = self.hparams.b1, self.hparams.b2
        return [
            torch.optim.Adam(net.parameters(), lr=self.hparams.lr, betas=betas)
            for net in (self.generator, self.discriminator)
        ]


def both(tmp_path: Path, accelerator: str, build: Any, **kwargs: Any) -> Trace:
    plain, graph = (
        train(make(build), tmp_path / name, ours, accelerator=accelerator, **kwargs)
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    return graph


@pytest.mark.long
@pytest.mark.spread(2)
@pytest.mark.parametrize("watched", [True, False])
def test_lightnings_gan(tmp_path: Path, accelerator: str, watched: bool) -> None:
    kwargs = {"train_loader": images(), "limit_val_batches": 0, "watched": watched, "max_epochs": 6}
    graph = both(tmp_path, accelerator, GAN, **kwargs)
    assert graph.final["global_step"] == 2 * 6 * BATCHES
    assert graph.counts.captures == 1
    assert (graph.counts.replayed, graph.counts.eager) == (6 * BATCHES - 3, {})


class Noisy(Net):
    """Noise of the host in training and in validation; what comes of it is logged and returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.randn(x.shape) * 0.1
        noise[0] = 0
        found = super().training_step((x + noise.to(x), y), batch_idx)
        self.log("noise", noise.abs().mean().to(x.device), on_step=True, on_epoch=True)
        found["noise"] = noise.to(x.device)
        found["loss"] = found["loss"] * torch.bernoulli(torch.full((3,), 0.5)).type_as(x).mean()
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        super().validation_step((x + torch.randn(x.shape).type_as(x) * 0.1, y), batch_idx)


class InTurn(Noisy):
    """Draws twice in every second step: two paths, each with a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx % 2:
            x = x + torch.rand(12).type_as(x)
        return super().training_step((x, y), batch_idx)


class Broken(Noisy):
    """Draws in a hook that runs at a graph break, between two parts that draw."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        torch.rand(2)

    def on_after_backward(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(torch.rand(1).type_as(parameter), alpha=1e-3)


@pytest.mark.spread
@pytest.mark.spread(3)
@pytest.mark.parametrize("build", [Noisy, InTurn])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"max_epochs": 6}],
    ids=str,
)
def test_in_automatic_optimization(tmp_path: Path, accelerator: str, build: Any, kwargs: Any) -> None:
    graph = both(tmp_path, accelerator, build, **kwargs)
    assert graph.counts.replayed >= 8


def test_hooks_between_draw_too(tmp_path: Path, accelerator: str) -> None:
    graph = both(tmp_path, accelerator, Broken)
    assert graph.counts.replayed >= 8


@pytest.mark.parametrize("shapes", [1, 2])
def test_a_loop_of_ones_own(accelerator: str, shapes: int) -> None:
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    ends = []
    for backend in ("off", "auto"):
        torch.manual_seed(4)
        net = layers(3, 8, 2).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

        def step(x: Tensor, net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (net(x) - torch.rand(len(x), 2).to(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if backend == "auto":
            step = GraphedStep(step, net, optimizer)  # type: ignore[assignment]
        losses = []
        for index in range(16):
            x = torch.randn(4 + index % shapes, 3).to(device)
            losses.append(step(x))
        ends.append([*losses, *net.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


class Chooses(Noisy):
    """A branch on what is drawn."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        if torch.rand(()) < 0.5:
            found["loss"] = found["loss"] * 2
        return found


def test_a_branch_is_refused(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError) as caught:
        train(make(Chooses), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert "test_host_draws.py" in str(caught.value)
    assert ("draws from" in caught.value.findings[0].what) == (accelerator == "gpu")
