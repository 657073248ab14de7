"""Hugging Face's BERT, trained to tell which package of the standard library a passage is from.

Weights are random and the text comes with Python: there is nothing to download. Replace
`from_config` by `from_pretrained` to fine-tune. Batches are those of `DataCollatorWithPadding`, of one
length, with an `attention_mask`.

    pip install transformers
    python examples/bert.py fit
    lightning-cudagraph fit --config configs/bert.yaml
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

try:
    import tokenizers
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"examples/bert.py needs Hugging Face's transformers ({error}): pip install transformers",
        name=error.name,
    ) from None

PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "unittest", "xml")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

Batch = dict[str, Tensor]


class BertClassifier(L.LightningModule):
    """`BertForSequenceClassification` with random weights.

    Logged metrics: `train_loss` (each step and each epoch), `val_loss` and `val_accuracy`.

    Args:
        vocab_size: Tokens that the tokenizer knows, at most.
        hidden_size: Width of the model; the feed-forward layers are four times as wide.
        num_layers: Number of transformer layers.
        num_heads: Number of attention heads; divides `hidden_size`.
        dropout: Probability of dropping, in the layers and in the attention.
        lr: Learning rate after the warm-up.
        warmup_steps: Optimizer steps over which the learning rate rises to `lr`.
        weight_decay: Weight decay, of all but biases and norms.
    """

    def __init__(
        self,
        vocab_size: int = 4096,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.1,
        lr: float = 5e-4,
        warmup_steps: int = 50,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        config = transformers.BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=4 * hidden_size,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=len(PACKAGES),
            pad_token_id=0,
        )
        self.model = transformers.AutoModelForSequenceClassification.from_config(config)
        self.val_accuracy = MulticlassAccuracy(len(PACKAGES), average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.model(**batch)
        self.val_accuracy(output.logits, batch["labels"])
        self.log("val_loss", output.loss)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.lr,
        )
        scheduler = transformers.get_linear_schedule_with_warmup(
            optimizer, self.warmup_steps, int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class PassagesData(L.LightningDataModule):
    """Passages of eight lines of the standard library's packages; every tenth is for validation.

    Args:
        batch_size: Passages in a batch.
        max_length: Tokens to which a passage is padded or cut.
        vocab_size: Tokens that the tokenizer learns, at most.
        max_passages: Passages of each package, at most.
        num_workers: Worker processes of the training loader.
        seed: Seed of the split.
    """

    def __init__(
        self,
        batch_size: int = 32,
        max_length: int = 128,
        vocab_size: int = 4096,
        max_passages: int = 1000,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.max_passages = max_passages
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str) -> None:
        texts, labels = self._passages()
        tokenizer = self._tokenizer(texts)
        encoded = tokenizer(texts, truncation=True, max_length=self.max_length)
        samples = [
            {"input_ids": ids, "attention_mask": mask, "labels": label}
            for ids, mask, label in zip(
                encoded["input_ids"], encoded["attention_mask"], labels, strict=True
            )
        ]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.seed))
        samples = [samples[index] for index in order.tolist()]
        held_out = len(samples) // 10
        self.val_set, self.train_set = samples[:held_out], samples[held_out:]
        # One length for all batches, so that one graph serves them all.
        self.collator = transformers.DataCollatorWithPadding(
            tokenizer, padding="max_length", max_length=self.max_length
        )

    def _passages(self) -> tuple[list[str], list[int]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        texts: list[str] = []
        labels: list[int] = []
        for label, package in enumerate(PACKAGES):
            lines = [
                line
                for file in sorted((root / package).rglob("*.py"))
                for line in file.read_text(encoding="utf-8", errors="ignore").splitlines()
                if line.strip() and package not in line
            ]
            found = ["\n".join(lines[at : at + 8]) for at in range(0, len(lines), 8)]
            texts += found[: self.max_passages]
            labels += [label] * min(len(found), self.max_passages)
        return texts, labels

    def _tokenizer(self, texts: list[str]) -> Any:
        """Learn a tokenizer of words and their parts, as BERT's."""
        words = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        words.normalizer = tokenizers.normalizers.BertNormalizer()
        words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        words.train_from_iterator(
            texts,
            tokenizers.trainers.WordPieceTrainer(
                vocab_size=self.vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
            ),
        )
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            special_tokens=[(token, words.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
        )
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=words,
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
        )

    def train_dataloader(self) -> DataLoader[Any]:
        # The last batch would have a shape of its own.
        return self._loader(self.train_set, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_set)

    def _loader(self, samples: list[Any], **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(
            samples,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            collate_fn=self.collator,
            pin_memory=torch.cuda.is_available(),
            **kwargs,
        )


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
