"""Nets of the benchmarks that come from no package."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["DLRM", "ActorCritic", "Critics", "ViT", "critics_loss", "ppo_loss"]


class DLRM(nn.Module):
    """A recommender: embedding tables for categories, an MLP for numbers, and their dot products.

    Args:
        numbers: numbers in a row of the data.
        tables: number of tables, one for each category.
        entries: rows of a table.
        width: of a row.
    """

    def __init__(self, numbers: int, tables: int, entries: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        self.bottom = _layers(numbers, 64, width)
        row, column = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", row * (tables + 1) + column)
        self.top = _layers(width + len(row), 64, 1)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        numbers, categories = inputs
        dense = self.bottom(numbers)
        rows = [table(categories[:, column]) for column, table in enumerate(self.tables)]
        features = torch.stack([dense, *rows], dim=1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, products.index_select(1, self.pairs)], dim=1)).squeeze(1)


class ActorCritic(nn.Module):
    """A Gaussian policy and a value, each with a net of its own."""

    def __init__(self, observed: int, actions: int, width: int) -> None:
        super().__init__()
        self.actor = _layers(observed, width, width, actions, activation=nn.Tanh)
        self.critic = _layers(observed, width, width, 1, activation=nn.Tanh)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        observation, action = inputs
        deviation = (action - self.actor(observation)) / self.log_std.exp()
        log_probability = -(0.5 * deviation.square() + self.log_std).sum(1)
        return log_probability, self.critic(observation).squeeze(1)


def ppo_loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    log_probability, value = outputs
    before, advantage, returned = targets
    ratio = (log_probability - before).exp()
    policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return policy_loss + 0.5 * nn.functional.mse_loss(value, returned)


class Critics(nn.Module):
    """Independent critics."""

    def __init__(self, count: int, observed: int, width: int) -> None:
        super().__init__()
        self.critics = nn.ModuleList(_layers(observed, width, width, 1) for _ in range(count))

    def forward(self, observation: Tensor) -> list[Tensor]:
        return [critic(observation) for critic in self.critics]


def critics_loss(outputs: list[Tensor], target: Tensor) -> Tensor:
    losses = [nn.functional.mse_loss(output, target) for output in outputs]
    return torch.stack(losses).sum()


class ViT(nn.Module):
    """A vision transformer with a token for the class."""

    def __init__(self, side: int, patch: int, layers: int, heads: int, width: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens[:, 0]))


def _layers(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of the given widths, with activations between them."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])
