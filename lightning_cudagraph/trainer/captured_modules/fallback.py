"""The fall from whole steps to named modules, once a capture shows that no graph can hold the step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.compat.method_patches import Original, patch_method
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.trainer.captured_modules.training import ModulesTraining
from lightning_cudagraph.trainer.manual.training import ManualTraining
from lightning_cudagraph.trainer.training.loop import GraphedTraining


class Fallback:
    """Modules that are captured instead of whole steps, from the batch after their refusal on."""

    def __init__(
        self, trainer: pl.Trainer, modules: ModulesTraining, begin: Callable[[ModulesTraining], None]
    ) -> None:
        self._loop, self._modules, self._begin = trainer.fit_loop.epoch_loop, modules, begin
        self._patches = ExitStack()
        self._error: UnsupportedError | None = None

    def narrow(self, error: UnsupportedError) -> bool:
        """Note why whole steps have no graph; modules are captured from the next batch on."""
        self._error = error
        return True

    def watch(self, whole: GraphedTraining | ManualTraining) -> None:
        """Look before each batch that is not replayed; called before `whole` patches the loop."""
        advance = Original(self._loop, "advance")

        def advanced(data_fetcher: Any) -> None:
            if self._error is not None:
                self._replace(whole, self._error)
            advance(data_fetcher)

        patch_method(self._loop, "advance", advanced, self._patches)

    def _replace(self, whole: GraphedTraining | ManualTraining, error: UnsupportedError) -> None:
        optimizer = whole.optimizer_is_eager if isinstance(whole, GraphedTraining) else ""
        whole.close()
        self.close()
        self._modules.install()
        self._modules.replace(whole.counts, error, optimizer)
        self._begin(self._modules)

    def close(self) -> None:
        """Undo the patch; called after that of whole steps is undone."""
        self._patches.close()
