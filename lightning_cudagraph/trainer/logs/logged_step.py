"""The logged values of one captured step, and their way to Lightning after a replay.

Values that the graph has added up need only bookkeeping on Lightning's objects. If Lightning would do
more than add (in the first batch of an epoch, for metrics, across processes), its own code is called
with copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, SupportsFloat

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_cudagraph.trainer.logs.sums import Slot, SumsOfStep
from lightning_cudagraph.trainer.metrics.calls import Later, MetricCall

# The name-mangled method by which `LightningModule.log` makes a tensor of its value.
TO_TENSOR = "_LightningModule__to_tensor"
_LOSS = -1  # the key of the loss among the indices of events


@dataclass
class Log:
    """A call of `self.log`."""

    fx: str
    name: str
    value: Tensor | Later | Metric
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.fx}.{self.name}"


# The events of a step that the host handles after a replay, in their order.
Event = Log | MetricCall
# The index of an event, with the index of a result if it is a metric call.
_Key = int | tuple[int, int]


class LoggedStep:
    """The logged values and metric calls of one captured step, or of one part of it.

    Made inside the capture: it packs the values and the loss, one tensor for each dtype, so that after a
    replay one copy each takes them out of the graph's memory.
    """

    def __init__(
        self,
        events: list[Event],
        sums: SumsOfStep,
        slots: dict[str, Slot],
        values: dict[int, Tensor],
        loss: Tensor | None,
        is_last: bool,
    ) -> None:
        self._events = events
        self.sums = sums
        self._loss = loss
        self._is_last = is_last
        together: dict[_Key, Tensor] = dict(values.items())
        for index, event in enumerate(events):
            if isinstance(event, MetricCall):
                together |= {
                    (index, leaf): output
                    for leaf, output in enumerate(event.outputs())
                    if output.ndim == 0
                }
        if loss is not None and loss.ndim == 0:
            together[_LOSS] = loss
        by_dtype: dict[torch.dtype, dict[_Key, Tensor]] = {}
        for key, value in together.items():
            by_dtype.setdefault(value.dtype, {})[key] = value
        self._packed = [
            (torch.stack([value.reshape(()) for value in members.values()]), list(members))
            for members in by_dtype.values()
        ]
        self._logs = logs = [(i, event) for i, event in enumerate(events) if isinstance(event, Log)]
        # Tensors in host memory, which no replay renews.
        self._on_host = {
            i: log.value
            for i, log in logs
            if i not in values and isinstance(log.value, Tensor) and not isinstance(log.value, Later)
        }
        self._last_fx = logs[-1][1].fx if logs else None
        # Values that the graph has added to their sums.
        self._added = [(slots[log.key], i, log) for i, log in logs if i in values and log.key in slots]
        indices = {index for _, index, _ in self._added}
        self._others = [(i, event) for i, event in enumerate(events) if i not in indices]

    def values(self) -> dict[str, Tensor]:
        """The logged values, batch sizes and tensors of metric calls, by their names in messages."""
        found: dict[str, Tensor] = {}
        for packed, indices in self._packed:
            for index, value in zip(indices, packed.unbind(), strict=True):
                # Results of metric calls are listed with their calls below.
                if isinstance(index, int) and index != _LOSS:
                    log = self._events[index]
                    assert isinstance(log, Log)
                    found[f"`self.log({log.name!r}, ...)` in `{log.fx}` (call {index})"] = value
        for index, event in enumerate(self._events):
            if isinstance(event, MetricCall):
                found |= {f"{label} (call {index})": value for label, value in event.tensors().items()}
        for index, log in self._logs:
            call = f"`self.log({log.name!r}, ...)` in `{log.fx}` (call {index})"
            if (on_host := self._on_host.get(index)) is not None:
                found[call] = on_host
            if isinstance(size := log.kwargs.get("batch_size"), SupportsFloat):
                found[f"the `batch_size` of {call}"] = torch.tensor(float(size), dtype=torch.float64)
        return found

    @property
    def can_wait(self) -> bool:
        """True if the graph does all that must be done in each step.

        Then it is enough to pass the values of the last replay to Lightning before they are read.
        """
        return (
            self._is_last
            and not self.sums.in_parts
            and not self._others
            and (self.sums.live or not self._events)
        )

    def note_batch_size(self, trainer: pl.Trainer) -> None:
        """Leave the batch size that the step has found, for values that hooks log after it."""
        results = trainer.fit_loop.epoch_loop._results  # sums in the graph exist in training only
        if results.batch_size is None:
            results.batch_size = self.sums.batch_size

    def hand_over(self, trainer: pl.Trainer, replays: int = 1, is_late: bool = False) -> Tensor | None:
        """Call the metrics and log the values of the last replay, as the step itself would.

        Args:
            replays: the number of replays since the last call; more than one only if `can_wait`.
            is_late: the batch of the step is over, and the next one may have begun.

        Returns:
            A copy of the loss, if there is one.
        """
        values: dict[_Key, Any] = {}
        for packed, indices in self._packed:
            # A copy, because callbacks hold references to logged values, and the next replay overwrites
            # the packed tensor.
            values.update(zip(indices, packed.clone().unbind(), strict=True))
        if self._events:
            if self.sums.live:
                self._update_results(trainer, values, replays, is_late)
            else:
                self._log_again(trainer, list(enumerate(self._events)), values)
        if self._is_last:
            self.sums.entered = True
        if self._loss is None or _LOSS in values:
            return values.get(_LOSS)
        return self._loss.clone()

    def _update_results(
        self, trainer: pl.Trainer, values: dict[_Key, Any], replays: int, is_late: bool
    ) -> None:
        """Update the bookkeeping of Lightning's objects for values that the graph has added up."""
        for slot, index, log in self._added:
            if slot.is_held():
                slot.updated(values[index], replays)
            else:
                # At a graph break, a hook on the host has logged the same name.
                _log(trainer, log, values[index], entered=True)
        if not is_late:
            self.note_batch_size(trainer)
        if self._others:
            self._log_again(trainer, self._others, values)
        if self._last_fx is not None:
            trainer._logger_connector._current_fx = self._last_fx

    def _log_again(
        self, trainer: pl.Trainer, events: list[tuple[int, Event]], values: dict[_Key, Any]
    ) -> None:
        returned: dict[int, list[Any]] = {}
        for index, event in events:
            if isinstance(event, MetricCall):
                copies = [
                    values[index, leaf] if output.ndim == 0 else output.clone()
                    for leaf, output in enumerate(event.outputs())
                ]
                returned[id(event)] = event.make(copies)
            elif isinstance(event.value, Later):
                value = returned[id(event.value.call)][event.value.leaf]
                value = getattr(trainer.lightning_module, TO_TENSOR)(value, event.name)
                _log(trainer, event, value, self.sums.entered)
            else:
                value = values.get(index, event.value)
                if value is event.value and isinstance(value, Tensor):
                    value = value.clone()
                _log(trainer, event, value, self.sums.entered)


def packed_values(events: list[Event], module: pl.LightningModule) -> dict[int, Tensor]:
    """Logged values that are static tensors on the device, by the index of their event."""
    logged = ((i, event.value) for i, event in enumerate(events) if isinstance(event, Log))
    return {
        index: value
        for index, value in logged
        if isinstance(value, Tensor) and not isinstance(value, Later) and value.device == module.device
    }


def _log(trainer: pl.Trainer, log: Log, value: Any, entered: bool) -> None:
    results = trainer._results
    assert results is not None
    connector = trainer._logger_connector
    starts_epoch = connector.should_reset_tensors(log.fx)
    if starts_epoch:
        results.reset(metrics=False, fx=log.fx)
    key = log.key
    if log.kwargs.get("add_dataloader_idx", True) and results.dataloader_idx is not None:
        key += f".{results.dataloader_idx}"
    metric = results.get(key)
    if starts_epoch or not entered or metric is None or metric.value.device != value.device:
        results.log(log.fx, log.name, value, **log.kwargs)
    else:
        # The fast path for a known key: no metadata to build, compare and move.
        size = results._extract_batch_size(metric, log.kwargs.get("batch_size"), metric.meta)
        results.update_metrics(key, value, size)
    connector._current_fx = log.fx
