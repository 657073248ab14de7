"""`self.log` inside a captured step.

What a step logs in its capture are static tensors of the graph. They are recorded instead of being
reduced, and handed to Lightning after every replay, so that means, sums, the progress bar and the
loggers see what they would see in an eager step.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics import Metric

from lightning_cudagraph.capture.sentry import forbid, user_location
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.metric_states import StepMetrics
from lightning_cudagraph.metrics import Later, MetricCall

__all__ = ["LoggedStep", "recorded_logs"]

# Name-mangled: what `LightningModule.log` turns its value into a tensor with.
TO_TENSOR = "_LightningModule__to_tensor"


@dataclass
class _Log:
    fx: str
    name: str
    value: Tensor | Later | Metric
    kwargs: dict[str, Any]


# What happens on the host after a replay, in the order of the step.
_Event = _Log | MetricCall
# The number of the event, and which of its results, if it is the call of a metric.
_Key = int | tuple[int, int]


class _Recorder(_ResultCollection):
    """Takes the place of the training loop's results during a capture."""

    def __init__(self, batch: Any) -> None:
        super().__init__(training=True)
        self.batch = batch
        self.events: list[_Event] = []

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enable_graph"):
            raise CaptureError(
                f"`self.log({name!r}, ..., enable_graph=True)` in `{fx}` keeps autograd's graph of"
                " one step, which a replay cannot renew.",
                "Leave `enable_graph` out.",
            )
        self.events.append(
            _Log(fx, name, value if isinstance(value, Metric) else value.detach(), kwargs)
        )

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """The first batch of an epoch is dealt with when the logs are handed over."""


class LoggedStep:
    """What one captured step logged, and the calls of metrics that it put off.

    Made inside the capture: there the values are packed, one tensor for each dtype, so that after a
    replay one copy for each takes them out of the graph's memory.

    Args:
        events: what `recorded_logs` has recorded.
    """

    def __init__(self, events: list[_Event]) -> None:
        self._events = events
        by_dtype: dict[torch.dtype, list[tuple[_Key, Tensor]]] = {}
        for index, event in enumerate(events):
            if isinstance(event, MetricCall):
                for leaf, output in enumerate(event.outputs()):
                    if output.ndim == 0:
                        by_dtype.setdefault(output.dtype, []).append(((index, leaf), output))
            elif not isinstance(event.value, (Later, Metric)):
                by_dtype.setdefault(event.value.dtype, []).append((index, event.value))
        self._packed = [
            (torch.stack([value.reshape(()) for _, value in logged]), [index for index, _ in logged])
            for logged in by_dtype.values()
        ]

    def values(self) -> dict[str, Tensor]:
        """The logged values, by what they were logged as, and what metrics are given."""
        found: dict[str, Tensor] = {}
        for packed, indices in self._packed:
            for index, value in zip(indices, packed.unbind(), strict=True):
                if isinstance(index, tuple):  # a result of a metric, which is among its tensors
                    continue
                log = cast(_Log, self._events[index])
                found[f"`self.log({log.name!r}, ...)` in `{log.fx}` (call {index})"] = value
        for index, event in enumerate(self._events):
            if isinstance(event, MetricCall):
                found |= {f"{label} (call {index})": value for label, value in event.tensors().items()}
        return found

    def hand_over(self, trainer: pl.Trainer) -> None:
        """Call the metrics and log the values of the last replay, as the step itself would have.

        Args:
            trainer: whose results and logger connector take them.
        """
        if not self._events:
            return
        values: dict[_Key, Any] = {}
        for packed, indices in self._packed:
            # A copy, because callbacks keep metrics, and the next replay overwrites the packed tensor.
            values.update(zip(indices, packed.clone().unbind(), strict=True))
        returned: dict[int, list[Any]] = {}
        for index, event in enumerate(self._events):
            if isinstance(event, MetricCall):
                copies = [
                    values[index, leaf] if output.ndim == 0 else output.clone()
                    for leaf, output in enumerate(event.outputs())
                ]
                returned[id(event)] = event.make(copies)
            elif isinstance(event.value, Later):
                value = returned[id(event.value.call)][event.value.leaf]
                _log(trainer, event, getattr(trainer.lightning_module, TO_TENSOR)(value, event.name))
            else:
                _log(trainer, event, values.get(index, event.value))


def _log(trainer: pl.Trainer, log: _Log, value: Any) -> None:
    results = trainer._results
    assert results is not None
    connector = trainer._logger_connector
    starts_epoch = connector.should_reset_tensors(log.fx)
    if starts_epoch:
        results.reset(metrics=False, fx=log.fx)
    key = f"{log.fx}.{log.name}"
    if log.kwargs.get("add_dataloader_idx", True) and results.dataloader_idx is not None:
        key += f".{results.dataloader_idx}"
    metric = results.get(key)
    if starts_epoch or metric is None or metric.value.device != value.device:
        results.log(log.fx, log.name, value, **log.kwargs)
    else:
        # The short way, once the key is known: no metadata to build, compare and move.
        size = results._extract_batch_size(metric, log.kwargs.get("batch_size"), metric.meta)
        results.update_metrics(key, value, size)
    connector._current_fx = log.fx


@contextmanager
def recorded_logs(
    trainer: pl.Trainer, module: pl.LightningModule, metrics: StepMetrics
) -> Iterator[list[_Event]]:
    """Record what is logged inside instead of letting Lightning reduce it, and calls of metrics.

    Args:
        trainer: the trainer whose active loop takes the logs.
        module: the module that logs.
        metrics: its metrics.

    Yields:
        The list that these are recorded in. Pass it to `LoggedStep` inside the capture.
    """
    if trainer.predicting:  # nothing can be logged
        events: list[_Event] = []
        with metrics.recording(events.append):
            yield events
        return
    loop = trainer.fit_loop.epoch_loop if trainer.training else trainer._evaluation_loop
    connector = trainer._logger_connector
    results, current_fx = loop._results, connector._current_fx
    recorder = _Recorder(results.batch)
    to_tensor = getattr(module, TO_TENSOR)

    def to_device_tensor(value: Any, name: str) -> Tensor:
        if isinstance(value, Later):
            return value
        if isinstance(value, numbers.Number):
            forbid(
                f"a Python number given to `self.log({name!r}, ...)`, which would stay what it is in"
                " this step",
                "Log a tensor, or log the number in `on_train_batch_end`.",
                user_location(),
            )
        return to_tensor(value, name)  # type: ignore[no-any-return]

    loop._results = recorder
    module.__dict__[TO_TENSOR] = to_device_tensor
    try:
        with metrics.recording(recorder.events.append):
            yield recorder.events
    finally:
        del module.__dict__[TO_TENSOR]
        loop._results = results
        connector._current_fx = current_fx
