"""Outcomes of replayed optimizer steps that a gradient scaler may have skipped, read late.

A skipped step is not counted, and the host would have to wait for each replay to know the counters of
the next. Instead, the numbers of a replay are computed twice, for both outcomes of the replay before,
and the graph takes those of the outcome that it finds. The host waits only for the replay before that
one, and the device has one to do meanwhile. Counters in host memory are right after `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from lightning_cudagraph.device.host_work import LateValue
from lightning_cudagraph.optim.host_arithmetic.host_program import State


@dataclass
class _ReplayedStep:
    """A replayed step.

    Attributes:
        ends: the state that it ends in if it is done: one, or for both outcomes (done, skipped) of the
            step before.
    """

    was_skipped: LateValue
    ends: list[State]


class Outcomes:
    """The steps of one optimizer with an outcome that the host does not know yet: two at most.

    Attributes:
        may_be_late: nothing reads the state until `settle`, so that a replay need not be waited for.
    """

    def __init__(self, write: Callable[[State], None]) -> None:
        self._write = write
        self._open: list[_ReplayedStep] = []
        self.may_be_late = False
        self.waited_s = 0.0

    def possible(self) -> list[State]:
        """The states that a step may begin with, as changes of what is in host memory: one or two."""
        while len(self._open) > 1 or (self._open and self._open[0].was_skipped.is_known()):
            self._learn()
        return [self._open[0].ends[0], {}] if self._open else [{}]

    def have_moved_others(self, groups: Collection[Any]) -> bool:
        """True if a step whose outcome is open has moved state in other groups than these."""
        return any(group not in groups for step in self._open for group in step.ends[0])

    def add(self, skipped: Tensor, ends: list[State]) -> None:
        """Add a step that has been launched.

        Args:
            skipped: true on the device, after the step, if it was skipped.
            ends: for each of `possible`, the state that the step ends in if it is done.
        """
        self._open.append(_ReplayedStep(LateValue(skipped), ends))
        if not self.may_be_late:
            self.settle()

    def settle(self) -> None:
        """Wait for all steps, and bring the state in host memory up to date."""
        try:
            while self._open:
                self._learn()
        finally:
            self._open.clear()  # a device that has failed says it once

    def _learn(self) -> None:
        step = self._open.pop(0)
        began_s = perf_counter()
        was_skipped = bool(step.was_skipped.read())
        self.waited_s += perf_counter() - began_s
        if not was_skipped:
            self._write(step.ends[0])
        for later in self._open:
            later.ends = [later.ends[was_skipped]]
