"""Batches on their way to the device: from the loader straight into the static buffers.

Lightning moves a batch to the device, and a replay would copy it from there into the buffers that the
graph reads. Where nobody but Lightning sees the batch in between, one copy does: from the loader's
memory, pinned or not, into the buffers. Whoever else sees batches (hooks of the user's) gets ones of
their own, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage

from lightning_cudagraph.capture.static import StaticBatch
from lightning_cudagraph.hooks import batches_unseen

__all__ = ["BatchTransfer"]


class BatchTransfer:
    """In the place of `Strategy.batch_to_device`.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        original: what it takes the place of.
        static: the static buffers that graphs read now, if there are graphs.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        original: Callable[..., Any],
        static: Callable[[], StaticBatch | None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._original = original
        self._static = static
        self._unseen: bool | None = None

    def suspect(self) -> None:
        """Something other than training steps has happened, and can have changed who sees batches."""
        self._unseen = None

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        static = self._static()
        if static is not None and self._trainer.state.stage is RunningStage.TRAINING:
            if self._unseen is None:
                self._unseen = self._is_unseen()
            tensors = static.tensors_of(batch, "cpu") if self._unseen else None
            if tensors is not None:
                static.fill(tensors)
                return static.batch
        return self._original(batch, *args, **kwargs)

    def _is_unseen(self) -> bool:
        by_lightning = getattr(self._original, "__func__", None) is Strategy.batch_to_device
        return by_lightning and batches_unseen(self._trainer, self._module)
