"""Models of Hugging Face with random weights and an `attention_mask`, in batches padded in several ways.

`tests/gpu/test_hugging_face.py` collects these tests again, on CUDA, with larger models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cudagraph import Buckets, CUDAGraphCallback
from tests.harness import Trace, assert_same, make, train

pytestmark = pytest.mark.long

# Of the longest text in a batch of two.
LENGTHS = (7, 12, 16, 21, 27, 32)
LONGEST = LENGTHS[-1]
STEPS = 60


class Tuned(pl.LightningModule):
    """A model that returns its loss."""

    def __init__(self, is_gpt: bool, width: int, layers: int) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes: dict[str, Any] = {"vocab_size": 99, "max_position_embeddings": LONGEST}
        sizes |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
        if is_gpt:
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
        else:
            config = transformers.BertConfig(**sizes, intermediate_size=4 * width)
            self.model = transformers.BertForSequenceClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def texts(is_gpt: bool, full_every: int = 0) -> list[dict[str, list[int]]]:
    """Pairs of texts, the second of which is shorter; with `full_every`, both of full length in some."""
    generator = random.Random(0)
    found = []
    for pair in range(STEPS):
        longest = generator.choice(LENGTHS)
        lengths = [longest, generator.randrange(3, longest)]
        if full_every and pair % full_every == 0:
            lengths = [LONGEST, LONGEST]
        for length in lengths:
            tokens = [generator.randrange(1, 99) for _ in range(length)]
            labels = tokens if is_gpt else [tokens[0] % 2]
            found.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": labels})
    return found


def collated(multiple: int) -> Callable[[list[dict[str, list[int]]]], dict[str, Tensor]]:
    """A collate function that pads to a multiple."""

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        to = -(-longest // multiple) * multiple

        def padded(name: str, value: int) -> Tensor:
            rows = [sample[name] for sample in samples]
            if len(rows[0]) == 1:  # a label of a text
                return torch.tensor(rows).squeeze(1)
            return torch.tensor([row + [value] * (to - len(row)) for row in rows])

        values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {name: padded(name, value) for name, value in values.items()}

    return collate


def both(
    tmp_path: Path, accelerator: str, is_gpt: bool, multiple: int, full_every: int = 0, **kwargs: Any
) -> Trace:
    """Train without and with the callback; the runs must be equal. Returns the second."""
    width, layers = (256, 4) if accelerator == "gpu" else (16, 1)
    runs = [
        train(
            make(lambda: Tuned(is_gpt, width, layers)),
            tmp_path / backend,
            CUDAGraphCallback(backend=backend, **kwargs),
            accelerator=accelerator,
            train_loader=DataLoader(texts(is_gpt, full_every), 2, collate_fn=collated(multiple)),  # type: ignore[arg-type]
            max_epochs=1,
            watched=False,
            checkpoint_every=0,
            fit=lambda trainer, module, loader, _, **others: trainer.fit(module, loader, **others),
        )
        for backend in ("off", "auto")
    ]
    assert_same(*runs)
    return runs[1]


MODELS = pytest.mark.parametrize("is_gpt", [False, True], ids=["bert", "gpt2"])


@pytest.mark.spread
@pytest.mark.parametrize(
    ("multiple", "captures", "replayed"),
    [(1, 3, 10), (8, 3, 25), (LONGEST, 1, STEPS - 3)],
    ids=["longest", "eights", "fixed"],
)
@MODELS
def test_padded_in_the_loader(
    tmp_path: Path, accelerator: str, is_gpt: bool, multiple: int, captures: int, replayed: int
) -> None:
    run = both(tmp_path, accelerator, is_gpt, multiple)
    assert run.counts.captures >= captures
    assert run.counts.replayed >= replayed


@pytest.mark.spread
@MODELS
def test_padded_to_buckets(tmp_path: Path, accelerator: str, is_gpt: bool) -> None:
    values = {"input_ids": 0, "attention_mask": 0, **({"labels": -100} if is_gpt else {})}
    run = both(tmp_path, accelerator, is_gpt, 1, pad_to=Buckets([16, LONGEST], values))
    assert run.counts.captures == 2
    assert run.counts.replayed >= 45


@pytest.mark.spread
@MODELS
def test_batches_without_padding(tmp_path: Path, accelerator: str, is_gpt: bool) -> None:
    """An eager step drops their mask, which it looks at; a captured one keeps every mask."""
    run = both(tmp_path, accelerator, is_gpt, LONGEST, full_every=3)
    assert run.counts.replayed == STEPS - 3
