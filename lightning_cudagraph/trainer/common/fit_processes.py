"""Votes of the processes of a `fit`, or of evaluations with sharded weights.

All processes or none must launch a graph with collectives, and a capture may register NCCL buffers of
all of them (NCCL's manual, "Using NCCL with CUDA Graphs"). So the processes vote before each step on:
replay, capture, verification (it runs the step several times, with its collectives), warm-up after an
invalidation, and giving up. Each votes for its own plan, and:

- if all plans are equal, they follow it;
- if one must run eagerly (another shape), all do, and keep their graphs;
- if a guard of one has invalidated its graphs, all release theirs, warm up and capture again;
- if one has given up, all do.

The results of a capture or verification are gathered, so that it fails in all processes or in none.
Batch shapes, layers with their times, and logs are each process's own.

Lightning broadcasts before each batch if a SIGTERM has come, and the host waits for the GPU to read it.
Here the signal is part of the vote, and all processes end after the same batch. They also vote before a
validation and at the end of an epoch. Each vote contains the position in the run, because a process
elsewhere would wait in collectives that the others do not launch.

There are no votes inside an evaluation, because processes may have different numbers of batches in it;
except with sharded weights, which no process can gather alone, in `fit` or outside of it.
Once all processes have the signal, an evaluation ends, after the same batch if all have equally many. If
only some processes have it, the run ends after the next training batch or at the end of the epoch.
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
from lightning_cudagraph.compat.method_patches import patch_method
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import PeerError, UnsupportedError
from lightning_cudagraph.processes.agreement import Agreement, Intent
from lightning_cudagraph.processes.peers import Peers, Vote
from lightning_cudagraph.timing.readings.rank_times import SharedRun

T = TypeVar("T")

# The name of the logger of Lightning's own SIGTERM handler.
_log = logging.getLogger(signal_connector.__name__)

# The positions in a run at which processes vote.
_STEP, _EPOCH_END, _VALIDATION, _EVALUATION = range(4)
_PLACES = (
    "before batch {0} of the epoch",
    "at the end of the epoch, after batch {0}",
    "before a validation, after batch {0}",
    "before batch {0} of all evaluations",
)
_TIMEOUT = timedelta(minutes=30)
# The lengths of accumulation windows are compared modulo this number.
_WINDOWS = 1 << 8


def wrapped_on_side_stream(strategy: Strategy, backend: Backend, patches: ExitStack) -> None:
    """Patch Lightning to make the DDP wrapper on the side stream of warm-up and capture.

    The wrapper keeps autograd's accumulation nodes, which stay on the stream on which they were made. In
    a capture on another stream, each of them would fork the graph.
    """
    is_lightnings = getattr(strategy._setup_model, "__func__", None) is DDPStrategy._setup_model
    if not (isinstance(strategy, DDPStrategy) and is_lightnings):
        return

    def wrap(module: nn.Module) -> nn.Module:
        device_ids = strategy.determine_ddp_device_ids()
        with backend.on_side_stream():
            return DistributedDataParallel(module, device_ids=device_ids, **strategy._ddp_kwargs)

    patch_method(strategy, "_setup_model", wrap, patches)


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
            " Change it in all of them after the same batch."
        )
    if lowest.is_last != highest.is_last:
        raise PeerError(
            f"Some processes are {_at(here)}, which is the last one there, and not in others. Give"
            " all of them the same number of batches (a `DistributedSampler` does, and"
            " `Trainer(limit_train_batches=...)`), and let `on_train_batch_start` skip the same."
        )


class FitProcesses:
    """The `Agreement` of the processes of a run; without effect if there is one process."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._patches = ExitStack()
        self._peers: Peers | None = None
        self._votes = False
        self._evaluated = 0  # batches of all evaluations
        self._sigterm = False
        self._all_end = False  # because of a SIGTERM that all processes know of
        if trainer.world_size > 1 and dist.is_initialized():
            require(COLLECTIVES)
            self._peers = Peers()
            # Until training starts, processes may wait in NCCL for one that has failed.
            self._peers.watch(trainer.strategy.root_device)

    @property
    def agreement(self) -> Agreement | None:
        """The votes with the other processes; None if there are none."""
        return None if self._peers is None else self

    @property
    def run(self) -> SharedRun | None:
        """The identity of the run, shared by all its processes; None if there is one process."""
        peers = self._peers
        return None if peers is None else SharedRun(f"graphs/{peers.number}", lambda: peers.waited_s)

    def compare(self, arguments: Mapping[str, Any], refused: UnsupportedError | None = None) -> None:
        """Compare the processes as training or an evaluation begins; refuse graphs if one has none."""
        if self._peers is None:
            return
        asked = {f"argument `{name}`": repr(value) for name, value in arguments.items()}
        if self._trainer.training:
            asked["number of training batches"] = str(self._trainer.num_training_batches)
            asked["`Trainer(accumulate_grad_batches=...)`"] = str(self._trainer.accumulate_grad_batches)
        self._peers.compare(asked, refused)

    def install(self) -> None:
        """Vote before each step from now on."""
        if self._peers is None:
            return
        self.start()
        loop = self._trainer.fit_loop.epoch_loop
        patch_method(loop, "_broadcast_sigterm_tensor", lambda: None, self._patches)
        self._take_sigterm()

    def start(self) -> None:
        """Begin to vote, and leave signals to Lightning."""
        if self._peers is not None:
            self._peers.start(getattr(self._trainer.strategy, "_timeout", None) or _TIMEOUT)
            self._votes = True

    def fail(self, error: BaseException) -> None:
        """End the other processes too, because of `error`."""
        if self._peers is None or (self._all_end and isinstance(error, SIGTERMException)):
            return
        self._peers.fail(error)

    def pause(self) -> None:
        """End the run after a batch of an evaluation if all processes have a SIGTERM; without a vote."""
        if self._peers is None or not self._votes:
            return
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.val_loop.batch_progress
        is_last = progress.is_last_batch
        # Unique: two evaluations never follow the same training batch.
        word = f"SIGTERM/{loop.batch_progress.total.ready}" if self._sigterm else ""
        if self._peers.pause(word, progress.current.ready, is_last):
            self._end()
            if is_last:
                raise SIGTERMException  # Lightning raises it after other batches

    def end_epoch(self) -> None:
        """Vote at the end of an epoch: the last chance to do so in a run."""
        self._vote_at(_EPOCH_END)

    def begin_validation(self) -> None:
        """Vote before a validation, which may launch its own collectives."""
        self._vote_at(_VALIDATION)

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        if self._trainer.training:
            return self._vote_at(_STEP, intent)
        self._evaluated += 1
        return self._vote_at(_EVALUATION, intent, self._evaluated)

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process; see `Agreement`."""
        assert self._peers is not None
        return self._peers.gather(mine)

    def _vote_at(
        self, place: int, intent: Intent = Intent.REPLAY, ready: int | None = None
    ) -> tuple[Intent, Intent]:
        """Vote at a place, after so many batches: by default, those of the epoch."""
        if self._peers is None or not self._votes:
            return intent, intent
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        window, is_last = 0, 0
        if ready is None:
            ready = progress.current.ready
            window = self._trainer.accumulate_grad_batches % _WINDOWS
            is_last = int(progress.is_last_batch)
        where = (ready * len(_PLACES) + place) * _WINDOWS + window
        lowest, highest = self._peers.vote(Vote(intent, int(self._sigterm), is_last, where))
        if lowest is not highest:
            _check_same_place(lowest, highest)
        # A validation is ended by `pause`.
        if highest.sigterm and place not in (_VALIDATION, _EVALUATION):
            self._end()
        return Intent(lowest.intent), Intent(highest.intent)

    def close(self) -> None:
        """Restore Lightning's objects, and vote no more."""
        with ExitStack() as stack:
            if self._peers is not None:
                stack.callback(self._peers.close)
            stack.callback(self._patches.close)

    def _end(self) -> None:
        """Tell Lightning to end the run after this batch or epoch, as all processes have voted."""
        self._all_end = True
        self._trainer._signal_connector.received_sigterm = True

    def _take_sigterm(self) -> None:
        """Replace Lightning's SIGTERM handler, which would broadcast at an arbitrary point."""
        connector = self._trainer._signal_connector
        handlers: Any = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
        if not isinstance(handlers, list) or connector._sigterm_notifier_fn not in handlers:
            return  # not in the main thread, or the handler of another library
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
