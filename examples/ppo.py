"""Proximal policy optimization (PPO) that learns to balance poles on carts.

The environment is written in torch, many carts at once: there is nothing to install. Each rollout is
collected between two epochs, and trained on in minibatches for a few epochs, by automatic optimization.

    python examples/ppo.py fit
    lightning-cudagraph fit --config configs/ppo.yaml
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# Position and velocity of the cart, angle and angular velocity of its pole.
STATE_SIZE = 4
ACTIONS = 2  # a push to the left or to the right
GRAVITY, CART_KG, POLE_KG, HALF_LENGTH_M, PUSH_N, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FARTHEST_M, STEEPEST = 2.4, math.radians(12)

# States, actions, their log-probabilities, advantages, returns.
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class CartPoles:
    """Carts with poles, after Barto, Sutton and Anderson (1983). Each starts over when its pole falls.

    Args:
        carts: Number of carts.
        most_steps: Steps after which a cart starts over although its pole stands.
        device: Device of all tensors.

    Attributes:
        state: States, (cart, 4).
    """

    def __init__(self, carts: int, most_steps: int, device: torch.device) -> None:
        self.most_steps = most_steps
        self.state = torch.empty(carts, STATE_SIZE, device=device).uniform_(-0.05, 0.05)
        self._steps = torch.zeros(carts, dtype=torch.int64, device=device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push all carts.

        Args:
            actions: 0 for a push to the left, 1 for one to the right, (cart,).

        Returns:
            The states that the pushes lead to; True where a pole has fallen; True where a cart has come
            to its last step with a standing pole.
        """
        v, angle, spin = self.state[:, 1:].unbind(1)
        push = PUSH_N * (2 * actions - 1)
        sine, cosine, mass_kg = angle.sin(), angle.cos(), CART_KG + POLE_KG
        pull = (push + POLE_KG * HALF_LENGTH_M * spin.square() * sine) / mass_kg
        turn = GRAVITY * sine - cosine * pull
        turn = turn / (HALF_LENGTH_M * (4 / 3 - POLE_KG * cosine.square() / mass_kg))
        speed_up = pull - POLE_KG * HALF_LENGTH_M * turn * cosine / mass_kg
        change = torch.stack([v, speed_up, spin, turn], dim=1)
        reached = self.state + SECONDS * change
        self._steps += 1
        fallen = (reached[:, 0].abs() > FARTHEST_M) | (reached[:, 2].abs() > STEEPEST)
        last = (self._steps >= self.most_steps) & ~fallen
        ended = fallen | last
        fresh = torch.empty_like(reached).uniform_(-0.05, 0.05)
        self.state = torch.where(ended[:, None], fresh, reached)
        self._steps = torch.where(ended, 0, self._steps)
        return reached, fallen, last


def mlp(outputs: int, hidden: int) -> nn.Sequential:
    """Two hidden layers on a state."""
    return nn.Sequential(
        nn.Linear(STATE_SIZE, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


class PPO(L.LightningModule):
    """An actor and a critic.

    Logged metrics: `train_loss`, `value_loss` and `entropy` (each step), and `steps_until_fall`, the
    mean in each rollout.

    Args:
        carts: Number of carts.
        most_steps: Steps after which a cart starts over.
        rollout_steps: Steps of each cart in a rollout.
        rollout_epochs: Epochs of training on a rollout.
        batch_size: States in a minibatch.
        hidden: Width of the hidden layers.
        discount: Discount of a reward for each step until it comes.
        gae_lambda: Weight of later steps in an advantage (generalized advantage estimation).
        clip: Largest change of an action's probability that is rewarded, as a share.
        value_weight: Weight of the critic's loss.
        entropy_weight: Weight of the entropy, which rewards exploration.
        lr: Learning rate of Adam.
    """

    def __init__(
        self,
        carts: int = 64,
        most_steps: int = 500,
        rollout_steps: int = 128,
        rollout_epochs: int = 4,
        batch_size: int = 512,
        hidden: int = 64,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        clip: float = 0.2,
        value_weight: float = 0.5,
        entropy_weight: float = 0.01,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.carts = carts
        self.most_steps = most_steps
        self.rollout_steps = rollout_steps
        self.rollout_epochs = rollout_epochs
        self.batch_size = batch_size
        self.discount = discount
        self.gae_lambda = gae_lambda
        self.clip = clip
        self.value_weight = value_weight
        self.entropy_weight = entropy_weight
        self.lr = lr
        self.actor = mlp(ACTIONS, hidden)
        self.critic = mlp(1, hidden)
        self.poles: CartPoles | None = None
        n = carts * rollout_steps
        shapes = ((n, STATE_SIZE), (n,), (n,), (n,), (n,))
        self.rollout = Rollout(*(torch.zeros(shape) for shape in shapes))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of actions, (state, action), and the values, (state,)."""
        return F.log_softmax(self.actor(states), dim=1), self.critic(states).squeeze(1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch % self.rollout_epochs == 0:
            self._collect()

    @torch.no_grad()
    def _collect(self) -> None:
        """Let the actor push the carts, and fill the dataset with what happened."""
        if self.poles is None:
            self.poles = CartPoles(self.carts, self.most_steps, self.device)
        poles, steps, falls = self.poles, [], torch.zeros((), device=self.device)
        for _ in range(self.rollout_steps):
            states = poles.state
            log_probs, values = self(states)
            actions = torch.multinomial(log_probs.exp(), 1)
            reached, fallen, last = poles.step(actions.squeeze(1))
            falls += (fallen | last).sum()
            # A reward for each step in which the pole stands; what would follow a last step is worth
            # what the critic says.
            rewards = 1.0 + last * self.discount * self(reached)[1]
            chosen = log_probs.gather(1, actions).squeeze(1)
            steps.append((states, actions.squeeze(1), chosen, values, rewards, fallen | last))
        states, actions, chosen, values, rewards, ended = map(torch.stack, zip(*steps, strict=True))
        later, advantage = self(poles.state)[1], torch.zeros(self.carts, device=self.device)
        advantages = torch.empty_like(values)
        for step in reversed(range(self.rollout_steps)):
            goes_on = (~ended[step]).float() * self.discount
            error = rewards[step] + goes_on * later - values[step]
            advantage = error + goes_on * self.gae_lambda * advantage
            advantages[step], later = advantage, values[step]
        found = (states, actions, chosen, advantages, advantages + values)
        for kept, new in zip(self.rollout.tensors, found, strict=True):
            kept.copy_(new.flatten(0, 1))
        self.log("steps_until_fall", self.carts * self.rollout_steps / falls.clamp(min=1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        states, actions, old_log_probs, advantages, returns = batch
        log_probs, values = self(states)
        chosen = log_probs.gather(1, actions.long()[:, None]).squeeze(1)
        ratio = (chosen - old_log_probs).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = F.mse_loss(values, returns)
        entropy = -(log_probs.exp() * log_probs).sum(1).mean()
        loss = policy_loss + self.value_weight * value_loss - self.entropy_weight * entropy
        self.log_dict({"train_loss": loss, "value_loss": value_loss, "entropy": entropy})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.rollout,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=already_collated,
            pin_memory=torch.cuda.is_available(),
        )


class Rollout(TensorDataset):
    """A `TensorDataset` that indexes a whole batch at once instead of stacking single steps."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices)]


def already_collated(batch: Any) -> Any:
    """Collate function for a dataset that returns whole batches."""
    return batch


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
