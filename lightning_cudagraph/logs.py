"""`self.log` inside a captured step.

What a step logs in its capture are static tensors of the graph. They are recorded instead of being
reduced on the host; what Lightning adds up of them is added up in the graph (`log_sums.py`), and after
a replay one copy takes all of them out. Where Lightning would do more than to add (in the first batch
of an epoch, for metrics, across processes), its own code is called with the copies. Means, sums, the
progress bar and the loggers see what they would see in an eager step.
"""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.log_numbers import LoggedNumbers
from lightning_cudagraph.log_sums import LoggedValue, RunningSums, Slot, SumsOfPlace, add, converted
from lightning_cudagraph.metric_states import StepMetrics
from lightning_cudagraph.metrics import Later, MetricCall

__all__ = ["LoggedStep", "Logs"]

# Name-mangled: what `LightningModule.log` turns its value into a tensor with.
TO_TENSOR = "_LightningModule__to_tensor"


@dataclass
class _Log:
    fx: str
    name: str
    value: Tensor | Later | Metric
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.fx}.{self.name}"


# What happens on the host after a replay, in the order of the step.
_Event = _Log | MetricCall
# The number of the event, and which of its results, if it is the call of a metric.
_Key = int | tuple[int, int]


class _Recorder(_ResultCollection):
    """Takes the place of the training loop's results during a capture."""

    def __init__(self, results: _ResultCollection, logged: LoggedNumbers) -> None:
        super().__init__(training=True)
        self.instead_of = results
        self.batch, self.batch_size = results.batch, results.batch_size
        self.events: list[_Event] = []
        self._logged_numbers = logged

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enable_graph"):
            raise CaptureError(
                f"`self.log({name!r}, ..., enable_graph=True)` in `{fx}` keeps autograd's graph of"
                " one step, which a replay cannot renew.",
                "Leave `enable_graph` out.",
            )
        _note_batch_size(self._logged_numbers, fx, name, kwargs)
        if isinstance(value, Tensor) and not isinstance(value, Later):
            value = converted(value.detach())  # here, where the step's default dtype holds
        self.events.append(_Log(fx, name, value, kwargs))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """The first batch of an epoch is dealt with when the logs are handed over."""


class Logs:
    """What the steps of one run log.

    Args:
        trainer: whose active loop takes it.
        module: the module that logs.
        metrics: its metrics.
        adds: whether the graphs add it up. Otherwise Lightning does, after each replay.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, metrics: StepMetrics, adds: bool
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._metrics = metrics
        self._adds = adds
        self._numbers = LoggedNumbers()
        self._sums = RunningSums()
        self._places: dict[Hashable, SumsOfPlace] = {}
        # Of the capture that is under way, which is the first of several of one step, or a later one.
        self._slots: dict[str, Slot] = {}
        self._is_first_take = True

    @property
    def _loop(self) -> Any:
        trainer = self._trainer
        # Before every replay: what the trainer is doing costs more to ask than to add.
        training = self._adds or trainer.training
        return trainer.fit_loop.epoch_loop if training else trainer._evaluation_loop

    @property
    def _results(self) -> _ResultCollection:
        results: _ResultCollection = self._loop._results
        return results.instead_of if isinstance(results, _Recorder) else results

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around an eager step: note the Python numbers that it logs."""
        if self._trainer.predicting:  # nothing can be logged
            yield
            return
        results = self._results
        log, to_tensor = results.log, getattr(self._module, TO_TENSOR)
        self._numbers.begin_eager()

        def noting_log(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
            _note_batch_size(self._numbers, fx, name, kwargs)
            log(fx, name, *args, **kwargs)

        def noting_to_tensor(value: Any, name: str) -> Any:
            made = to_tensor(value, name)
            self._note_value(value, made, name)
            return made

        vars(results)["log"] = noting_log
        vars(self._module)[TO_TENSOR] = noting_to_tensor
        try:
            yield
        finally:
            del vars(self._module)[TO_TENSOR]
            del vars(results)["log"]

    def warmed_up(self, place: Hashable, batch: Any) -> None:
        """The eager step just done was one of the warm-up of this place, on such a batch."""
        self._numbers.warmed_up((place, _shapes(batch)))

    def begin_transaction(self) -> None:
        """A step is about to be captured, perhaps several times, or rehearsed."""
        self._is_first_take = True
        if self._adds:
            self._sums.make_room(self._results)

    def before_replay(self, place: Hashable) -> None:
        """Bring what has been added up so far to where the graphs of this place add to it."""
        if sums := self._places.get(place):
            # In the first batch of an epoch, Lightning begins anew at its first log, name by name.
            goes_on = self._trainer._logger_connector._first_loop_iter is False
            sums.adopt(self._results, goes_on)

    def close(self) -> None:
        """Leave Lightning's results with tensors of their own."""
        self._sums.let_go()

    @contextmanager
    def recorded(self, place: Hashable, batch: Any, capturing: bool) -> Iterator[list[_Event]]:
        """Record what is logged inside instead of reducing it, and calls of metrics.

        Args:
            place: which kind of step it is.
            batch: what it is done on.
            capturing: whether a capture is under way; otherwise it is a rehearsal.

        Yields:
            The list that these are recorded in. Pass it to `finished` inside the capture.
        """
        if capturing:
            self._slots = {}
            if self._is_first_take:
                self._places[place] = SumsOfPlace()
        if self._trainer.predicting:
            events: list[_Event] = []
            with self._metrics.recording(events.append):
                yield events
            return
        loop = self._loop
        connector = self._trainer._logger_connector
        results, current_fx = loop._results, connector._current_fx
        recorder = _Recorder(results, self._numbers)
        to_tensor = getattr(self._module, TO_TENSOR)
        if capturing:
            self._numbers.begin_capture((place, _shapes(batch)))
        else:
            self._numbers.begin_rehearsal(place)

        def to_device_tensor(value: Any, name: str) -> Any:
            if isinstance(value, Later):
                return value
            # A scalar of NumPy would be copied to the device; Python's own numbers are filled in.
            made = to_tensor(value.item() if isinstance(value, np.generic) else value, name)
            self._note_value(value, made, name)
            return made

        loop._results = recorder
        vars(self._module)[TO_TENSOR] = to_device_tensor
        try:
            with self._metrics.recording(recorder.events.append):
                yield recorder.events
        finally:
            del vars(self._module)[TO_TENSOR]
            loop._results = results
            connector._current_fx = current_fx

    def finished(
        self,
        events: list[_Event],
        place: Hashable,
        capturing: bool,
        loss: Tensor | None = None,
        is_last: bool = True,
    ) -> LoggedStep:
        """The end of a recorded step, or of a part of it: add up what it has logged, and pack it.

        Args:
            events: what `recorded` has recorded of it.
            place: which kind of step it is.
            capturing: whether a capture is under way.
            loss: what else is packed.
            is_last: no parts of the step are to come.

        Raises:
            CaptureError: if a second capture of the step logs other names than the first.
        """
        packed = _packed(events, self._module)
        sums = self._places[place]
        logged, batch_size = self._with_sizes(events, packed) if self._adds else ([], None)
        slots = self._sums.usable(logged)
        if capturing:
            self._slots |= slots
            if batch_size is not None:
                sums.batch_size = batch_size
        else:
            slots = {key: slot for key, slot in slots.items() if key in sums.slots}
        add(logged, slots)
        if capturing and is_last:
            if self._is_first_take:
                sums.slots = self._slots
            elif differing := self._slots.keys() ^ sums.slots.keys():
                raise CaptureError(
                    "The training step logs other names when it runs a second time on the same batch:"
                    f" {', '.join(sorted(differing))}.",
                    "Log the same names in every step.",
                )
            self._is_first_take = False
            self._numbers.captured(place)
        return LoggedStep(events, sums, slots, packed, loss, is_last)

    def _with_sizes(
        self, events: list[_Event], packed: dict[int, Tensor]
    ) -> tuple[list[LoggedValue], int | None]:
        """The packed values with the batch sizes that they stand for, and that of the batch."""
        results = self._results
        finder = _Recorder(results, self._numbers)  # so that nothing stays behind in `results`
        logged, found = [], None
        for index, value in packed.items():
            event = events[index]
            assert isinstance(event, _Log)
            size = event.kwargs.get("batch_size")
            metric = results.get(event.key)
            if size is None and metric is not None and metric.meta.is_mean_reduction:
                size = finder._extract_batch_size(metric, None, metric.meta)
                found = finder.batch_size
            logged.append(LoggedValue(event.key, value, size))
        return logged, found

    def _note_value(self, value: Any, made: Tensor, name: str) -> None:
        words = f"given to `self.log({name!r}, ...)` in `{self._module._current_fx_name}`"
        if isinstance(value, numbers.Number):
            self._numbers.note(f"a Python number {words}", value)
        elif made.device != self._module.device:
            # A tensor in host memory, which no replay renews.
            self._numbers.note(f"a tensor on the {made.device} {words}", made.item())


class LoggedStep:
    """What one captured step logged, and the calls of metrics that it put off.

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
        events: list[_Event],
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
        logs = [(index, event) for index, event in enumerate(events) if isinstance(event, _Log)]
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
                    assert isinstance(log, _Log)
                    found[f"`self.log({log.name!r}, ...)` in `{log.fx}` (call {index})"] = value
        for index, event in enumerate(self._events):
            if isinstance(event, MetricCall):
                found |= {f"{label} (call {index})": value for label, value in event.tensors().items()}
        return found

    def hand_over(self, trainer: pl.Trainer) -> Tensor | None:
        """Call the metrics and log the values of the last replay, as the step itself would have.

        Args:
            trainer: whose results and logger connector take them.

        Returns:
            A copy of the loss, if there is one.
        """
        values: dict[_Key, Any] = {}
        for packed, indices in self._packed:
            # A copy, because callbacks keep metrics, and the next replay overwrites the packed tensor.
            values.update(zip(indices, packed.clone().unbind(), strict=True))
        if self._events:
            if self._sums.live:
                self._book(trainer, values)
            else:
                self._log_again(trainer, list(enumerate(self._events)), values)
        if self._is_last:
            self._sums.entered = True
        if self._loss is None or _LOSS in values:
            return values.get(_LOSS)
        return self._loss.clone()

    def _book(self, trainer: pl.Trainer, values: dict[_Key, Any]) -> None:
        """Note on Lightning's objects what the graph has added up."""
        for slot, index, log in self._added:
            if slot.is_held():
                slot.updated(values[index])
            else:
                # A hook has logged the same name on the host, in the middle of the replay.
                _log(trainer, log, values[index], entered=True)
        results = trainer.fit_loop.epoch_loop._results  # only training has anything added up
        if results.batch_size is None:
            results.batch_size = self._sums.batch_size
        if self._others:
            self._log_again(trainer, self._others, values)
        if self._last_fx is not None:
            trainer._logger_connector._current_fx = self._last_fx

    def _log_again(
        self, trainer: pl.Trainer, events: list[tuple[int, _Event]], values: dict[_Key, Any]
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


# In the place of the index of an event.
_LOSS = -1


def _packed(events: list[_Event], module: pl.LightningModule) -> dict[int, Tensor]:
    """Static tensors on the device among what was logged, by the index of the event."""
    logged = ((i, event.value) for i, event in enumerate(events) if isinstance(event, _Log))
    return {
        index: value
        for index, value in logged
        if isinstance(value, Tensor) and not isinstance(value, Later) and value.device == module.device
    }


def _log(trainer: pl.Trainer, log: _Log, value: Any, entered: bool) -> None:
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


def _note_batch_size(logged: LoggedNumbers, fx: str, name: str, kwargs: dict[str, Any]) -> None:
    size = kwargs.get("batch_size")
    if isinstance(size, numbers.Number):
        logged.note(f"a `batch_size` given to `self.log({name!r}, ...)` in `{fx}`", size)


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
