"""`self.log` inside a captured step.

What a step logs in its capture are static tensors of the graph. They are recorded instead of being
reduced on the host; what Lightning adds up of them is added up in the graph (`sums.py`), and after
a replay one copy takes all of them out. Where Lightning would do more than to add (in the first batch
of an epoch, for metrics, across processes), its own code is called with the copies. Means, sums, the
progress bar and the loggers see what they would see in an eager step.
"""

from __future__ import annotations

import numbers
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
from lightning_cudagraph.compat.names.torch_names import tree_leaves
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.trainer.logs.logged_step import TO_TENSOR, Event, Log, LoggedStep, packed_values
from lightning_cudagraph.trainer.logs.numbers import LoggedNumbers
from lightning_cudagraph.trainer.logs.sums import (
    LoggedValue,
    RunningSums,
    Slot,
    SumsOfPlace,
    add,
    converted,
)
from lightning_cudagraph.trainer.metrics.calls import Later
from lightning_cudagraph.trainer.metrics.states import StepMetrics

__all__ = ["Logs"]


class _Recorder(_ResultCollection):
    """Results that replace those of the training loop during a capture."""

    def __init__(self, results: _ResultCollection, logged: LoggedNumbers) -> None:
        super().__init__(training=True)
        self.instead_of = results
        self.batch, self.batch_size = results.batch, results.batch_size
        self.events: list[Event] = []
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
        self.events.append(Log(fx, name, value, kwargs))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """The first batch of an epoch is dealt with when the logs are handed over."""


class Logs:
    """The logs of the steps of one run.

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
        # The step of the last replays, if its values were not asked for yet, and how many there were.
        self._waiting: LoggedStep | None = None
        self._waits_at: Hashable = None
        self._replays = 0
        # A thread that asks for metrics hands over too; no other reads them, or replays, until then.
        self._lock = RLock()
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

        # A hook in a training step may call a step of evaluation: what is there may be another's.
        with ExitStack() as stack:
            stack.enter_context(in_place(results, "log", noting_log))
            stack.enter_context(in_place(self._module, TO_TENSOR, noting_to_tensor))
            yield

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
        with self._lock:
            if self._waiting is not None and self._waits_at == place:
                return  # they were not asked for since the replay before
            self.settle()
        if sums := self._places.get(place):
            # In the first batch of an epoch, Lightning resets at its first log, name by name.
            goes_on = self._trainer._logger_connector._first_loop_iter is False
            sums.adopt(self._results, goes_on)

    def put_off(self, place: Hashable, logged: LoggedStep) -> None:
        """Hand the values of a replay over when they are asked for, if that can wait.

        They stay in the graph's memory until then. The next replay of this place takes their place, as
        the next step would have done; before any other step, they are handed over.
        """
        if logged.can_wait:
            with self._lock:
                self._replays = self._replays + 1 if self._waiting is not None else 1
                self._waiting, self._waits_at = logged, place
        else:
            self.settle()
            logged.hand_over(self._trainer)

    def settle(self) -> None:
        """Hand over what has been put off."""
        with self._lock:
            if (logged := self._waiting) is not None:
                self._waiting = None
                # The thread that asks may be in that mode, and the step was not.
                with outside_inference_mode():
                    logged.hand_over(self._trainer, self._replays, is_late=True)

    def close(self) -> None:
        """Leave Lightning's results with tensors of their own."""
        self._sums.let_go()

    @contextmanager
    def recorded(self, place: Hashable, batch: Any, capturing: bool) -> Iterator[list[Event]]:
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
            events: list[Event] = []
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
        packed = packed_values(events, self._module)
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
        self, events: list[Event], packed: dict[int, Tensor]
    ) -> tuple[list[LoggedValue], int | None]:
        """The packed values with the batch sizes that they stand for, and that of the batch."""
        results = self._results
        finder = _Recorder(results, self._numbers)  # so that nothing stays behind in `results`
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

    def _note_value(self, value: Any, made: Tensor, name: str) -> None:
        words = f"given to `self.log({name!r}, ...)` in `{self._module._current_fx_name}`"
        if isinstance(value, numbers.Number):
            self._numbers.note(f"a Python number {words}", value)
        elif made.device != self._module.device:
            # A tensor in host memory, which no replay renews.
            self._numbers.note(f"a tensor on the {made.device} {words}", made.item())


def _note_batch_size(logged: LoggedNumbers, fx: str, name: str, kwargs: dict[str, Any]) -> None:
    size = kwargs.get("batch_size")
    if isinstance(size, numbers.Number):
        logged.note(f"a `batch_size` given to `self.log({name!r}, ...)` in `{fx}`", size)


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
