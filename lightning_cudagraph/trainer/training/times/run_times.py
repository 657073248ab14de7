"""Clocks of one run, and the outputs that show their readings: TensorBoard, trace, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.compat.attributes import do_nothing
from lightning_cudagraph.compat.features import TIMES
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.processes.peers import own_store
from lightning_cudagraph.timing.events.clock import FitClock
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.layers.layer_selection import (
    LayerTimings,
    Placement,
    layers_at,
    select_layers,
    untimed_notes,
    without_curves,
)
from lightning_cudagraph.timing.output.rank_tables import ranks_lines, ranks_text
from lightning_cudagraph.timing.output.report import time_lines
from lightning_cudagraph.timing.output.step_times import StepTimes
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.timing.readings.rank_times import RankTable, RankTimes, SharedRun
from lightning_cudagraph.timing.readings.sink import Sink
from lightning_cudagraph.timing.readings.step_time import StepTime
from lightning_cudagraph.timing.readings.whole_steps import WholeSteps
from lightning_cudagraph.timing.sinks.dashboard import Dashboard
from lightning_cudagraph.timing.sinks.logged_medians import MediansWriter
from lightning_cudagraph.timing.sinks.tensorboard.charts import StepBand, StepLine
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter
from lightning_cudagraph.timing.sinks.trace import TraceWriter
from lightning_cudagraph.trainer.common.profilers import delay_notes
from lightning_cudagraph.trainer.common.replicas import has_replicas
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.times.advice import bucket_notes, fused_notes
from lightning_cudagraph.trainer.training.times.host_times import HostTimes, host_lines
from lightning_cudagraph.trainer.training.times.timing_rate import TimingRate

# Key of the store under which the first process leaves the folder of its trace.
_FOLDER = "folder"
_COUNT_TAG = "step_count/"


def batch_of_step(trainer: pl.Trainer) -> tuple[int, bool]:
    """Index of the current batch in its accumulation window, from 0, and True if it is the last."""
    n_batches = trainer.accumulate_grad_batches
    if n_batches == 1:
        return 0, True
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_idx % n_batches, not loop._should_accumulate()


def step_number(trainer: pl.Trainer) -> int:
    """The current step as the trainer's loggers count it."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def ended_by(trainer: pl.Trainer, exception: BaseException | None) -> str:
    """The exception that ended a `fit`, and after which step, in words; empty for None.

    Where a step of an optimizer is no batch, the number of batches is there, too.
    """
    if exception is None:
        return ""
    words = f"{type(exception).__name__} after step {trainer.global_step}"
    if trainer.accumulate_grad_batches == 1 and trainer.lightning_module.automatic_optimization:
        return words
    return f"{words} (batch {trainer.fit_loop.epoch_loop.batch_progress.total.completed})"


class RunTimes:
    """The clocks of one run, and the outputs of their readings.

    Without a choice of layers, only the step time on the host is measured.

    Attributes:
        clock: times of replays, or of the steps of an eager run.
        on_other_rate: called when fewer steps are timed than before: they need other graphs.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        choice: LayerTimings | None,
        run: SharedRun | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._backend = backend
        self.names: list[str] = []
        every_n_steps: int | None = 0
        window_steps = LayerTimings.window_steps
        inner: frozenset[str] = frozenset()
        if choice is not None:
            require(TIMES)
            self.names = list(select_layers(module, choice))
            # Processes that decide by their own clocks would time different steps.
            every_n_steps = choice.every_n_steps or (1 if trainer.world_size > 1 else None)
            window_steps = choice.window_steps
            inner = frozenset(without_curves(module, choice))
        self.pace = StepTime()
        self._tensorboard = TensorBoardWriter(trainer.loggers, inner)
        self._counted = (0, 0)
        self._others = others = other_loggers_writer(
            trainer.loggers, window_steps, lambda: step_number(trainer), inner
        )
        model = type(module).__qualname__
        device = trainer.strategy.root_device
        is_cuda = device.type == "cuda"
        self._device_name = torch.cuda.get_device_name(device) if is_cuda else device.type.upper()
        self._dashboard = Dashboard(self._tensorboard, window_steps, model, self._device_name)
        # Closed from the last to the first, so a sink that others write to comes before them.
        line = StepLine(self.pace, self._tensorboard.add_scalars)
        self._rate = TimingRate(every_n_steps, backend.event_host_us, self._time_fewer)
        self.on_other_rate: Callable[[], None] = do_nothing
        of_steps: list[Sink] = [others, self._dashboard, line, self._rate]
        if self._tensorboard.is_shown:
            of_steps.append(StepBand(window_steps, self._tensorboard.add_scalars))
        run = run if trainer.world_size > 1 and dist.is_initialized() else None
        store = None if run is None else own_store(f"times/{run.name}")
        self._trace: TraceWriter | None = None
        if choice is not None and choice.trace_steps > 0:
            rank = trainer.global_rank
            title = f"{model}, rank {rank}" if trainer.world_size > 1 else model
            self._trace = TraceWriter(_trace_file(trainer, store), choice.trace_steps, title, rank)
            of_steps.append(self._trace)
        self._ranks: RankTimes | None = None
        self._ranks_shown: RankTable | None = None
        if choice is not None and store is not None:
            self._ranks = RankTimes(
                store,
                dist.get_rank(),
                dist.get_world_size(),
                window_steps * self._every_n_steps,
                self._show_ranks,
            )
            of_steps.append(self._ranks)
        self.clock = FitClock(
            backend,
            [self._tensorboard, WholeSteps(of_steps)],
            self._every_n_steps,
            *([] if run is None else [run.waited_s]),
        )
        self.host = HostTimes(backend)
        self.host.waits.append(lambda: self.clock.device_waits_s)

    @property
    def _every_n_steps(self) -> int:
        return self._rate.every_n_steps

    def _time_fewer(self) -> None:
        self.clock.every_n_steps = self._every_n_steps
        self.happened(f"One step in {self._every_n_steps} is timed from now on: {self._rate.reason}.")
        self.on_other_rate()

    def layers(self) -> dict[str, nn.Module]:
        """The timed layers that the model has now, by name."""
        return layers_at(self._module, self.names)

    def timed_instances(
        self, accumulation: AccumulationPhase, accumulate_grad_batches: int
    ) -> tuple[bool, ...]:
        """The capture instances that a step needs: True for one with timing events."""
        if self._every_n_steps == 0:
            return (False,)
        # Two timed instances, where timed replays follow each other: if every step is timed, and in the
        # middle of a window, since a window is timed as a whole.
        in_the_middle = not (accumulation.drops or accumulation.steps) and accumulate_grad_batches > 3
        takes_turns = self._backend.graphs_per_step > 1
        timed = (True, True) if takes_turns and (self._every_n_steps == 1 or in_the_middle) else (True,)
        return timed if self._every_n_steps == 1 else (False, *timed)

    def marks(self, has_optimizer: bool, placement: Placement = "forked") -> StepMarks:
        """Create the marks of a step, eager or captured, with or without that of the optimizer.

        Events in a graph are placed between kernels, or on a branch beside them.
        """
        return StepMarks(
            self._backend,
            self.layers(),
            has_optimizer,
            placement,
            with_collectives=has_replicas(self._trainer.strategy),
        )

    def pause(self) -> None:
        """Pause the clocks for work that is no training step (validation, a checkpoint)."""
        self.pace.pause()
        self.clock.pause()
        self._tell_ranks()

    def _show_ranks(self, table: RankTable) -> None:
        """Show the times of all processes for a window; called in the first process."""
        step = table.rows[0].last_step
        self._tensorboard.add_scalars(table.scalars, step)
        self._others.add_beside(table.scalars)
        self._ranks_shown = table

    def _tell_ranks(self) -> None:
        """Show the last of these windows as text, in a pause of training."""
        table, self._ranks_shown = self._ranks_shown, None
        if table is not None and self._tensorboard.is_shown:
            self._tensorboard.add_text("cudagraph/ranks", ranks_text(table), table.rows[0].last_step)

    def count(self, replayed: int, eager: int) -> None:
        """Show how many steps were replayed so far, and how many ran eagerly, with the warm-up.

        Nothing is shown without timings: the event files are then those of a run without the callback.
        """
        if self._every_n_steps and (replayed, eager) != self._counted:
            self._counted = (replayed, eager)
            values = {f"{_COUNT_TAG}replayed": replayed, f"{_COUNT_TAG}eager": eager}
            self._tensorboard.add_scalars(values, step_number(self._trainer))

    def happened(self, text: str) -> None:
        """Show an event of the graphs' life (a capture, an invalidation), as a sentence."""
        self._tensorboard.add_event(text, step_number(self._trainer))

    def finish(self, summary: RunSummary) -> RunSummary:
        """Read the remaining events, add the times to a summary, and show it as the report.

        If an exception has ended the run, no event is waited for.
        """
        ranks = self._finish(summary.ended)
        graph = self._dashboard.summary()
        notes = [*(delay_notes(self._trainer) if self._every_n_steps else []), *self._notes()]
        notes += bucket_notes(self._trainer.strategy, graph)
        is_emulated = self._backend.device.type == "cpu"
        if not is_emulated:
            notes += fused_notes(self._trainer, graph)
        event_host_us = self._backend.event_host_us if self._every_n_steps == 1 else 0.0
        lines = time_lines(graph, ranks, event_host_us, is_emulated=is_emulated)
        lines += host_lines(self.host, callbacks_of(self._trainer))
        summary = replace(
            summary,
            times=StepTimes.of_window(graph, lines),
            notes=(*summary.notes, *notes),
            tensorboard_dir=_tensorboard_dir(self._trainer),
        )
        self._tensorboard.add_text("cudagraph/report", str(summary), step_number(self._trainer))
        return summary

    def finish_eager(self, untimed: Mapping[str, str], ended: str) -> RunSummary:
        """Read the remaining events, and show the summary of a run without graphs as the report.

        `untimed` are parts without times, in words, with the reason. If an exception has ended the run,
        no event is waited for.
        """
        ranks = self._finish(ended)
        window = self._dashboard.summary()
        summary = RunSummary(
            backend=self._device_name,
            refused="the times of an eager run",
            ended=ended,
            tensorboard_dir=_tensorboard_dir(self._trainer),
            notes=(*untimed_notes(untimed), *self._notes()),
            times=StepTimes.of_window(window, time_lines(window, ranks, label="step")),
        )
        self._tensorboard.add_text("layer_timings/report", str(summary), step_number(self._trainer))
        return summary

    def _finish(self, ended: str) -> list[str]:
        """Read the remaining events; in the first process, return the report's lines on all of them."""
        if ended:  # the device may never come to its last events, and other processes never to this end
            return []
        self.clock.finish()
        table = None if self._ranks is None else self._ranks.finish()
        self._tell_ranks()
        return [] if table is None else ranks_lines(table)

    def _notes(self) -> list[str]:
        gone = "the model has it no more; its times are those of before"
        there = self.layers()
        notes = untimed_notes({f"`{name}`": gone for name in self.names if name not in there})
        if self._ranks is not None and self._ranks.trouble:
            notes.append(f"the times of other processes are not known: {self._ranks.trouble}")
        if self._every_n_steps > 1:
            came = "" if len(self._dashboard) else ", and the run has come to none of them"
            why = f"; {self._rate.reason}" if self._rate.reason else ""
            notes.append(f"one step of the optimizer in {self._every_n_steps} is timed{came}{why}")
        if self._trace is not None and len(self._dashboard):
            notes.append(
                f"the last timed steps are in {str(self._trace.path)!r}: open it at"
                " https://ui.perfetto.dev"
            )
        return notes

    def close(self) -> None:
        """Write the remaining readings; events not yet read are not waited for."""
        self.clock.close()


def _trace_file(trainer: pl.Trainer, store: Any) -> Callable[[], Path]:
    """A function for the file of a process's trace, in the folder of the first process.

    Loggers of other processes name other folders, and `trainer.log_dir` is a collective, which blocks
    unless all processes call it. So the first process leaves its folder in the run's own store; until
    it is known, the file is in a folder of this process's own.
    """
    folder, rank = _folder(trainer), trainer.global_rank
    if store is not None and rank == 0:
        store.set(_FOLDER, folder)

    def found() -> Path:
        nonlocal folder
        with suppress(RuntimeError):  # the store may be gone, with the process that hosts it
            if store is not None and store.check([_FOLDER]):
                folder = store.get(_FOLDER).decode()
        return Path(folder) / ("layer_trace.json" if rank == 0 else f"layer_trace_rank{rank}.json")

    return found


def _tensorboard_dir(trainer: pl.Trainer) -> str | None:
    found = (logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))
    return next((os.fspath(folder) for folder in found), None)


def _folder(trainer: pl.Trainer) -> str:
    """The value of `trainer.log_dir`, without the wait for other processes."""
    logger = trainer.logger
    own = logger.log_dir if isinstance(logger, (TensorBoardLogger, CSVLogger)) else None
    folder = os.fspath(own or (logger and logger.save_dir) or trainer.default_root_dir)
    return "." if "://" in folder else folder  # a store elsewhere takes no ordinary files


def other_loggers_writer(
    loggers: Sequence[Logger],
    window_steps: int,
    step_now: Callable[[], int],
    inner: frozenset[str],
) -> MediansWriter:
    """Writer of medians to the loggers that are not for TensorBoard.

    A `CSVLogger` is left out: its rows have all columns, and users compare its files between runs.
    """
    others = [x for x in loggers if not isinstance(x, (TensorBoardLogger, CSVLogger, DummyLogger))]
    if getattr(rank_zero_only, "rank", 0) != 0:
        others = []
    return MediansWriter(others, window_steps, step_now, inner)
