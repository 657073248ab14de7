"""Padding of a trainer's batches to buckets, as they come from its loaders."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_cudagraph.compat.method_patches import MethodPatch, patch_method
from lightning_cudagraph.tensors.buckets import Buckets

_CONVERT = "convert_input"


class Padding:
    """The padding of a callback's trainer, from the first stage that begins to the last that ends."""

    def __init__(self) -> None:
        self._patches = ExitStack()
        self._stages = 0  # two in a `fit` that has called another method of the trainer

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy, or a pickle when loaded, pads nothing

    def begin(
        self, trainer: pl.Trainer, stage: str, buckets: Sequence[Buckets], evaluation: bool
    ) -> None:
        if stage == TrainerFn.FITTING:
            self.close()  # of a run that ended without a teardown
        if buckets and not _are_padded(trainer):
            self.close()
            _pad_batches(trainer, buckets, evaluation, self._patches)
        self._stages += 1

    def end(self) -> None:
        self._stages -= 1
        if self._stages == 0:
            self.close()

    def close(self) -> None:
        self._stages = 0
        self._patches.close()


def _pad_batches(
    trainer: pl.Trainer, buckets: Sequence[Buckets], evaluation: bool, patches: ExitStack
) -> None:
    """Pad the batches of a trainer, before its hooks see them.

    Lightning's loops hand each batch of a loader to the precision plugin first. This happens with graphs
    and without them, so that all runs with the same buckets have the same numbers.
    """
    plugin = trainer.precision_plugin
    convert = getattr(plugin, _CONVERT)

    def convert_padded(batch: Any) -> Any:
        is_padded = evaluation or trainer.state.stage is RunningStage.TRAINING
        if is_padded and batch is not None:  # a batch that Lightning leaves out
            for each in buckets:
                batch = each.pad(batch)
        return convert(batch)

    patch_method(plugin, _CONVERT, convert_padded, patches)


def _are_padded(trainer: pl.Trainer) -> bool:
    return type(vars(trainer.precision_plugin).get(_CONVERT)) is MethodPatch
