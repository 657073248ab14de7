"""A probe of Lightning's training loop: the calls it makes for two batches, as a digest.

The fast path between replays does what Lightning's loop does there, in the same order. For an unknown
release of Lightning, its loop is run here once, around a mock of everything else, and all its calls are
recorded, with its counters after each batch. The mock has the attributes that the known loop reads from
a trainer: a loop that reads more raises, and so counts as changed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_cudagraph.compat.garbage import garbage_kept
from lightning_cudagraph.compat.probes import found

_FOLDER = os.path.dirname(os.path.abspath(pl.__file__)) + os.sep
# By path, as in `names/lightning_names.py`, whose table leads here.
_FIT_LOOP = "lightning.pytorch.loops.fit_loop._FitLoop"
_LOGGER_CONNECTOR = (
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector"
)
_BATCHES = 2


class _Module(pl.LightningModule):
    weight: torch.nn.Parameter

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight.sum() * batch

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        pass


class _Fetcher:
    """A data fetcher with a fixed number of batches."""

    def __init__(self) -> None:
        self.fetched = 0
        self.done = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.fetched += 1
        self.done = self.fetched == _BATCHES
        return torch.ones((), device="cpu"), self.fetched - 1, 0


class _Strategy:
    """A strategy that calls closures and computes nothing."""

    handles_gradient_accumulation = False

    def __init__(self, trainer: Any) -> None:
        optimizer: Any = LightningOptimizer(torch.optim.SGD(trainer.lightning_module.parameters(), 0.1))
        optimizer._strategy = self
        self._lightning_optimizers = [optimizer]
        self._module = trainer.lightning_module
        self.precision_plugin = trainer.precision_plugin

    def batch_to_device(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, *args: Any) -> Any:
        return self._module.training_step(*args)

    def post_training_step(self) -> None:
        pass

    def backward(self, loss: Any, *args: Any) -> Any:
        return loss

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        return closure()


def _mock(accumulate: int) -> Any:
    """A trainer with the attributes that the known loop reads."""
    module = _Module()
    module.weight = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    schedule = SimpleNamespace(scheduler=None, interval="step", frequency=1, reduce_on_plateau=False)
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=accumulate,
        callbacks=[],
        check_val_every_n_epoch=1,
        current_epoch=0,
        enable_validation=False,
        fast_dev_run=False,
        is_last_batch=False,
        lightning_module=module,
        log_every_n_steps=1,
        loggers=[],
        lr_scheduler_configs=[schedule],
        num_training_batches=_BATCHES,
        precision_plugin=SimpleNamespace(convert_input=lambda batch: batch),
        profiler=PassThroughProfiler(),
        received_sigterm=False,
        should_stop=False,
        training=True,
        validating=False,
        world_size=1,
    )
    trainer.strategy = _Strategy(trainer)
    trainer.optimizers = [trainer.strategy._lightning_optimizers[0].optimizer]
    trainer.fit_loop = found(_FIT_LOOP)(trainer)
    trainer._logger_connector = found(_LOGGER_CONNECTOR)(trainer)
    trainer._active_loop, trainer._results = trainer.fit_loop, trainer.fit_loop.epoch_loop._results
    trainer._data_connector = SimpleNamespace(
        _datahook_selector=SimpleNamespace(get_instance=lambda name: module)
    )
    module._trainer = trainer
    return trainer


def _counters(trainer: Any) -> str:
    loop = trainer.fit_loop.epoch_loop
    progresses = (
        loop.batch_progress,
        loop.scheduler_progress,
        loop.automatic_optimization.optim_progress,
    )
    stepped, first = loop._batches_that_stepped, trainer._logger_connector._first_loop_iter
    return f"{progresses} {stepped} {first} {loop._results.batch is None} {loop._results.batch_size}"


def loop_calls(accumulate: int) -> list[str]:
    """The calls of Lightning's loop for two batches, in order, and its counters after each."""
    trainer, fetcher, calls = _mock(accumulate), _Fetcher(), list[str]()
    loop = trainer.fit_loop.epoch_loop

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions are calls in some versions of Python; their names begin with `<`.
        if event == "call" and code.co_filename.startswith(_FOLDER) and code.co_name[0] != "<":
            calls.append(f"{code.co_filename.removeprefix(_FOLDER)}:{code.co_name}")

    # A collection would record finalizers of older runs too, such as a profiler's `__del__`.
    with torch.inference_mode(False), torch.enable_grad(), garbage_kept():
        for _ in range(_BATCHES):
            before = sys.getprofile()
            sys.setprofile(record)
            try:
                loop.advance(fetcher)
                loop.on_advance_end(fetcher)
                loop.on_iteration_done()
            finally:
                sys.setprofile(before)
            calls.append(_counters(trainer))
            calls.append(f"done: {loop.done}")
    return calls


def digest_of_calls() -> str:
    """SHA-256 of the calls without accumulation and with it; empty if the mock does not fit the loop."""
    if sys.getprofile() is not None:
        return ""  # a profiler written in C could not be restored
    try:
        calls = [*loop_calls(1), *loop_calls(_BATCHES)]
    except Exception:  # a changed loop may raise anything
        return ""
    return hashlib.sha256("\n".join(calls).encode()).hexdigest()
