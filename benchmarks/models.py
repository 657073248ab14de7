"""The models of the benchmarks: from launch-bound to compute-bound, each one Lightning module.

Every model logs one value, uses a fused optimizer and takes batches that are ready in host memory. The
tiny sizes fit on a CPU, to check that everything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.nets import DLRM, ActorCritic, Critics, ViT, critics_loss, ppo_loss
from examples.char_gpt import VOCABULARY, CharGPT

__all__ = ["CRITICS", "MODELS", "WIDE_MLP", "WORKLOADS", "Workload", "leaf_names"]

CLASSES = 10
NUMBERS = 13
TABLES = 26


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Attributes:
        name: of the model.
        description: its size, in words.
        make: builds the module; with True, a tiny one.
        batch: makes one batch in host memory, inputs and targets; with True, a tiny one.
        precision: of the trainer.
        clip: the norm at which gradients are clipped; None for no clipping.
        needs: the package that the model comes from, if it is not one of this project's.
    """

    name: str
    description: str
    make: Callable[[bool], pl.LightningModule]
    batch: Callable[[bool], Any]
    precision: Any = "bf16-mixed"
    clip: float | None = None
    needs: str | None = None

    @property
    def is_here(self) -> bool:
        """True if the package that it needs is installed."""
        return self.needs is None or find_spec(self.needs) is not None


def leaf_names(module: nn.Module) -> list[str]:
    """The names of all modules that have no members."""
    return [
        name
        for name, member in module.named_modules()
        if name and next(member.children(), None) is None and type(member).__module__ != "torchmetrics"
    ]


class _Trained(pl.LightningModule):
    """A model with a loss between its outputs and the targets, and one logged value."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.net = net
        self._criterion = loss

    def forward(self, inputs: Any) -> Any:
        return self.net(inputs)

    def training_step(self, batch: tuple[Any, Any], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def _loss(self, batch: tuple[Any, Any]) -> Tensor:
        inputs, targets = batch
        return self._criterion(self(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class _Transformers(_Trained):
    """A classifier of Hugging Face's transformers."""

    def forward(self, inputs: Tensor) -> Tensor:
        # Without a mask, its code makes one of a constant of the host where a capture is under way, and
        # none elsewhere.
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=inputs.device)
        return self.net(input_ids=inputs, attention_mask=mask).logits


def _mlp(width: int, linears: int) -> pl.LightningModule:
    layers: list[nn.Module] = []
    for _ in range(linears - 1):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    return _Trained(nn.Sequential(*layers, nn.Linear(width, width)), nn.functional.mse_loss)


def _gpt(tiny: bool) -> pl.LightningModule:
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16} if tiny else {}
    return CharGPT(**size, decay_steps=10_000, sample_chars=0)  # type: ignore[arg-type]


def _wide_gpt(tiny: bool) -> pl.LightningModule:
    size = (
        {"n_layer": 1, "n_head": 2, "n_embd": 32}
        if tiny
        else {"n_layer": 4, "n_head": 16, "n_embd": 2048}
    )
    return CharGPT(**size, decay_steps=10_000, sample_chars=0)  # type: ignore[arg-type]


def _resnet18(tiny: bool) -> pl.LightningModule:
    from torchvision.models import resnet18

    return _Trained(resnet18(num_classes=CLASSES), nn.functional.cross_entropy)


def _bert_base(tiny: bool) -> pl.LightningModule:
    from transformers import BertConfig, BertForSequenceClassification

    size: dict[str, Any] = {"num_labels": CLASSES}
    if tiny:
        size |= {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
    config = BertConfig(**size, attn_implementation="eager")
    return _Transformers(BertForSequenceClassification(config), nn.functional.cross_entropy)


def _dlrm(tiny: bool) -> pl.LightningModule:
    net = DLRM(NUMBERS, 4, 16, 4) if tiny else DLRM(NUMBERS, TABLES, 1000, 32)
    return _Trained(net, nn.functional.binary_cross_entropy_with_logits)


def _vit_tiny(tiny: bool) -> pl.LightningModule:
    net = ViT(16, 8, 2, 2, 16, CLASSES) if tiny else ViT(96, 16, 12, 3, 192, CLASSES)
    return _Trained(net, nn.functional.cross_entropy)


def _vectors(rows: int, width: int, outputs: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width if outputs is None else outputs)


def _tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length))


def _images(rows: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, side, side), torch.randint(0, CLASSES, (rows,))


def _characters(rows: int, tiny: bool) -> tuple[Tensor, Tensor]:
    rows, length = (2, 16) if tiny else (rows, 256)
    return _tokens(rows, length, len(VOCABULARY)), _tokens(rows, length, len(VOCABULARY))


def _sentences(tiny: bool) -> tuple[Tensor, Tensor]:
    rows, length, words = (2, 8, 96) if tiny else (4, 128, 30_522)
    return _tokens(rows, length, words), torch.randint(0, CLASSES, (rows,))


def _clicks(rows: int, tiny: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows, tables, entries = (8, 4, 16) if tiny else (rows, TABLES, 1000)
    inputs = torch.randn(rows, NUMBERS), torch.randint(0, entries, (rows, tables))
    return inputs, torch.randint(0, 2, (rows,)).float()


def _transitions(tiny: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    rows = 8 if tiny else 256
    return _vectors(rows, 24, 6), (torch.randn(rows), torch.randn(rows), torch.randn(rows))


# Those that timings are measured on.
MODELS = (
    Workload(
        "MLP",
        "13 layers of width 256, dropout, batch 128, fp32",
        lambda tiny: _mlp(16 if tiny else 256, 13),
        lambda tiny: _vectors(8 if tiny else 128, 16 if tiny else 256),
        "32-true",
    ),
    Workload(
        "GPT",
        "6 layers of width 384, batch 8 x 256, bf16-mixed, clipping, a schedule",
        _gpt,
        partial(_characters, 8),
        clip=1.0,
    ),
    Workload(
        "ResNet-18",
        "batch 32 of 64 x 64, bf16-mixed",
        _resnet18,
        lambda tiny: _images(2, 32) if tiny else _images(32, 64),
        needs="torchvision",
    ),
    Workload("BERT-base", "batch 4 x 128, bf16-mixed", _bert_base, _sentences, needs="transformers"),
)

# Its layers take long enough to be held against a profiler.
WIDE_MLP = Workload(
    "wide MLP",
    "6 layers of width 2048, dropout, batch 512, fp32",
    lambda tiny: _mlp(32 if tiny else 2048, 6),
    lambda tiny: _vectors(8 if tiny else 512, 32 if tiny else 2048),
    "32-true",
)

CRITICS = Workload(
    "two critics",
    "24 to 256 to 256 to 1, batch 256, fp32",
    lambda tiny: _Trained(Critics(2, 24, 16 if tiny else 256), critics_loss),
    lambda tiny: _vectors(8 if tiny else 256, 24, 1),
    "32-true",
)

_MLP, _GPT, _RESNET, _BERT = MODELS

# All of them, for the comparison with peers.
WORKLOADS = (
    CRITICS,
    Workload(
        "actor-critic",
        "two nets of width 256, the loss of PPO, batch 256, fp32, clipping",
        lambda tiny: _Trained(ActorCritic(24, 6, 16 if tiny else 256), ppo_loss),
        _transitions,
        "32-true",
        clip=0.5,
    ),
    *(
        Workload(
            f"DLRM {rows}",
            f"{TABLES} tables of 1000 x 32, dot products, batch {rows}, fp32",
            _dlrm,
            partial(_clicks, rows),
            "32-true",
        )
        for rows in (128, 512, 4096)
    ),
    _MLP,
    _GPT,
    _RESNET,
    Workload(
        "ViT-tiny",
        "12 layers of width 192, batch 16 of 96 x 96, bf16-mixed",
        _vit_tiny,
        lambda tiny: _images(2, 16) if tiny else _images(16, 96),
    ),
    _BERT,
    Workload(
        "compute-bound GPT",
        "4 layers of width 2048, batch 32 x 256, bf16-mixed, clipping, a schedule",
        _wide_gpt,
        partial(_characters, 32),
        clip=1.0,
    ),
)
