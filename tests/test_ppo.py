"""PPO as in Lightning's own example: distributions with checks, two optimizers, manual optimization.

After examples/pytorch/domain_templates/reinforce_learn_ppo.py of Lightning, with an environment of its
own. `tests/gpu/test_ppo.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, IterableDataset

from tests.rows import row

STEPS_PER_EPOCH, BATCH_SIZE, EPOCHS = 120, 12, 5
PASSES = 4  # over the samples of an epoch: 40 batches
STATES, ACTIONS = 4, 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


class Track:
    """A ball that three pushes keep near the middle of a track."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def reset(self) -> list[float]:
        self.place, self.speed, self.time = self.random.uniform(-1, 1), 0.0, 0
        return self.state()

    def state(self) -> list[float]:
        return [self.place, self.speed, abs(self.place), self.time / 20]

    def step(self, action: float) -> tuple[list[float], float, bool]:
        self.speed = 0.9 * self.speed + 0.1 * (action - 1) + self.random.gauss(0, 0.02)
        self.place += self.speed
        self.time += 1
        return self.state(), 1 - abs(self.place), abs(self.place) > 2 or self.time == 20


class Experience(IterableDataset[Any]):
    def __init__(self, generate: Callable[[], Iterator[Any]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self.generate()


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(STATES, 16), nn.ReLU(), nn.Linear(16, outputs))


class ActorCategorical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(ACTIONS)

    def forward(self, states: Tensor) -> tuple[Categorical, Tensor]:
        pi = Categorical(logits=self.net(states))
        return pi, pi.sample()

    def log_prob(self, pi: Categorical, actions: Tensor) -> Tensor:
        return pi.log_prob(actions)


class ActorContinuous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def forward(self, states: Tensor) -> tuple[Normal, Tensor]:
        pi = Normal(loc=self.net(states), scale=torch.exp(self.log_std))
        return pi, pi.sample()

    def log_prob(self, pi: Normal, actions: Tensor) -> Tensor:
        return pi.log_prob(actions).sum(axis=-1)  # type: ignore[call-overload, no-any-return]


class PPO(pl.LightningModule):
    """Its own loops of trajectories and advantages run in the dataset's generator."""

    def __init__(self, actor: Callable[[], nn.Module], gamma: float = 0.99, lam: float = 0.95) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = actor(), mlp(1)
        self.gamma, self.lam, self.clip_ratio = gamma, lam, 0.2
        self.env = Track()
        self.mean_reward = 0.0

    def forward(self, x: Tensor) -> tuple[Any, Tensor, Tensor]:
        pi, action = self.actor(x)
        return pi, action, self.critic(x)

    def discounted(self, rewards: list[float], discount: float) -> list[float]:
        found, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + discount * total
            found.append(total)
        return found[::-1]

    def advantages(self, rewards: list[float], values: list[float], last: float) -> list[float]:
        later = [*values[1:], last]
        deltas = [
            reward + self.gamma * after - value
            for reward, value, after in zip(rewards, values, later, strict=True)
        ]
        return self.discounted(deltas, self.gamma * self.lam)

    def generate(self) -> Iterator[tuple[Tensor, ...]]:
        samples: list[tuple[Tensor, ...]] = []
        state, rewards, values, episode = self.env.reset(), list[float](), list[float](), list[Any]()
        total = 0.0
        for step in range(STEPS_PER_EPOCH):
            x = torch.tensor(state, device=self.device)
            with torch.no_grad():
                pi, action, value = self(x)
                log_prob = self.actor.log_prob(pi, action)
            moved, reward, has_ended = self.env.step(float(action))
            episode.append((x, action, log_prob))
            rewards.append(reward)
            values.append(value.item())
            total += reward
            state = moved
            if has_ended or step == STEPS_PER_EPOCH - 1:
                with torch.no_grad():
                    last = (
                        0.0 if has_ended else self.critic(torch.tensor(state, device=self.device)).item()
                    )
                returns = self.discounted([*rewards, last], self.gamma)[:-1]
                for (x, action, log_prob), q, advantage in zip(
                    episode, returns, self.advantages(rewards, values, last), strict=True
                ):
                    samples.append((x, action, log_prob, torch.tensor(q), torch.tensor(advantage)))
                state, rewards, values, episode = self.env.reset(), [], [], []
        self.mean_reward = total / STEPS_PER_EPOCH
        for _ in range(PASSES):
            yield from samples

    def actor_loss(self, state: Tensor, action: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        pi, _ = self.actor(state)
        ratio = torch.exp(self.actor.log_prob(pi, action) - old)
        clipped = torch.clamp(ratio, 1 - self.clip_ratio, 1 + self.clip_ratio) * advantage
        return -(torch.min(ratio * advantage, clipped)).mean()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        state, action, old, q, advantage = batch
        optimizer_actor, optimizer_critic = self.optimizers()  # type: ignore[misc]
        advantage = (advantage - advantage.mean()) / advantage.std()
        actor_loss = self.actor_loss(state, action, old, advantage)
        self.manual_backward(actor_loss)
        optimizer_actor.step()
        optimizer_actor.zero_grad()
        critic_loss = (q - self.critic(state).squeeze(1)).pow(2).mean()
        self.manual_backward(critic_loss)
        optimizer_critic.step()
        optimizer_critic.zero_grad()
        self.log("critic_loss", critic_loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("actor_loss", actor_loss, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("mean_reward", self.mean_reward)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.actor.parameters(), lr=3e-3),
            torch.optim.Adam(self.critic.parameters(), lr=1e-2),
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Experience(self.generate), batch_size=BATCH_SIZE)


@pytest.mark.parametrize(
    "actor", [ActorCategorical, pytest.param(ActorContinuous, marks=pytest.mark.long)]
)
def test_ppo(tmp_path: Path, accelerator: str, actor: Callable[[], nn.Module]) -> None:
    """200 steps: equal in weights, optimizer states, counters, logs and random state."""

    def fit(trainer: pl.Trainer, module: pl.LightningModule, *loaders: Any, **kwargs: Any) -> None:
        trainer.fit(module, **kwargs)

    batches = STEPS_PER_EPOCH * PASSES // BATCH_SIZE
    found = row(
        tmp_path,
        accelerator,
        lambda: PPO(actor),
        fit=fit,
        max_epochs=EPOCHS,
        limit_val_batches=0,
        checkpoint_every=2 * batches,
    )
    assert found.graph.trainer is not None
    assert found.graph.trainer.global_step == 2 * batches * EPOCHS  # of two optimizers
    assert batches * EPOCHS == 200
    counts = found.graph.counts
    assert (counts.replayed, counts.captures) == (197, 1), counts
