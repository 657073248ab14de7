"""Batches of many lengths: step time and memory, padded to the longest text or to a few lengths.

The GPT of `examples/char_gpt.py` on batches of 17 to 256 characters, and, if `transformers` is
installed, its BERT and GPT-2 with random weights and an `attention_mask`, on 17 to 128 tokens; each
length equally often. In each row, plain Lightning and the callback take turns, block by block in one
process (`benchmarks/fits.py`), and must end with the same weights. Captures and memory are those of
fits that follow, beside one on the longest batches alone, which has one graph. One row has a step that
no graph can hold, which the callback leaves to Lightning.

    python -m benchmarks.shapes

Without a GPU a small run on the emulator checks that it works: the figures mean nothing there.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import pairs
from benchmarks.fits import ON_GPU, pinned
from benchmarks.models import MODELS
from benchmarks.pairs import Row
from examples.char_gpt import VOCABULARY, CharGPT
from lightning_cudagraph import Buckets

__all__ = ["BUCKETS", "IN_BUCKETS", "LONGEST", "NO_GRAPH", "ROWS", "main", "measure_captures"]

_GPT = next(model for model in MODELS if model.name == "GPT")
_LENGTHS = range(17, 257) if ON_GPU else range(3, 17)
_TOKENS = range(17, 129) if ON_GPU else range(3, 17)
_ROWS_OF_BATCH = 8 if ON_GPU else 2
_IGNORED = -100
# The most that a row may take, as a share of plain Lightning's time.
_REGRET = 1.03
# Enough for its graph, and for some replays.
_BATCHES_OF_BUCKET = 16

BUCKETS = Buckets.from_sample(_LENGTHS, 8 if ON_GPU else 2, values={0: 0, 1: _IGNORED})


def _batches(batch_of: Callable[[int], Any], lengths: Sequence[int]) -> Callable[[], Any]:
    """A function that makes the next batch, of another length each time."""
    shuffled = [*lengths]
    random.Random(0).shuffle(shuffled)
    return map(batch_of, itertools.cycle(shuffled)).__next__


def _length_of_row(row: int, length: int) -> int:
    """The length of one text of a batch: the first is the longest, the others up to a tenth shorter."""
    return length - random.Random(row).randrange(1 + length // 10) if row else length


def batch_of(length: int) -> Any:
    """A batch of characters for the GPT."""
    tokens = torch.randint(len(VOCABULARY), (2, _ROWS_OF_BATCH, length))
    for row in range(_ROWS_OF_BATCH):
        tokens[0, row, _length_of_row(row, length) :] = 0
        tokens[1, row, _length_of_row(row, length) :] = _IGNORED
    return pinned((tokens[0].contiguous(), tokens[1].contiguous()))


_WORDS = 1000


def _texts(length: int, is_gpt: bool, multiple: int) -> Any:
    """A batch of tokens for Hugging Face, padded to a multiple."""
    to = -(-length // multiple) * multiple
    shape = _ROWS_OF_BATCH, to
    mask = torch.zeros(shape, dtype=torch.long)
    for row in range(_ROWS_OF_BATCH):
        mask[row, : _length_of_row(row, length)] = 1
    tokens = torch.randint(1, _WORDS, shape) * mask
    labels = torch.where(mask == 1, tokens, _IGNORED) if is_gpt else torch.randint(2, shape[:1])
    return pinned({"input_ids": tokens, "attention_mask": mask, "labels": labels})


class _Tuned(pl.LightningModule):
    """BERT for classification or GPT-2, with random weights."""

    def __init__(self, is_gpt: bool) -> None:
        super().__init__()
        import transformers

        width, layers = (256, 4) if ON_GPU else (16, 1)
        sizes: dict[str, Any] = {"vocab_size": _WORDS, "max_position_embeddings": max(_TOKENS)}
        sizes |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
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
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class _LossOnHost(CharGPT):
    """A step that no graph can hold."""

    def __init__(self) -> None:
        super().__init__(**_GPT.make(not ON_GPU).hparams)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 if loss.isfinite() else 0)


def _rows() -> dict[str, Row]:
    gpt = Row(
        lambda: _GPT.make(not ON_GPU),
        partial(_batches, batch_of, _LENGTHS),
        len(_LENGTHS),
        arguments={"precision": _GPT.precision, "gradient_clip_val": _GPT.clip},
    )
    eager = replace(
        gpt,
        make=_LossOnHost,
        batches=partial(_batches, batch_of, _LENGTHS[-1:]),
        callback={"on_unsupported": "eager"},
    )
    rows = {LONGEST: gpt, IN_BUCKETS: replace(gpt, buckets=BUCKETS), NO_GRAPH: eager}
    if find_spec("transformers") is None:
        return rows
    for name, is_gpt in (("BERT", False), ("GPT-2", True)):
        for how, multiple in (("the longest", 1), ("a multiple of 8", 8), ("one length", max(_TOKENS))):
            batches = partial(_batches, partial(_texts, is_gpt=is_gpt, multiple=multiple), _TOKENS)
            rows[f"{name} of Hugging Face, {how}"] = Row(
                partial(_Tuned, is_gpt), batches, len(_TOKENS), arguments={"precision": _GPT.precision}
            )
    return rows


LONGEST, IN_BUCKETS = "GPT, the longest of the batch", f"GPT, {len(BUCKETS.lengths)} buckets"
NO_GRAPH = "GPT that reads its loss on the host, without a graph"
ROWS = _rows()


@dataclass(frozen=True)
class Captures:
    """The captures of a fit, with their host time and the peaks of device memory; without a GPU 0."""

    captures: int
    capture_ms: float
    allocated_bytes: int
    reserved_bytes: int


def measure_captures() -> dict[str, Captures]:
    """Train with one graph, and with one a bucket."""
    row = ROWS[IN_BUCKETS]
    found = {}
    for name, lengths in (("the longest alone", BUCKETS.lengths[-1:]), (IN_BUCKETS, BUCKETS.lengths)):
        gc.collect()
        torch.cuda.empty_cache()
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        batches = [batch_of(length) for _ in range(_BATCHES_OF_BUCKET) for length in lengths]
        # Without a loader, Lightning takes a list for one of loaders.
        loader = DataLoader(batches, batch_size=None, collate_fn=tuple)
        _, summary = pairs.train(row, True, loader)
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found[name] = Captures(summary.captures, summary.capture_ms, *peaks)
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    # Within 160 steps each bucket has earned its graph.
    pairs.main("shapes", __doc__, ROWS, _REGRET, 160 if ON_GPU else 30, given)
    print("\n| graphs | captures | in all, ms | peak allocated, MiB | reserved, MiB |")
    print("|---|---|---|---|---|")
    for name, of in measure_captures().items():
        peaks = f"{of.allocated_bytes / 2**20:.0f} | {of.reserved_bytes / 2**20:.0f}"
        print(f"| {name} | {of.captures} | {of.capture_ms:.0f} | {peaks} |")


if __name__ == "__main__":
    main()
