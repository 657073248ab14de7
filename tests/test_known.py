"""Reads of values that are made of constants inside the step are no obstacle to a capture.

`tests/gpu/test_known.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Net
from tests.rows import became, refused, row

RAGGED = {"another batch signature": 3}


def causal(size: int, device: torch.device) -> Tensor:
    return torch.triu(torch.full((size, size), float("-inf"), device=device), diagonal=1)


class Asks(Net):
    """Its step goes one way or another by what it reads."""

    scale = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * 2 if self.asks(batch[0]) else loss

    def asks(self, x: Tensor) -> bool:
        raise NotImplementedError


class Compares(Asks):
    def asks(self, x: Tensor) -> bool:
        mask = torch.ones(6, 6, device=x.device).tril()
        mask = torch.zeros_like(mask).masked_fill(mask == 0, float("-inf"))
        return bool((mask == causal(6, x.device)).all())


class FromTheHost(Asks):
    """Made on the host, and copied to the device."""

    def asks(self, x: Tensor) -> bool:
        mask = torch.triu(torch.ones(4, 4), diagonal=1).to(x.device)
        return bool((mask[0, 1:] == 1).all()) and mask[3, 0].item() == 0


class KnowsANumber(Asks):
    """Of a Python number that moves seldom, which leads to a new capture."""

    def on_train_epoch_start(self) -> None:
        self.scale = 2.0 if self.current_epoch < 2 else 0.5

    def asks(self, x: Tensor) -> bool:
        return bool((torch.full((3,), self.scale, device=x.device) > 1).all())


class OfTheBatch(Asks):
    def asks(self, x: Tensor) -> bool:
        return bool((torch.zeros_like(x) == x).all())


class Drawn(Asks):
    def asks(self, x: Tensor) -> bool:
        return bool((torch.rand(4, device=x.device) < 2).all())


class WrittenInto(Asks):
    """A constant, until something of the batch is written into a view of it."""

    def asks(self, x: Tensor) -> bool:
        zeros = torch.zeros(12, device=x.device)
        zeros[:6].copy_(x[0, :6])
        return bool((zeros == 0).all())


class OfAParameter(Asks):
    def asks(self, x: Tensor) -> bool:
        return bool((torch.ones(4, device=x.device) > self.head.bias).all())


@pytest.mark.parametrize("cls", [Compares, FromTheHost])
def test_known(tmp_path: Path, accelerator: str, cls: type[Asks]) -> None:
    became(row(tmp_path, accelerator, cls).graph, replayed=18, eager=RAGGED)


def test_a_number_that_moves_seldom(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, KnowsANumber)
    because = ["`scale` of the `KnowsANumber` changed from 2.0 to 0.5"]
    became(done.graph, replayed=15, captures=2, because=because, eager=RAGGED)


@pytest.mark.parametrize("cls", [OfTheBatch, Drawn, WrittenInto, OfAParameter])
def test_not_known(tmp_path: Path, accelerator: str, cls: type[Asks]) -> None:
    refused(tmp_path, accelerator, cls, match=r"cannot hold `\.item\(\)`.*test_known")


class Encoder(Net):
    """Torch's own encoder asks whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3, device=x.device)
        series = torch.stack([x, x + 1, x * 2], dim=1)
        return super().forward(self.encoder(series, mask=mask).mean(1))


def test_an_encoder(tmp_path: Path, accelerator: str) -> None:
    became(row(tmp_path, accelerator, Encoder).graph, replayed=18, eager=RAGGED)
