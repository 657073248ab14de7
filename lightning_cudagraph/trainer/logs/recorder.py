"""`self.log` inside a captured step.

The values that a step logs in its capture are static tensors of the graph. They are recorded, and not
reduced on the host: the graph adds them up (`sums.py`), and after a replay one copy takes them all out.
If Lightning would do more than add (in the first batch of an epoch, for metrics, across processes), its
own code is called with the copies. Means, sums, progress bar and loggers are as in an eager step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor

from lightning_cudagraph.capture.graph import outside_inference_mode
from lightning_cudagraph.compat.method_patches import in_place
from lightning_cudagraph.compat.names.lightning_names import _ResultCollection
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.host_values import value_of
from lightning_cudagraph.trainer.logs.logged_step import TO_TENSOR, Event, Log, LoggedStep, packed_values
from lightning_cudagraph.trainer.logs.sums import (
    LoggedValue,
    RunningSums,
    Slot,
    SumsOfStep,
    add,
    converted,
)
from lightning_cudagraph.trainer.metrics.calls import Later
from lightning_cudagraph.trainer.metrics.states import StepMetrics


class _LogRecorder(_ResultCollection):
    """Recorder of logged values; it replaces the loop's results during a capture."""

    def __init__(self, results: _ResultCollection) -> None:
        super().__init__(training=True)
        self.instead_of = results
        self.batch, self.batch_size = results.batch, results.batch_size
        self.events: list[Event] = []

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enable_graph"):
            raise CaptureError(
                f"`self.log({name!r}, ..., enable_graph=True)` in `{fx}` keeps autograd's graph of"
                " one step, which a replay cannot renew.",
                "Leave `enable_graph` out.",
            )
        kwargs = {key: value_of(given) for key, given in kwargs.items()}
        if isinstance(value, Tensor) and not isinstance(value, Later):
            value = converted(value.detach())  # here, because the step's default dtype decides
        self.events.append(Log(fx, name, value, kwargs))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Do nothing: the reset at the first batch of an epoch follows after the replay."""


class Logs:
    """The logs of the steps of one run.

    The kind of a step, `step_kind`, is the accumulation phase with the batch signature in training.

    Args:
        adds: the graphs add values up; otherwise Lightning does, after each replay.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, metrics: StepMetrics, adds: bool
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._metrics = metrics
        self._adds = adds
        self._sums = RunningSums()
        self._sums_of: dict[Hashable, SumsOfStep] = {}
        # The step of the last replays, if nothing has read its values yet, and the number of replays.
        self._waiting: LoggedStep | None = None
        self._replays = 0
        # A thread that reads metrics passes the values on too; others that read or replay wait for it.
        self._lock = RLock()
        # Sums of the capture under way, and whether it is the first capture instance of its step.
        self._slots: dict[str, Slot] = {}
        self._is_first_instance = True

    @property
    def _loop(self) -> Any:
        trainer = self._trainer
        # Called before every replay: `trainer.training` takes longer than this attribute.
        training = self._adds or trainer.training
        return trainer.fit_loop.epoch_loop if training else trainer._evaluation_loop

    @property
    def _results(self) -> _ResultCollection:
        results: _ResultCollection = self._loop._results
        return results.instead_of if isinstance(results, _LogRecorder) else results

    def begin_transaction(self) -> None:
        """Prepare for the captures of a step, one or several, or for an eager run of it."""
        self._is_first_instance = True
        if self._adds:
            self._sums.make_room(self._results)

    def before_replay(self, logged: LoggedStep | None) -> None:
        """Bring the current sums to where a graph adds to them; `logged` is None before a capture."""
        with self._lock:
            waiting = self._waiting
            if waiting is not None and logged is not None and waiting.sums is logged.sums:
                return  # nothing has read them since the replay before
            self.settle()
        if logged is not None:
            # In the first batch of an epoch, Lightning resets at its first log, name by name.
            goes_on = self._trainer._logger_connector._first_loop_iter is False
            logged.sums.adopt(self._results, goes_on)

    def put_off(self, logged: LoggedStep) -> None:
        """Pass the values of a replay to Lightning, lazily if possible.

        Then they stay in the graph's memory until they are read. The next replay of this kind overwrites
        them, as the next eager step would; before any other step, they are passed on.
        """
        if logged.can_wait:
            with self._lock:
                self._replays = self._replays + 1 if self._waiting is not None else 1
                self._waiting = logged
                logged.note_batch_size(self._trainer)
        else:
            self.settle()
            logged.hand_over(self._trainer)

    def is_any_on_bar(self) -> bool:
        """True if hooks or steps log a value that a progress bar shows during an epoch."""
        # Values that wait have been logged before, with a graph's sums among the results.
        return any(metric.meta.prog_bar and metric.meta.on_step for metric in self._results.values())

    def settle(self) -> None:
        """Pass on the values that wait, if there are any."""
        with self._lock:
            if (logged := self._waiting) is not None:
                self._waiting = None
                # The thread that reads may be in inference mode; the step was not.
                with outside_inference_mode():
                    logged.hand_over(self._trainer, self._replays, is_late=True)

    def close(self) -> None:
        """Leave Lightning's results with tensors of their own."""
        self._sums.let_go()

    @contextmanager
    def recorded(self, step_kind: Hashable, capturing: bool) -> Iterator[list[Event]]:
        """Context of a step that records logged values, instead of reducing them, and metric calls.

        Yields:
            The list of recorded events. Pass it to `finished` inside the capture.
        """
        if capturing:
            self._slots = {}
            if self._is_first_instance:
                self._sums_of.pop(step_kind, None)  # its key may differ by the end of the capture
                self._sums_of[step_kind] = SumsOfStep()
        if self._trainer.predicting:
            events: list[Event] = []
            with self._metrics.recording(events.append):
                yield events
            return
        loop = self._loop
        connector = self._trainer._logger_connector
        results, current_fx = loop._results, connector._current_fx
        recorder = _LogRecorder(results)
        to_tensor = getattr(self._module, TO_TENSOR)

        def to_device_tensor(value: Any, name: str) -> Any:
            if isinstance(value, Later):
                return value
            value = value_of(value)
            # A NumPy scalar would be copied to the device; a Python number is a fill, without a copy.
            return to_tensor(value.item() if isinstance(value, np.generic) else value, name)

        loop._results = recorder
        try:
            with ExitStack() as stack:
                stack.enter_context(in_place(self._module, TO_TENSOR, to_device_tensor))
                stack.enter_context(self._metrics.recording(recorder.events.append))
                yield recorder.events
        finally:
            loop._results = results
            connector._current_fx = current_fx

    def finished(
        self,
        events: list[Event],
        step_kind: Hashable,
        capturing: bool,
        loss: Tensor | None = None,
        is_last: bool = True,
    ) -> LoggedStep:
        """Add up and pack the logged values at the end of a recorded step, or of a part of it."""
        packed = packed_values(events, self._module)
        sums = self._sums_of[step_kind]
        sums.in_parts |= not is_last
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
            if self._is_first_instance:
                sums.slots = self._slots
            elif differing := self._slots.keys() ^ sums.slots.keys():
                raise CaptureError(
                    "The training step logs other names when it runs a second time on the same batch:"
                    f" {', '.join(sorted(differing))}.",
                    "Log the same names in every step.",
                )
            self._is_first_instance = False
        return LoggedStep(events, sums, slots, packed, loss, is_last)

    def _with_sizes(
        self, events: list[Event], packed: dict[int, Tensor]
    ) -> tuple[list[LoggedValue], int | None]:
        """The packed values with their batch sizes, and the size that Lightning finds for the batch."""
        results = self._results
        finder = _LogRecorder(results)  # so that `results` is not changed
        logged, found = [], None
        for index, value in packed.items():
            event = events[index]
            assert isinstance(event, Log)
            size = event.kwargs.get("batch_size")
            metric = results.get(event.key)
            if size is None and metric is not None and metric.meta.is_mean_reduction:
                size = finder._extract_batch_size(metric, None, metric.meta)
                found = finder.batch_size
            logged.append(LoggedValue(event.key, value, size))
        return logged, found
