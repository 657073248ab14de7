"""Batches on their way to the device: from the loader straight into the static buffers.

Lightning moves a batch to the device, and a replay would copy it from there into the buffers that the
graph reads. Where nobody but Lightning sees the batch in between, one copy does: from the loader's
memory, pinned or not, into the buffers. Whoever else sees batches (hooks of the user's, his own calls of
`batch_to_device`, and steps that are not replays) gets ones of their own, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage

from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.hooks.user_hooks import batches_unseen

__all__ = ["TRANSFER", "BatchTransfer"]

# What Lightning's loops call the hook that is running, while they move a batch of theirs.
TRANSFER = "batch_to_device"


class BatchTransfer:
    """In the place of `Strategy.batch_to_device`.

    Args:
        trainer: the trainer.
        module: the module that it trains.
        original: what it takes the place of.
        static: the static buffers that graphs read now, if there are graphs.
        copying: what is entered around the move of the batch of a training step, if it is timed.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        original: Callable[..., Any],
        static: Callable[[], StaticBatch | None],
        copying: Callable[[], AbstractContextManager[None] | None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._original = original
        self._static = static
        self._copying = copying
        self._unseen: bool | None = None
        # The static batch that was handed on last, and what Lightning would have moved.
        self._handed: tuple[Any, Any, Any, Any] | None = None

    def suspect(self) -> None:
        """Something other than training steps has happened, and can have changed who sees batches."""
        self._unseen = None

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._module._current_fx_name != TRANSFER:
            # Others who move batches (the user, or a loader of his that does so ahead) may keep them.
            return self._original(batch, *args, **kwargs)
        self._handed = None
        static = self._static()
        if static is None or self._trainer.state.stage is not RunningStage.TRAINING:
            return self._original(batch, *args, **kwargs)
        given = self.straight(batch, *args, **kwargs)
        if given is not None:
            return given
        if (copying := self._copying()) is None:
            return self._original(batch, *args, **kwargs)
        with copying:
            return self._original(batch, *args, **kwargs)

    def straight(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Copy a batch of the training loop into the static buffers, if nobody else sees it.

        Args:
            batch: as the loader has it.
            *args: what else Lightning gives to `batch_to_device`.
            **kwargs: what else Lightning gives to `batch_to_device`.

        Returns:
            The static batch, or None if nothing was copied.
        """
        if (static := self._static()) is None:
            return None
        if self._unseen is None:
            self._unseen = self._is_unseen()
        tensors = static.tensors_of(batch, "cpu") if self._unseen else None
        if tensors is None:
            return None
        if (copying := self._copying()) is None:
            static.fill(tensors)
        else:
            with copying:
                static.fill(tensors)
        self._handed = static.batch, batch, args, kwargs
        return static.batch

    def own(self, batch: Any) -> Any:
        """For a step that may keep its batch: the one that Lightning would have made.

        Args:
            batch: the batch of the step.

        Returns:
            The same, or a batch of its own if it lies in the static buffers.
        """
        if self._handed is None or batch is not self._handed[0]:
            return batch
        _, batch, args, kwargs = self._handed
        return self._original(batch, *args, **kwargs)

    def use_own(self, closure: GraphClosure) -> None:
        """Before an eager step: what it keeps of its batch stays as it is, also where graphs go on.

        Args:
            closure: Lightning's, for the batch.
        """
        before = closure.batch
        if (batch := self.own(before)) is before:
            return
        closure.kwargs[next(iter(closure.kwargs))] = batch
        results = self._trainer.fit_loop.epoch_loop._results
        if results.batch is before:  # of which `self.log` takes the batch size
            results.batch = batch

    def _is_unseen(self) -> bool:
        by_lightning = getattr(self._original, "__func__", None) is Strategy.batch_to_device
        return by_lightning and batches_unseen(self._trainer, self._module)
