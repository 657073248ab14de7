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
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from lightning_cudagraph.capture.sentry import forbid, user_location
from lightning_cudagraph.errors import CaptureError

__all__ = ["LoggedStep", "recorded_logs"]

# Name-mangled: what `LightningModule.log` turns its value into a tensor with.
TO_TENSOR = "_LightningModule__to_tensor"


@dataclass
class _Log:
    fx: str
    name: str
    value: Tensor
    kwargs: dict[str, Any]


class _Recorder(_ResultCollection):
    """Takes the place of the training loop's results during a capture."""

    def __init__(self, batch: Any) -> None:
        super().__init__(training=True)
        self.batch = batch
        self.logs: list[_Log] = []

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"`self.log({name!r}, ...)` in `{fx}` was given a `{type(value).__qualname__}`; metric"
                " objects inside a captured step are not supported yet.",
                "Log the metric in `on_train_batch_end`, or in the validation step.",
            )
        if kwargs.get("enable_graph"):
            raise CaptureError(
                f"`self.log({name!r}, ..., enable_graph=True)` in `{fx}` keeps autograd's graph of"
                " one step, which a replay cannot renew.",
                "Leave `enable_graph` out.",
            )
        self.logs.append(_Log(fx, name, value.detach(), kwargs))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """The first batch of an epoch is dealt with when the logs are handed over."""


class LoggedStep:
    """What one captured step logged.

    Made inside the capture: there the values are packed, one tensor for each dtype, so that after a
    replay one copy for each takes them out of the graph's memory.
    """

    def __init__(self, logs: list[_Log]) -> None:
        self._calls = [(log.fx, log.name, log.kwargs) for log in logs]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, log in enumerate(logs):
            by_dtype.setdefault(log.value.dtype, []).append(index)
        self._packed = [
            (torch.stack([logs[i].value.reshape(()) for i in indices]), indices)
            for indices in by_dtype.values()
        ]

    def values(self) -> dict[str, Tensor]:
        """The logged values, by what they were logged as."""
        found: dict[str, Tensor] = {}
        for packed, indices in self._packed:
            for index, value in zip(indices, packed.unbind(), strict=True):
                fx, name, _ = self._calls[index]
                found[f"`self.log({name!r}, ...)` in `{fx}` (call {index})"] = value
        return found

    def hand_over(self, trainer: pl.Trainer) -> None:
        """Log the values of the last replay, as `LightningModule.log` would have.

        Args:
            trainer: whose results and logger connector take them.
        """
        if not self._calls:
            return
        results = trainer.fit_loop.epoch_loop._results
        connector = trainer._logger_connector
        values: list[Tensor] = [torch.empty(0)] * len(self._calls)
        for packed, indices in self._packed:
            # A copy, because callbacks keep metrics, and the next replay overwrites the packed tensor.
            for index, value in zip(indices, packed.clone().unbind(), strict=True):
                values[index] = value
        for (fx, name, kwargs), value in zip(self._calls, values, strict=True):
            key = f"{fx}.{name}"
            starts_epoch = connector.should_reset_tensors(fx)
            if starts_epoch:
                results.reset(metrics=False, fx=fx)
            metric = results.get(key)
            if starts_epoch or metric is None or metric.value.device != value.device:
                results.log(fx, name, value, **kwargs)
            else:
                # The short way, once the key is known: no metadata to build, compare and move.
                size = results._extract_batch_size(metric, kwargs.get("batch_size"), metric.meta)
                results.update_metrics(key, value, size)
            connector._current_fx = fx


@contextmanager
def recorded_logs(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[list[_Log]]:
    """Record what is logged inside, instead of letting Lightning reduce it.

    Args:
        trainer: the trainer whose training loop takes the logs.
        module: the module that logs.

    Yields:
        The list that the logs are recorded in. Pass it to `LoggedStep` inside the capture.
    """
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._logger_connector
    results, current_fx = loop._results, connector._current_fx
    recorder = _Recorder(results.batch)
    to_tensor = getattr(module, TO_TENSOR)

    def to_device_tensor(value: Any, name: str) -> Tensor:
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
        yield recorder.logs
    finally:
        del module.__dict__[TO_TENSOR]
        loop._results = results
        connector._current_fx = current_fx
