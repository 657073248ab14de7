"""Manual optimization: a Wasserstein GAN with gradient penalty, PPO and Q-learning, by the one line.

Plain Lightning and the callback take turns, block by block in one process (`benchmarks/fits.py`), and
must end with the same weights, optimizer states and counts of optimizer steps.

    python -m benchmarks.manual

Without a GPU a small run on the emulator checks that it works: the figures mean nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import pairs
from benchmarks.fits import ON_GPU, pinned
from benchmarks.pairs import Row

__all__ = ["ROWS", "main"]

_WIDTH = 256 if ON_GPU else 16
_ROWS_OF_BATCH = 256 if ON_GPU else 8
_STATE_SIZE, _ACTIONS = 8, 4
_READY_BATCHES = 32


def _net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, outputs),
    )


class WGANGP(pl.LightningModule):
    """Three steps of the critic, with gradients of gradients, and one of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = _net(16, _STATE_SIZE), _net(_STATE_SIZE, 1)

    def _fake(self, real: Tensor) -> Tensor:
        fake: Tensor = self.generator(torch.randn(len(real), 16, device=real.device))
        return fake

    def _penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1, device=real.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        self.toggle_optimizer(of_critic)
        for _ in range(3):
            fake = self._fake(batch).detach()
            loss = self.critic(fake).mean() - self.critic(batch).mean() + 10 * self._penalty(batch, fake)
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        score = -self.critic(self._fake(batch)).mean()
        of_generator.zero_grad()
        self.manual_backward(score)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"critic": loss, "generator": score})

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(net.parameters(), lr=1e-4, betas=(0.0, 0.9))
            for net in (self.generator, self.critic)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.999) for each in optimizers]


class PPO(pl.LightningModule):
    """Three passes over a batch of states, clipped gradients in each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy, self.value = _net(_STATE_SIZE, _ACTIONS), _net(_STATE_SIZE, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            before = self.policy(batch).log_softmax(1)
            action = torch.multinomial(before.exp(), 1)
            reward = batch.gather(1, action)
            advantage = reward - self.value(batch)
        for _ in range(3):
            log_probs = self.policy(batch).log_softmax(1)
            ratio = (log_probs - before).gather(1, action).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(log_probs.exp() * log_probs).sum(1).mean()
            loss = F.mse_loss(self.value(batch), reward) - gain - 0.01 * entropy
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log_dict({"loss": loss, "entropy": entropy})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-4)


class QLearner(pl.LightningModule):
    """Double Q-learning from a replay memory on the device, with a target net that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.values, self.target = _net(_STATE_SIZE, _ACTIONS), _net(_STATE_SIZE, _ACTIONS)
        self.target.requires_grad_(False)
        self.register_buffer("memory", torch.zeros(16 * _ROWS_OF_BATCH, _STATE_SIZE))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        rows = torch.arange(len(batch), device=batch.device)
        self.memory[(self.filled + rows) % len(self.memory)] = batch
        self.filled += len(batch)
        drawn = torch.randint(len(self.memory), (len(batch),), device=batch.device)
        state, after = self.memory[drawn], self.memory[(drawn + 1) % len(self.memory)]
        action = torch.multinomial(self.values(state).softmax(1), 1)
        with torch.no_grad():
            best = self.target(after).gather(1, self.values(after).argmax(1, keepdim=True))
            wanted = state.gather(1, action) + 0.9 * best
        loss = F.smooth_l1_loss(self.values(state).gather(1, action), wanted)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            for target, value in zip(self.target.parameters(), self.values.parameters(), strict=True):
                target.lerp_(value, 0.05)
        self.log("loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.values.parameters(), lr=1e-3)


def _batches() -> Callable[[], Any]:
    return lambda: pinned(torch.randn(_ROWS_OF_BATCH, _STATE_SIZE))


ROWS = {
    name: Row(make, _batches, _READY_BATCHES, in_one_thread=make is WGANGP)
    for name, make in (("WGAN-GP", WGANGP), ("PPO", PPO), ("double Q-learning", QLearner))
}


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    pairs.main("manual", __doc__, ROWS, 1.0, 30 if ON_GPU else 8, given)


if __name__ == "__main__":
    main()
