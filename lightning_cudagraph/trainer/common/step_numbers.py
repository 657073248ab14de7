"""The numbers beside a batch: `batch_idx`, and `global_step`, the number of optimizer steps before.

They differ in each step. A captured step may read a part of them, of which each value has a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_cudagraph.checks.audit.step_audit import moving_number
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.tensors.host_values import HostReads, HostValue
from lightning_cudagraph.trainer.config.settings import Settings

_INDEX, _STEP = "batch_idx", "self.global_step"
# The getters of the second one.
STEP_GETTERS = frozenset({_STEP, "trainer.global_step", "trainer.fit_loop.epoch_loop.global_step"})


class StepNumbers:
    """Numbers beside the batches; `total` returns the loop's tracker of steps, None in evaluation."""

    def __init__(self, total: Callable[[], Any], settings: Settings) -> None:
        self._total = total
        self._max_graphs = settings.max_graphs
        self._frozen = {_INDEX} & settings.harmless
        if not settings.harmless.isdisjoint({*STEP_GETTERS, "global_step"}):
            self._frozen |= {_STEP}

    def of(self, batch_idx: int) -> dict[str, int]:
        """The numbers of a batch that its step may read in part, by name."""
        numbers = {_INDEX: batch_idx}
        if (total := self._total()) is not None:
            numbers[_STEP] = total.completed
        return numbers if not self._frozen else {n: numbers[n] for n in numbers if n not in self._frozen}

    def noted(self, reads: HostReads | None, batch_idx: int) -> Any:
        """The index of a batch for a capture of its step, which notes what is read of it."""
        return self._noted(reads, _INDEX, batch_idx)

    def noted_step(self, reads: HostReads | None) -> AbstractContextManager[None]:
        """Context of a capture of a step, which notes what is read of `global_step`.

        The step may count in it, as manual optimization does; the count is put back.
        """
        total = self._total()
        return setting(total, completed=self._noted(reads, _STEP, total.completed))

    def _noted(self, reads: HostReads | None, name: str, number: int) -> int | HostValue:
        if reads is None or name in self._frozen:
            return number
        return moving_number(reads, name, number, self._max_graphs)
