"""A stopwatch for fits that cannot be interleaved, because processes train together."""

from __future__ import annotations

import statistics
import time
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.fits import synchronize

__all__ = ["BLOCK_STEPS", "WARM_STEPS", "Blockwise", "Stopwatch"]

WARM_STEPS = 60
BLOCK_STEPS = 20


class Blockwise:
    """Wall time of a step after `WARM_STEPS`: the median of blocks, with an idle device at their ends.

    The mean of a short run would count a later check of the callback as if it came as often in a long
    one, where all later checks take 1 % at most: one that takes 0.2 s is 2 ms a step in a hundred.
    """

    def __init__(self) -> None:
        self._block_us: list[float] = []
        self._began_s = 0.0

    @property
    def step_us(self) -> float:
        return statistics.median(self._block_us)

    def begin_step(self, number: int) -> None:
        """Note that a step begins, the first with number 0; also after the last one."""
        if number < WARM_STEPS or (number - WARM_STEPS) % BLOCK_STEPS:
            return
        synchronize()
        now_s = time.perf_counter()
        if number > WARM_STEPS:
            self._block_us.append((now_s - self._began_s) / BLOCK_STEPS * 1e6)
        self._began_s = time.perf_counter()


class Stopwatch(Callback):
    """`Blockwise` times of the steps of a fit."""

    def __init__(self) -> None:
        self._blocks = Blockwise()

    @property
    def step_us(self) -> float:
        return self._blocks.step_us

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._blocks.begin_step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._blocks.begin_step(trainer.global_step)
