"""A run whose processes are started from within Python, without the callback and with it.

python -m tests.distributed.started cpu ddp_fork
"""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, loader, make


class _Replays(Callback):
    """Fails in a process without replays: its own state does not return to the caller."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CUDAGraphCallback):
                assert callback.summary.fit.replayed >= 10, callback.summary


def _weights(accelerator: str, strategy: str, callbacks: list[Callback]) -> dict[str, Tensor]:
    module = make(Net)
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=strategy,
        max_epochs=4,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(batches=14), loader(seed=1, batches=2))
    return module.state_dict()


def main(accelerator: str, strategy: str) -> None:
    """Train without the callback and with it, and compare."""
    plain = _weights(accelerator, strategy, [])
    graph = _weights(accelerator, strategy, [CUDAGraphCallback(timings=None), _Replays()])
    assert plain.keys() == graph.keys()
    differing = [name for name, value in plain.items() if not torch.equal(value, graph[name])]
    assert not differing, differing
    print(f"{strategy}: the same")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
