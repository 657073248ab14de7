"""Votes of the processes that call one captured function together.

A graph with collectives is launched by all processes or by none. So before each call the processes vote
on the plan for it, with a digest of the arguments. If the shapes of arguments differ between processes,
the call is eager in all of them.

Without a `DistributedDataParallel` or sharded weights among its modules, each process calls the function
independently, and collectives in it are refused.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbidden, refused
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Intent
from lightning_cudagraph.processes.at_exit import AtExit
from lightning_cudagraph.processes.peers import Peers, Vote

T = TypeVar("T")

# The size of the digest of the arguments, which is part of each vote.
_DIGEST_BITS = 40
_TIMEOUT = timedelta(minutes=30)
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Collectives in which the host waits.
_HOST_WAITS = ("c10d::barrier", "c10d::monitored_barrier_")


def is_in_group() -> bool:
    """True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def are_several() -> bool:
    """True if this process is one of several."""
    return is_in_group() and dist.get_world_size() > 1


class StepProcesses:
    """An `Agreement` on the calls of one function; every process makes one and votes equally often.

    `end` releases the graphs, given the error that ends the program, or None: at the latest when Python
    ends, because a process group with graphs on it cannot be torn down.
    """

    def __init__(self, device: torch.device, end: weakref.WeakMethod[Any]) -> None:
        self._digest = 0
        self._peers = Peers()
        # Before the first call, processes may wait in NCCL for one that has failed.
        self._peers.watch(device)

        def ended(error: BaseException | None) -> None:
            if (method := end()) is not None:
                method(error)
            else:
                self.close()  # the `GraphedStep` is gone, and was not closed

        self._at_exit = AtExit(ended)

    def compare(self, asked: Mapping[str, Any], refused: UnsupportedError | None) -> None:
        """Compare the processes at the first call, and refuse graphs if one cannot have them."""
        words = {f"argument `{name}`": repr(value) for name, value in asked.items()}
        self._peers.compare(words, refused)

    def start(self) -> None:
        """Vote before each call from now on."""
        self._peers.start(_TIMEOUT)

    def begin(self, digest: int) -> None:
        self._digest = digest

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        lowest, highest = self._peers.vote(Vote(intent, place=self._digest))
        if lowest.place != highest.place:
            # The arguments differ: all processes run eagerly, and keep their graphs.
            return Intent.EAGER, Intent.WARM_UP
        return Intent(lowest.intent), Intent(highest.intent)

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process; see `Agreement`."""
        return self._peers.gather(mine)

    def fail(self, error: BaseException) -> None:
        self._peers.fail(error)

    def close(self) -> None:
        self._at_exit.cancel()
        self._peers.close()


def digest_of(kind: str) -> int:
    """Return a digest that is equal in all processes if the kind of arguments is."""
    digest = hashlib.blake2s(kind.encode()).digest()
    return int.from_bytes(digest, "little") % (1 << _DIGEST_BITS)


class CollectiveRules(OwnDispatchMode):
    """A dispatch mode that refuses collectives that a graph cannot hold.

    Args:
        alone: the captured code, in words, if each process would replay it independently: all
            collectives are refused. Empty if all processes replay it together.
    """

    def __init__(self, alone: str, remedy: str) -> None:
        super().__init__()
        self._alone = alone
        self._remedy = remedy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            name = func._schema.name
            # Also where refusals are gathered: the other processes may not take part.
            if name in _HOST_WAITS:
                raise refused(
                    forbidden(
                        f"a barrier (`{name}`), in which the host waits for other processes",
                        "Call it before or after the step.",
                        user_location(),
                    )
                )
            if self._alone:
                raise refused(
                    forbidden(
                        f"a collective (`{name}`) in {self._alone}: a graph with collectives is replayed"
                        " by all processes or by none, and each would decide by itself",
                        self._remedy,
                        user_location(),
                    )
                )
        return func(*args, **(kwargs or {}))
