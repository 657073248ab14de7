"""The values that one captured step has logged, and their way to the host after a replay.

Of what the graph has added up, Lightning's objects are told. Where Lightning would do more than to add
(in the first batch of an epoch, for metrics, across processes), its own code is called with copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_cudagraph.trainer.logs.sums import Slot, SumsOfPlace
from lightning_cudagraph.trainer.metrics.calls import Later, MetricCall

__all__ = ["TO_TENSOR", "Event", "Log", "LoggedStep", "packed_values"]

# Name-mangled: what `LightningModule.log` turns its value into a tensor with.
TO_TENSOR = "_LightningModule__to_tensor"
# In the place of the index of an event.
_LOSS = -1


@dataclass
class Log:
    """A call of `self.log`.

    Attributes:
        fx: the hook that logs.
        name: as what.
        value: what; of the result of a metric that is called later, what stands for it.
        kwargs: what else is given to Lightning's `log`.
    """

    fx: str
    name: str
    value: Tensor | Later | Metric
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """The key of the value in Lightning's results."""
        return f"{self.fx}.{self.name}"


# What happens on the host after a replay, in the order of the step.
Event = Log | MetricCall
# The number of the event, and which of its results, if it is the call of a metric.
_Key = int | tuple[int, int]


class LoggedStep:
    """The values that one captured step logged, and the calls of metrics that it put off.

    Made inside the capture: there the values are packed, one tensor for each dtype, so that after a
    replay one copy for each takes them out of the graph's memory; the loss goes along.

    Args:
        events: what was recorded.
        sums: what the graphs add up.
        slots: where this one adds what it has logged.
        values: what is packed of the events, by their indices.
        loss: of the step, which is packed with them.
        is_last: no parts of the step are to come.
    """

    def __init__(
        self,
        events: list[Event],
        sums: SumsOfPlace,
        slots: dict[str, Slot],
        values: dict[int, Tensor],
        loss: Tensor | None,
        is_last: bool,
    ) -> None:
        self._events = events
        self._sums = sums
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
        logs = [(index, event) for index, event in enumerate(events) if isinstance(event, Log)]
        self._last_fx = logs[-1][1].fx if logs else None
        # Of these the graph has done the sums, if they count.
        self._added = [(slots[log.key], i, log) for i, log in logs if i in values and log.key in slots]
        indices = {index for _, index, _ in self._added}
        self._others = [(i, event) for i, event in enumerate(events) if i not in indices]

    def values(self) -> dict[str, Tensor]:
        """The logged values, by what they were logged as, and what metrics are given."""
        found: dict[str, Tensor] = {}
        for packed, indices in self._packed:
            for index, value in zip(indices, packed.unbind(), strict=True):
                # A result of a metric is among its tensors.
                if isinstance(index, int) and index != _LOSS:
                    log = self._events[index]
                    assert isinstance(log, Log)
                    found[f"`self.log({log.name!r}, ...)` in `{log.fx}` (call {index})"] = value
        for index, event in enumerate(self._events):
            if isinstance(event, MetricCall):
                found |= {f"{label} (call {index})": value for label, value in event.tensors().items()}
        return found

    @property
    def can_wait(self) -> bool:
        """Tell if the graph has done all that must be done in each step.

        What is left is to hand over the values of the last replay, before anybody looks at them.
        """
        return self._is_last and not self._others and (self._sums.live or not self._events)

    def hand_over(self, trainer: pl.Trainer, replays: int = 1, is_late: bool = False) -> Tensor | None:
        """Call the metrics and log the values of the last replay, as the step itself would have.

        Args:
            trainer: whose results and logger connector take them.
            replays: how many there were since this was last called; more than one if it could wait.
            is_late: the batch of the step is done; there may be another one by now.

        Returns:
            A copy of the loss, if there is one.
        """
        values: dict[_Key, Any] = {}
        for packed, indices in self._packed:
            # A copy, because callbacks keep metrics, and the next replay overwrites the packed tensor.
            values.update(zip(indices, packed.clone().unbind(), strict=True))
        if self._events:
            if self._sums.live:
                self._book(trainer, values, replays, is_late)
            else:
                self._log_again(trainer, list(enumerate(self._events)), values)
        if self._is_last:
            self._sums.entered = True
        if self._loss is None or _LOSS in values:
            return values.get(_LOSS)
        return self._loss.clone()

    def _book(self, trainer: pl.Trainer, values: dict[_Key, Any], replays: int, is_late: bool) -> None:
        """Note on Lightning's objects what the graph has added up."""
        for slot, index, log in self._added:
            if slot.is_held():
                slot.updated(values[index], replays)
            else:
                # A hook has logged the same name on the host, in the middle of the replay.
                _log(trainer, log, values[index], entered=True)
        results = trainer.fit_loop.epoch_loop._results  # only training has anything added up
        if results.batch_size is None and not is_late:
            results.batch_size = self._sums.batch_size
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
                _log(trainer, event, value, self._sums.entered)
            else:
                value = values.get(index, event.value)
                if value is event.value and isinstance(value, Tensor):
                    value = value.clone()
                _log(trainer, event, value, self._sums.entered)


def packed_values(events: list[Event], module: pl.LightningModule) -> dict[int, Tensor]:
    """Static tensors on the device among what was logged, by the index of the event."""
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
        # The short way, once the key is known: no metadata to build, compare and move.
        size = results._extract_batch_size(metric, log.kwargs.get("batch_size"), metric.meta)
        results.update_metrics(key, value, size)
    connector._current_fx = log.fx
