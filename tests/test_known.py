"""What torch's own layers read back of masks that are made inside the step is no obstacle to a capture.

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


class Encoder(Net):
    """Torch's own encoder asks whether its mask is causal, and takes another way if it is."""

    far = float("-inf")

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        series = torch.stack([x, x + 1, x * 2], dim=1)
        return super().forward(self.encoder(series, mask=self.mask(x)).mean(1))

    def mask(self, x: Tensor) -> Tensor:
        return nn.Transformer.generate_square_subsequent_mask(3, device=x.device)


class Compared(Encoder):
    def mask(self, x: Tensor) -> Tensor:
        mask = torch.ones(3, 3, device=x.device).tril()
        return torch.zeros_like(mask).masked_fill(mask == 0, float("-inf"))


class FromTheHost(Encoder):
    """Made on the host, and copied to the device."""

    def mask(self, x: Tensor) -> Tensor:
        return torch.triu(torch.full((3, 3), float("-inf")), diagonal=1).to(x.device)


class NotCausal(Encoder):
    def mask(self, x: Tensor) -> Tensor:
        return torch.eye(3, device=x.device)


class KnowsANumber(Encoder):
    """Of a Python number that moves seldom, which leads to a new capture."""

    def on_train_epoch_start(self) -> None:
        self.far = float("-inf") if self.current_epoch < 2 else -1.0

    def mask(self, x: Tensor) -> Tensor:
        return torch.triu(torch.full((3, 3), self.far, device=x.device), diagonal=1)


class OfTheBatch(Encoder):
    def mask(self, x: Tensor) -> Tensor:
        return causal(3, x.device) + x[:3, :3] * 0


class Drawn(Encoder):
    def mask(self, x: Tensor) -> Tensor:
        return torch.rand(3, 3, device=x.device)


class WrittenInto(Encoder):
    """A constant, until something of the batch is written into a view of it."""

    def mask(self, x: Tensor) -> Tensor:
        mask = causal(3, x.device)
        mask[:1].copy_(x[:1, :3])
        return mask


class OfAParameter(Encoder):
    def mask(self, x: Tensor) -> Tensor:
        return self.head.bias[:3].expand(3, 3)


class OtherMemory(Encoder):
    """Without an op, its numbers become those of the batch."""

    def mask(self, x: Tensor) -> Tensor:
        mask = causal(3, x.device)
        mask.data = torch.empty(0, device=x.device)
        mask.data = x[:3, :3].clone()
        return mask


class OtherPlace(Encoder):
    """The same memory, read in another order."""

    def mask(self, x: Tensor) -> Tensor:
        mask = causal(3, x.device)
        mask.data = mask.detach().as_strided((3, 3), (1, 3))
        return mask


class AddressAsked(Encoder):
    """A kernel of an extension could have written there."""

    def mask(self, x: Tensor) -> Tensor:
        mask = causal(3, x.device)
        assert mask.data_ptr()
        return mask


class Asks(Net):
    """A branch of the user's own, on what could be known."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * 2 if bool((torch.ones(4, device=self.device) > 0).all()) else loss


@pytest.mark.long
@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", [Encoder, Compared, FromTheHost, NotCausal])
def test_known(tmp_path: Path, accelerator: str, cls: type[Encoder]) -> None:
    became(row(tmp_path, accelerator, cls).graph, replayed=18, eager=RAGGED)


@pytest.mark.long
def test_a_number_that_moves_seldom(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, KnowsANumber)
    because = ["`far` of the `KnowsANumber` changed from -inf to -1.0"]
    became(done.graph, replayed=15, captures=2, because=because, eager=RAGGED)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "cls", [OfTheBatch, Drawn, WrittenInto, OfAParameter, OtherMemory, OtherPlace, AddressAsked, Asks]
)
def test_not_known(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    refused(tmp_path, accelerator, cls, match=r"cannot hold `\.item\(\)`.*test_known")
