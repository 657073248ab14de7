"""Deep Q-learning as in Lightning's tutorial: the step plays a game, and learns from a buffer.

With an environment of its own. `tests/gpu/test_dqn.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.harness import Trace, differences, make, train
from tests.rows import row

STATES, ACTIONS = 4, 3
BATCH_SIZE, STEPS_PER_EPOCH, STEPS = 16, 50, 200
SYNC_STEPS = 10  # from one copy into the target network to the next

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


class Track:
    """A ball that three pushes keep near the middle of a track."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def reset(self) -> np.ndarray:
        self.place, self.speed, self.time = self.random.uniform(-1, 1), 0.0, 0
        return self.state()

    def state(self) -> np.ndarray:
        return np.array([self.place, self.speed, abs(self.place), self.time / 20], dtype=np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.speed = 0.9 * self.speed + 0.1 * (action - 1) + self.random.gauss(0, 0.02)
        self.place += self.speed
        self.time += 1
        return self.state(), 1 - abs(self.place), abs(self.place) > 2 or self.time == 20


class Experience(NamedTuple):
    state: np.ndarray
    action: int
    reward: np.float32
    done: bool
    new_state: np.ndarray


class Samples(IterableDataset[Any]):
    """Samples of what is in the buffer when a batch is taken."""

    def __init__(self, buffer: deque[Experience], before_each: Callable[[], None]) -> None:
        self.buffer, self.before_each = buffer, before_each

    def __iter__(self) -> Iterator[Any]:
        for _ in range(STEPS_PER_EPOCH):
            self.before_each()
            for index in np.random.choice(len(self.buffer), BATCH_SIZE, replace=False):
                yield tuple(self.buffer[index])


class Agent:
    def __init__(self, buffer: deque[Experience]) -> None:
        self.env, self.buffer = Track(), buffer
        self.state = self.env.reset()

    def action(self, net: nn.Module, epsilon: float, device: torch.device) -> int:
        if np.random.random() < epsilon:
            return int(np.random.randint(ACTIONS))
        values = net(torch.tensor(self.state[None], device=device))
        return int(torch.max(values, dim=1)[1].item())

    @torch.no_grad()
    def play_step(self, net: nn.Module, epsilon: float, device: torch.device) -> tuple[float, bool]:
        action = self.action(net, epsilon, device)
        new_state, reward, done = self.env.step(action)
        self.buffer.append(Experience(self.state, action, np.float32(reward), done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(STATES, 16), nn.ReLU(), nn.Linear(16, ACTIONS))


class DQN(pl.LightningModule):
    """As in the tutorial, all in the step."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.net, self.target_net = mlp(), mlp()
        self.target_net.load_state_dict(self.net.state_dict())
        self.buffer: deque[Experience] = deque(maxlen=500)
        self.agent = Agent(self.buffer)
        self.total_reward = self.episode_reward = 0.0
        for _ in range(100):
            self.agent.play_step(self.net, 1.0, self.device)

    def epsilon(self) -> float:
        return max(0.1, 1.0 - self.global_step / 100)

    def count(self, reward: float, done: bool) -> None:
        self.episode_reward += reward
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0

    def sync(self) -> None:
        if self.global_step % SYNC_STEPS == 0:
            self.target_net.load_state_dict(self.net.state_dict())

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        states, actions, rewards, dones, new_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            new_values = self.target_net(new_states).max(1)[0]
            new_values[dones] = 0.0
        return nn.functional.mse_loss(values, new_values * 0.99 + rewards)

    def learn(self, loss: Tensor) -> Tensor:
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        epsilon = self.epsilon()
        reward, done = self.agent.play_step(self.net, epsilon, self.device)
        self.count(reward, done)
        loss = self.loss(batch)
        self.sync()
        self.log_dict({"epsilon": epsilon, "reward": reward})
        self.log("total_reward", self.total_reward, prog_bar=True)
        self.log("steps", float(self.global_step), logger=False, prog_bar=True)
        return self.learn(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.buffer, lambda: None), batch_size=BATCH_SIZE)


class PlaysInHook(DQN):
    """The usual rewrite: in the step is the loss, and in each tenth one the target network."""

    def play(self) -> None:
        epsilon = self.epsilon()
        self.reward, done = self.agent.play_step(self.net, epsilon, self.device)
        self.count(self.reward, done)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        epsilon = self.epsilon()
        self.play()
        self.log_dict({"epsilon": epsilon, "reward": self.reward}, on_step=True, on_epoch=False)
        self.log("total_reward", self.total_reward, on_step=True, on_epoch=False, prog_bar=True)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.sync()
        return self.learn(loss)


class SyncsInHook(PlaysInHook):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.learn(self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sync()


class PlaysInDataset(SyncsInHook):
    """Plays when a batch is taken."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.buffer, self.play), batch_size=BATCH_SIZE)


def fit(trainer: pl.Trainer, module: pl.LightningModule, *loaders: Any, **kwargs: Any) -> None:
    trainer.fit(module, **kwargs)


def length(steps: int) -> dict[str, Any]:
    """Keywords for a run of so many steps. Without a limit, Lightning takes batches one step ahead."""
    return {
        "fit": fit,
        "max_epochs": -(-steps // STEPS_PER_EPOCH),
        "limit_train_batches": steps if steps < STEPS_PER_EPOCH else None,
        "limit_val_batches": 0,
        "checkpoint_every": STEPS_PER_EPOCH,
    }


def equal(tmp_path: Path, accelerator: str, build: Callable[[], DQN], steps: int, **ours: Any) -> Trace:
    """The run with the callback, if it is equal, and has played the same games."""
    found = row(tmp_path, accelerator, build, ours=lambda: CUDAGraphCallback(**ours), **length(steps))
    plain, graph = found.plain.module, found.graph.module
    assert isinstance(plain, DQN)
    assert isinstance(graph, DQN)
    assert [each.action for each in plain.buffer] == [each.action for each in graph.buffer]
    assert plain.agent.env.random.getstate() == graph.agent.env.random.getstate()
    return found.graph


LONG = pytest.mark.long


@pytest.mark.parametrize("automatic", [True, pytest.param(False, marks=LONG)])
def test_refused(tmp_path: Path, accelerator: str, automatic: bool) -> None:
    """All that keeps the call of the agent out of a graph is one finding."""
    found = train(
        make(lambda: DQN(automatic)),
        tmp_path,
        CUDAGraphCallback(),
        accelerator=accelerator,
        raises=CaptureError,
        **length(STEPS_PER_EPOCH),
    )
    text = str(found.error)
    assert text.startswith("4 things keep the training step from being captured:")
    assert "calls `play_step`, which uses or changes what no graph can hold: `numpy.random`," in text
    assert "(`reward, done = self.agent.play_step(self.net, epsilon, self.device)`)" in text
    assert "See docs/recipes/environments.md." in text


@LONG
@pytest.mark.parametrize("automatic", [True, False])
def test_eager(tmp_path: Path, accelerator: str, automatic: bool) -> None:
    graph = equal(tmp_path, accelerator, lambda: DQN(automatic), STEPS, on_unsupported="eager")
    assert graph.counts.replayed == 0


@pytest.mark.parametrize(
    ("automatic", "scope", "steps"),
    [
        (True, "modules", 20),
        *(
            pytest.param(automatic, scope, STEPS, marks=LONG)
            for automatic in (True, False)
            for scope in ("auto", "modules")
        ),
    ],
)
def test_modules(tmp_path: Path, accelerator: str, automatic: bool, scope: str, steps: int) -> None:
    graph = equal(
        tmp_path,
        accelerator,
        lambda: DQN(automatic),
        steps,
        scope=scope,
        modules=["net", "target_net"],
    )
    assert graph.counts.replayed >= steps - 18
    # In time `net` also for a single state, without gradients.
    assert graph.counts.captures == (3 if steps == STEPS else 2)


@pytest.mark.parametrize(
    ("build", "automatic", "steps"),
    [
        (SyncsInHook, False, 10),
        (PlaysInDataset, True, 10),
        *(
            pytest.param(build, automatic, STEPS, marks=LONG)
            for build in (SyncsInHook, PlaysInDataset)
            for automatic in (True, False)
        ),
    ],
)
def test_beside_the_step(
    tmp_path: Path, accelerator: str, build: type[DQN], automatic: bool, steps: int
) -> None:
    graph = equal(tmp_path, accelerator, lambda: build(automatic), steps)
    assert (graph.counts.replayed, graph.counts.captures) == (steps - 3, 1)


@LONG
@pytest.mark.parametrize("automatic", [True, False])
def test_target_network_on_a_path(tmp_path: Path, accelerator: str, automatic: bool) -> None:
    """With the numbers of the tutorial's form."""
    graph = equal(tmp_path, accelerator, lambda: PlaysInHook(automatic), steps=STEPS)
    assert graph.counts.captures == 2
    assert graph.counts.replayed >= STEPS - 14
    tutorials = train(
        make(lambda: DQN(automatic)), tmp_path / "tutorial", accelerator=accelerator, **length(STEPS)
    )
    for part in ("weights", "optimizer", "rng_cpu"):
        assert not differences(graph.final[part], tutorials.final[part])
