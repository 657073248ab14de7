"""The processes of one `fit`, and the decisions that they take together.

A graph with collectives in it is launched by all processes or by none: so says NCCL's manual ("Using
NCCL with CUDA Graphs"), and it may register buffers of all of them in a capture. So these are decided by
a vote before each step: replay, capture, a check of a replay (it does the step several times, with its
collectives), warm-up after all have dropped their graphs, and giving up. Each process votes for what it
would do by itself, and:

- all vote for the same: they do it;
- one has to run eagerly (another shape): all do, and keep their graphs;
- one has dropped its graphs (a guard): all drop theirs, warm up and capture again;
- one has given up: all do.

The outcome of a capture or a check is gathered from all, so that a failure of one is one of all. Each
process has to itself: the batch shapes that its own graphs are for, layers and their times, logs.

Lightning broadcasts before each batch whether a SIGTERM has come, and makes the host wait for the GPU to
read it. Here the signal goes along with the votes, and all end behind the same batch. All vote before a
validation and at the end of an epoch, too, and say where they are: a process elsewhere would wait in
collectives that the others do not do. There are no votes inside an evaluation, which may have more
batches in one process than in another: there, all end once all have the signal, behind the same batch if
each has as many; where one has it alone, they end behind the next batch of the training, or the epoch.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.compat.features import COLLECTIVES
from lightning_cudagraph.compat.method_patches import replace_method
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import PeerError, UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement, Intent
from lightning_cudagraph.processes.peers import Peers, Vote
from lightning_cudagraph.timing.readings.rank_times import SharedRun

__all__ = ["Distributed", "wrapped_on_side_stream"]

T = TypeVar("T")

# What Lightning's own handler says is said in its name.
_log = logging.getLogger(signal_connector.__name__)

# Where processes vote.
_STEP, _EPOCH_END, _VALIDATION = range(3)
_PLACES = (
    "before batch {0} of the epoch",
    "at the end of the epoch, behind batch {0}",
    "before a validation, behind batch {0}",
)
# Windows of accumulation that are longer are compared by what is left.
_WINDOWS = 1 << 8


def wrapped_on_side_stream(strategy: Strategy, backend: Backend, patches: ExitStack) -> None:
    """Let Lightning wrap the module on the stream of warm-up and capture, and not on one of its own.

    Autograd's accumulation nodes, which the wrapper keeps, stay on the stream that they were made on: in
    a capture on another one, each of them would be a fork of its own.

    Args:
        strategy: the strategy of a `fit` that is about to set up.
        backend: on which it trains.
        patches: puts everything back when it is closed.
    """
    is_lightnings = getattr(strategy._setup_model, "__func__", None) is DDPStrategy._setup_model
    if not (isinstance(strategy, DDPStrategy) and is_lightnings):
        return

    def wrap(module: nn.Module) -> nn.Module:
        device_ids = strategy.determine_ddp_device_ids()
        with backend.on_side_stream():
            return DistributedDataParallel(module, device_ids=device_ids, **strategy._ddp_kwargs)

    replace_method(strategy, "_setup_model", wrap, patches)


def _at(where: int) -> str:
    ready, place = divmod(where, len(_PLACES))
    return _PLACES[place].format(ready - 1)


def _check_same_place(lowest: Vote, highest: Vote) -> None:
    (here, window), (there, other) = divmod(lowest.place, _WINDOWS), divmod(highest.place, _WINDOWS)
    if here != there:
        raise PeerError(
            f"Some processes are {_at(here)}, and others {_at(there)}. One of them has skipped"
            " batches (by what `on_train_batch_start` returns), has been told to stop"
            " (`trainer.should_stop`), or has other numbers of batches or epochs. Let all do the"
            " same; `trainer.strategy.reduce_boolean_decision` has them decide together."
        )
    if window != other:
        raise PeerError(
            f"Some processes have `trainer.accumulate_grad_batches` {window}, and others {other}."
            " Change it in all of them behind the same batch."
        )
    if lowest.is_last != highest.is_last:
        raise PeerError(
            f"Some processes are {_at(here)}, which is the last one there, and not in others. Give"
            " all of them the same number of batches (a `DistributedSampler` does, and"
            " `Trainer(limit_train_batches=...)`), and let `on_train_batch_start` skip the same."
        )


class Distributed:
    """The processes of a `fit`, and their `Agreement`; this one alone, if it is not distributed.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._patches = ExitStack()
        self._peers: Peers | None = None
        self._votes = False
        self._sigterm = False
        self._all_end = False  # with a SIGTERM, and all know it
        if trainer.world_size > 1 and dist.is_initialized():
            require(COLLECTIVES)
            self._peers = Peers()
            # Until training starts, processes may wait in NCCL for one that has failed.
            self._peers.watch(trainer.strategy.root_device)

    @property
    def agreement(self) -> Agreement | None:
        """The agreement with the other processes, or None if there are none."""
        return None if self._peers is None else self

    @property
    def run(self) -> SharedRun | None:
        """The run as all its processes know it, or None if there is one."""
        peers = self._peers
        return None if peers is None else SharedRun(f"graphs/{peers.number}", lambda: peers.waited_s)

    def compare(self, arguments: Mapping[str, Any], refused: UnsupportedError | None = None) -> None:
        """Let no process begin what another one does not, at the start.

        Args:
            arguments: what was asked for in this process, by name.
            refused: why this process would run without graphs.

        Raises:
            ConfigurationError: if the processes were asked for different things.
            UnsupportedError: if this process, or another one, would run without graphs.
        """
        if self._peers is None:
            return
        asked = {f"argument `{name}`": repr(value) for name, value in arguments.items()}
        asked["number of training batches"] = str(self._trainer.num_training_batches)
        asked["`Trainer(accumulate_grad_batches=...)`"] = str(self._trainer.accumulate_grad_batches)
        self._peers.compare(asked, refused)

    def install(self) -> None:
        """Vote before each step from now on."""
        if self._peers is None:
            return
        trainer = self._trainer
        timeout = getattr(trainer.strategy, "_timeout", None) or timedelta(minutes=30)
        self._peers.start(timeout)
        loop = trainer.fit_loop.epoch_loop
        replace_method(loop, "_broadcast_sigterm_tensor", lambda: None, self._patches)
        self._take_sigterm()
        self._votes = True

    def fail(self, error: BaseException) -> None:
        """The run ends with an error: take the other processes along."""
        if self._peers is None or (self._all_end and isinstance(error, SIGTERMException)):
            return
        self._peers.fail(error)

    def pause(self) -> None:
        """Behind a batch of an evaluation, without a vote: end with the others, if all are to end.

        Raises:
            PeerError: if another process has failed.
            SIGTERMException: if all end, and this batch is the last one.
        """
        if self._peers is None or not self._votes:
            return
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.val_loop.batch_progress
        is_last = progress.is_last_batch
        # No two evaluations come behind the same batch.
        word = f"SIGTERM/{loop.batch_progress.total.ready}" if self._sigterm else ""
        if self._peers.pause(word, progress.current.ready, is_last):
            self._end()
            if is_last:
                raise SIGTERMException  # as Lightning does behind any other batch

    def end_epoch(self) -> None:
        """Vote once more, because there may be no other batch.

        Raises:
            PeerError: if another process has failed.
        """
        self._vote_at(_EPOCH_END)

    def begin_validation(self) -> None:
        """Vote before a validation, which may have collectives of its own.

        Raises:
            PeerError: if another process has failed, or does not come.
        """
        self._vote_at(_VALIDATION)

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        """Vote for what this process would do with its batch; see `Agreement`.

        Raises:
            PeerError: if another process has failed, does not come, or is elsewhere in the run.
        """
        return self._vote_at(_STEP, intent)

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process; see `Agreement`."""
        assert self._peers is not None
        return self._peers.gather(mine)

    def _vote_at(self, place: int, intent: Intent = Intent.REPLAY) -> tuple[Intent, Intent]:
        if self._peers is None or not self._votes:
            return intent, intent
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        window = self._trainer.accumulate_grad_batches % _WINDOWS
        where = (progress.current.ready * len(_PLACES) + place) * _WINDOWS + window
        is_last = int(progress.is_last_batch)
        lowest, highest = self._peers.vote(Vote(intent, int(self._sigterm), is_last, where))
        if lowest is not highest:
            _check_same_place(lowest, highest)
        # A validation ends by itself: see `pause`.
        if highest.sigterm and place != _VALIDATION:
            self._end()
        return Intent(lowest.intent), Intent(highest.intent)

    def close(self) -> None:
        """Leave Lightning's objects as they were."""
        with ExitStack() as stack:
            if self._peers is not None:
                stack.callback(self._peers.close)
            stack.callback(self._patches.close)

    def _end(self) -> None:
        """Have Lightning end the run behind this batch, or this epoch, as all have agreed."""
        self._all_end = True
        self._trainer._signal_connector.received_sigterm = True

    def _take_sigterm(self) -> None:
        """Stand in for the handler of Lightning, which would broadcast in the middle of anything."""
        connector = self._trainer._signal_connector
        handlers: Any = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
        if not isinstance(handlers, list) or connector._sigterm_notifier_fn not in handlers:
            return  # not in the main thread, or another library's
        index = handlers.index(connector._sigterm_notifier_fn)
        original = handlers[index]
        handlers[index] = self._on_sigterm
        self._patches.callback(handlers.__setitem__, index, original)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        trainer = self._trainer
        strategy = trainer.strategy
        _log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", trainer.local_rank))
        if not self._sigterm and isinstance(strategy, DDPStrategy) and strategy.launcher is not None:
            strategy.launcher.kill(signum)
        self._sigterm = True
