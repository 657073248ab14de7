r"""A character-level GPT which learns to write Python from the sources of the standard library.

They come with Python: there is nothing to download. The training ends with a sample of what the
model writes.

    python examples/char_gpt.py fit
    lightning-cudagraph fit --config configs/char_gpt.yaml

On several GPUs, here two; `examples/slurm/char_gpt.sbatch` is for several machines:

    torchrun --standalone --nproc-per-node 2 examples/char_gpt.py fit \
        --trainer.strategy ddp --trainer.devices 2
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Newline and the printable ASCII characters: fixed, so that the model does not depend on the text.
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = "?"  # stands for every other character

# Besides the modules at the top level of the standard library.
PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging",
    "multiprocessing", "unittest", "urllib", "wsgiref", "xml",
)  # fmt: skip

Batch = tuple[Tensor, Tensor]


def encode(text: str) -> Tensor:
    """Return the indices in `VOCABULARY` of the characters of a text, as uint8."""
    index_of_byte = torch.full((256,), VOCABULARY.index(UNKNOWN), dtype=torch.uint8)
    for index, char in enumerate(VOCABULARY):
        index_of_byte[ord(char)] = index
    ascii_bytes = bytearray(text.encode("ascii", errors="replace"))  # by UNKNOWN, too
    return index_of_byte[torch.frombuffer(ascii_bytes, dtype=torch.uint8).int()]


def decode(tokens: Tensor) -> str:
    """Return the text of a vector of indices in `VOCABULARY`."""
    return "".join(VOCABULARY[index] for index in tokens.tolist())


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each position to itself and to those before it.

    Args:
        n_head: Number of heads; divides `n_embd`.
        n_embd: Width of the residual stream.
        dropout: Probability of dropping an attention weight and an element of the output.
    """

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f"`n_embd` must be a multiple of `n_head`, got {n_embd=} and {n_head=}.")
        self.n_head = n_head
        self.dropout = dropout
        self.qkv_proj = nn.Linear(n_embd, 3 * n_embd)
        self.out_proj = nn.Linear(n_embd, n_embd)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv_proj(x).view(batch, length, 3, self.n_head, width // self.n_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, head, length, head width)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        return self.out_dropout(self.out_proj(attended))


class MLP(nn.Sequential):
    """The feed-forward half of a block, four times as wide inside.

    Args:
        n_embd: Width of the residual stream.
        dropout: Probability of dropping an element of the output.
    """

    def __init__(self, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.in_proj = nn.Linear(n_embd, 4 * n_embd)
        self.gelu = nn.GELU()
        self.out_proj = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)


class Block(nn.Module):
    """A pre-norm transformer block.

    Args:
        n_head: Number of attention heads.
        n_embd: Width of the residual stream.
        dropout: Probability of dropping, in the attention and in the MLP.
    """

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_head, n_embd, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CharGPT(L.LightningModule):
    """A GPT over the 96 characters of `VOCABULARY`.

    Logged metrics: `train_loss` (each step and each epoch) and `val_loss`, both in nats per
    character, and `val_bits_per_char`.

    Args:
        n_layer: Number of transformer blocks.
        n_head: Number of attention heads; divides `n_embd`.
        n_embd: Width of the residual stream.
        block_size: Longest context, in characters. `CharData` must not give longer windows.
        dropout: Probability of dropping, wherever the model drops.
        lr: Learning rate after the warm-up.
        min_lr_ratio: Learning rate at the end of the decay, as a share of `lr`.
        warmup_steps: Optimizer steps over which the learning rate rises linearly to `lr`.
        decay_steps: Optimizer steps from the start of training to the end of the cosine decay; the
            whole training by default.
        weight_decay: Weight decay of matrices and embeddings. Biases and norms have none.
        sample_chars: Characters to write at the end of training; 0 for no sample.
        sample_prompt: Text that the sample starts with.
        sample_temperature: Below 1, likely characters become likelier; above 1, less so.
    """

    def __init__(
        self,
        n_layer: int = 6,
        n_head: int = 6,
        n_embd: int = 384,
        block_size: int = 256,
        dropout: float = 0.1,
        lr: float = 1e-3,
        min_lr_ratio: float = 0.1,
        warmup_steps: int = 100,
        decay_steps: int | None = None,
        weight_decay: float = 0.1,
        sample_chars: int = 500,
        sample_prompt: str = "def ",
        sample_temperature: float = 0.8,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.block_size = block_size
        self.lr = lr
        self.min_lr_ratio = min_lr_ratio
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.weight_decay = weight_decay
        self.sample_chars = sample_chars
        self.sample_prompt = sample_prompt
        self.sample_temperature = sample_temperature

        self.token_embedding = nn.Embedding(len(VOCABULARY), n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(n_head, n_embd, dropout) for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, len(VOCABULARY), bias=False)
        self._init_weights(n_layer)

    def _init_weights(self, n_layer: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # The residual stream is a sum of 2 * n_layer outputs: scaled like this, they do not
                # let its variance grow with depth.
                std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("out_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next characters.

        Args:
            tokens: Indices in `VOCABULARY`, (batch, length).

        Returns:
            Logits of the character after each one, (batch, length, character).
        """
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = self.embedding_dropout(self.token_embedding(tokens) + positions)
        return self.head(self.ln_f(self.blocks(x)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_bits_per_char": loss / math.log(2)})

    def _loss(self, batch: Batch) -> Tensor:
        tokens, next_tokens = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), next_tokens.flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=(0.9, 0.99),
            fused=True,
        )
        decay_steps = self.decay_steps or self.trainer.estimated_stepping_batches

        def lr_factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            progress = (step - self.warmup_steps) / max(1, decay_steps - self.warmup_steps)
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
            return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Fused optimizers unscale float16 gradients inside their step, too late for clipping, so
        # Lightning refuses to clip for them under any mixed precision. Nothing scales bfloat16.
        if self.trainer.scaler is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val and gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        elif gradient_clip_val:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def on_train_end(self) -> None:
        if self.sample_chars == 0 or not self.trainer.is_global_zero:
            return
        sample = self.generate(self.sample_prompt, self.sample_chars, self.sample_temperature)
        print(f"\nA sample after {self.global_step} steps:\n\n{sample}\n")
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # TensorBoard renders Markdown, which leaves text behind four spaces as it is.
                indented = "\n".join("    " + line for line in sample.split("\n"))
                logger.experiment.add_text("sample", indented, global_step=self.global_step)

    @torch.no_grad()
    def generate(self, prompt: str, num_chars: int, temperature: float = 1.0, seed: int = 0) -> str:
        """Continue a text, one character at a time.

        Args:
            prompt: Text to continue, at least one character.
            num_chars: Number of characters to add.
            temperature: Divides the logits before a character is drawn.
            seed: Seed of the draws. The global random state stays as it is.

        Returns:
            The prompt and its continuation.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = encode(prompt).long().to(self.device).unsqueeze(0)
        was_training = self.training
        self.eval()
        for _ in range(num_chars):
            logits = self(tokens[:, -self.block_size :])[:, -1].float() / temperature
            next_token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, next_token), dim=1)
        self.train(was_training)
        return decode(tokens[0])


class TextWindows(Dataset[Batch]):
    """Windows of a text, each with the same window one character later as its target.

    Args:
        text: The whole text as indices in the vocabulary, uint8.
        offsets: Where in the text each window starts.
        block_size: Length of a window in characters.
    """

    def __init__(self, text: Tensor, offsets: Tensor, block_size: int) -> None:
        self.offsets = offsets
        self.windows = text.unfold(0, block_size, 1)  # a view: row i is text[i : i + block_size]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Batch:
        offset = self.offsets[index]
        return self.windows[offset].long(), self.windows[offset + 1].long()

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        # What the loader calls for a whole batch: a few index operations, not many small tensors.
        offsets = self.offsets[torch.tensor(indices)]
        return self.windows[offsets].long(), self.windows[offsets + 1].long()


def already_collated(batch: Any) -> Any:
    """Collate function for a dataset that returns whole batches."""
    return batch


class CharData(L.LightningDataModule):
    """Random windows of the standard library's sources; every tenth file is for validation only.

    A batch is a pair of int64 tensors (batch_size, block_size): characters, and the characters that
    follow them. Every epoch gives the same windows in the same order: for windows that are always
    new, make one epoch as long as the training.

    Args:
        batch_size: Windows in a batch.
        block_size: Length of a window in characters. Not longer than the model's `block_size`.
        train_batches: Batches in an epoch.
        val_batches: Batches in a validation; their windows are spread evenly over its files.
        max_chars: Characters of source text to read at most.
        num_workers: Worker processes of the training loader. A batch is a few index operations, so
            that none is the fastest.
        seed: Seed of the windows' places.
    """

    def __init__(
        self,
        batch_size: int = 8,
        block_size: int = 256,
        train_batches: int = 10_000,
        val_batches: int = 50,
        max_chars: int = 8_000_000,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.block_size = block_size
        self.train_batches = train_batches
        self.val_batches = val_batches
        self.max_chars = max_chars
        self.num_workers = num_workers
        self.seed = seed

    def setup(self, stage: str) -> None:
        train_text, val_text = self._read_texts()
        generator = torch.Generator().manual_seed(self.seed)
        train_offsets = torch.randint(
            len(train_text) - self.block_size,
            (self.train_batches * self.batch_size,),
            generator=generator,
        )
        last_val_offset = len(val_text) - self.block_size - 1
        val_offsets = torch.linspace(0, last_val_offset, self.val_batches * self.batch_size).long()
        self.train_set = TextWindows(train_text, train_offsets, self.block_size)
        self.val_set = TextWindows(val_text, val_offsets, self.block_size)

    def _read_texts(self) -> tuple[Tensor, Tensor]:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(root.glob("*.py"))
        for package in PACKAGES:
            files += sorted((root / package).rglob("*.py"))
        train_sources: list[str] = []
        val_sources: list[str] = []
        chars_left = self.max_chars
        for file_idx, file in enumerate(files):
            source = file.read_text(encoding="utf-8", errors="ignore")[:chars_left]
            (val_sources if file_idx % 10 == 0 else train_sources).append(source)
            chars_left -= len(source)
            if chars_left == 0:
                break
        train_source, val_source = "\n".join(train_sources), "\n".join(val_sources)
        if min(len(train_source), len(val_source)) <= self.block_size:
            raise ValueError(
                f"Too little text in {root} for windows of {self.block_size} characters:"
                f" {len(train_source)} characters for training and {len(val_source)} for validation"
                f" in {len(files)} files. Raise `max_chars`, or use a Python installation that has"
                " the sources of its standard library."
            )
        return encode(train_source), encode(val_source)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.train_set, self.num_workers)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.val_set)

    def _loader(self, dataset: TextWindows, num_workers: int = 0) -> DataLoader[Batch]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=already_collated,
            pin_memory=torch.cuda.is_available(),
        )


if __name__ == "__main__":
    from run import run_example  # in the folder of this script

    run_example(__file__)
