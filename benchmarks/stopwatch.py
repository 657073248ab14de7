"""A stopwatch for fits that cannot be interleaved, because processes train together."""

from __future__ import annotations

import gc
import time
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.fits import synchronize

__all__ = ["WARM_STEPS", "Stopwatch"]

WARM_STEPS = 60


class Stopwatch(Callback):
    """Wall time of the steps after `WARM_STEPS`, with an idle device at both ends.

    Garbage is collected before: what setting up a fit has left makes Python collect everything some
    hundred steps later, once, in 0.2 to 0.4 s (beside transformers).
    """

    def __init__(self) -> None:
        self.step_us = float("nan")
        self._started_s = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM_STEPS:
            gc.collect()
            synchronize()
            self._started_s = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        synchronize()
        steps = trainer.global_step - WARM_STEPS
        self.step_us = (time.perf_counter() - self._started_s) / steps * 1e6
