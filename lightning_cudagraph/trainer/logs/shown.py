"""Logged values for a progress bar, read without a wait for the device.

Lightning's bars read what is logged with ``prog_bar=True`` after a step, and so wait for the step that
has just been launched. Between replays they get the values of the last drawn step that has ended
instead: behind each step that is drawn, a copy to pinned memory and an event are queued. All other code
that reads the trainer's metrics, a bar at the end of an epoch, and one that is drawn seldom wait and get
those of the last step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.names.lightning_names import _ResultMetric

# Copies under way; if the host is further ahead, a step that is drawn makes no copy.
_MAX_COPIES = 16


class _Copy:
    """A copy of some values in host memory that the device will have made when an event has happened."""

    def __init__(self, values: Mapping[str, Tensor], event: Any) -> None:
        self.event = event
        self._values = {
            name: torch.empty((), dtype=value.dtype, pin_memory=value.is_cuda)
            for name, value in values.items()
        }

    def fits(self, values: Mapping[str, Tensor]) -> bool:
        """True if it can hold other values: those of the same names and dtypes."""
        return self._values.keys() == values.keys() and all(
            self._values[name].dtype == value.dtype for name, value in values.items()
        )

    def queue(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._values[name].copy_(value.reshape(()), non_blocking=True)
        self.event.record()

    def numbers(self) -> dict[str, float]:
        return {name: value.item() for name, value in self._values.items()}


class ShownValues:
    """The values for the progress bar of one run.

    Args:
        is_late: returns True for a tensor that a read would have to wait for.

    Attributes:
        is_drawing: a bar is being drawn that can do with the values of an earlier step.
    """

    def __init__(
        self,
        is_late: Callable[[Tensor], bool] = lambda value: value.is_cuda,
        event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._is_late = is_late
        self._event = event
        self._under_way: deque[_Copy] = deque()
        self._spare: list[_Copy] = []
        self._latest: dict[str, float] = {}
        self.is_drawing = False
        self.waits = 0

    def drawn(self) -> AbstractContextManager[None]:
        return setting(self, is_drawing=True)

    def metrics(self, results: Iterable[_ResultMetric]) -> dict[str, dict[str, Any]] | None:
        """The part of `_ResultCollection.metrics` that a bar reads; None if Lightning has to make it."""
        values: dict[str, Tensor] = {}
        for metric in results:
            meta, value = metric.meta, metric._forward_cache
            if metric.has_reset or not (meta.prog_bar and meta.on_step and isinstance(value, Tensor)):
                continue
            if value.numel() != 1:
                return None  # it raises
            values[meta.forked_name(True)] = value.detach()
        return {"callback": {}, "log": {}, "pbar": self.read(values)}

    def read(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """The numbers to show for some values that the last step has logged, by name."""
        late = {name: value for name, value in values.items() if self._is_late(value)}
        if late:
            while self._under_way and self._under_way[0].event.query():
                self._take()
            is_first = not late.keys() <= self._latest.keys()
            if is_first or len(self._under_way) < _MAX_COPIES:
                self._queue(late)
            if is_first:
                self.waits += 1
                self._under_way[-1].event.synchronize()
                while self._under_way:
                    self._take()
        return {
            name: self._latest[name] if name in late else value.item() for name, value in values.items()
        }

    def were_read(self, numbers: Mapping[str, float]) -> None:
        """Note numbers that Lightning has read after a wait: copies that were under way are older."""
        if numbers:
            self._latest |= numbers
            self._spare = [*self._spare, *self._under_way][-_MAX_COPIES:]
            self._under_way.clear()

    def _queue(self, late: Mapping[str, Tensor]) -> None:
        copy = next((spare for spare in self._spare if spare.fits(late)), None)
        if copy is None:
            copy = _Copy(late, self._event())
        else:
            self._spare.remove(copy)
        copy.queue(late)
        self._under_way.append(copy)

    def _take(self) -> None:
        copy = self._under_way.popleft()
        self._latest |= copy.numbers()
        self._spare = [*self._spare, copy][-_MAX_COPIES:]
