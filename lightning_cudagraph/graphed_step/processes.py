"""The processes that call one captured function together.

A graph with collectives in it is launched by all processes or by none. So before each call they vote for
what they would do by themselves, with a digest of the arguments: all do the same with calls that are
alike, and where arguments differ in shape, all call the function itself.

A function that works on no `DistributedDataParallel` is each process's own; it may be called by some of
them alone, and may hold no collectives.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_cudagraph.device.sentry.noted import refused
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.device.sentry.sentry import forbidden, user_location
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import Intent
from lightning_cudagraph.processes.at_exit import AtExit
from lightning_cudagraph.processes.peers import Peers, Vote

__all__ = [
    "CollectiveRules",
    "StepProcesses",
    "are_several",
    "digest_of",
    "is_in_group",
]

T = TypeVar("T")

# Of the digest of the arguments of a call, which goes along with each vote.
_DIGEST_BITS = 40
_TIMEOUT = timedelta(minutes=30)
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The host waits in them.
_HOST_WAITS = ("c10d::barrier", "c10d::monitored_barrier_")


def is_in_group() -> bool:
    """Tell if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def are_several() -> bool:
    """Tell if this process is one of several."""
    return is_in_group() and dist.get_world_size() > 1


class StepProcesses:
    """An `Agreement` on the calls of one function. Every process makes one, and calls it as often.

    Args:
        device: where the function runs.
        end: lets go of the graphs, given the error that has ended the program, if there was one. Called
            at the end of Python at the latest, because process groups are not torn down under graphs.
    """

    def __init__(self, device: torch.device, end: weakref.WeakMethod[Any]) -> None:
        self._digest = 0
        self._peers = Peers()
        # Until all are at their first call, processes may wait in NCCL for one that has failed.
        self._peers.watch(device)

        def ended(error: BaseException | None) -> None:
            if (method := end()) is not None:
                method(error)
            else:
                self.close()  # it was dropped, and has not said so

        self._at_exit = AtExit(ended)

    def compare(self, asked: Mapping[str, Any], refused: UnsupportedError | None) -> None:
        """Let no process begin what another one does not, at the first call.

        Args:
            asked: what was asked for in this process, by name.
            refused: why this process would go on without graphs.

        Raises:
            ConfigurationError: if the processes were asked for different things.
            UnsupportedError: if one of them would go on without graphs.
        """
        words = {f"argument `{name}`": repr(value) for name, value in asked.items()}
        self._peers.compare(words, refused)

    def start(self) -> None:
        """Vote before each call from now on."""
        self._peers.start(_TIMEOUT)

    def begin(self, digest: int) -> None:
        """A call comes.

        Args:
            digest: of what graphs for it take for granted.
        """
        self._digest = digest

    def vote(self, intent: Intent) -> tuple[Intent, Intent]:
        """Vote for what this process would do; see `Agreement`."""
        lowest, highest = self._peers.vote(Vote(intent, place=self._digest))
        if lowest.place != highest.place:
            # The arguments differ: no process replays or captures, and none gives up its graphs.
            return Intent.EAGER, Intent.WARM_UP
        return Intent(lowest.intent), Intent(highest.intent)

    def gather(self, mine: T) -> list[T]:
        """Gather an object of each process; see `Agreement`."""
        return self._peers.gather(mine)

    def fail(self, error: BaseException) -> None:
        """Something ends with an error: take the other processes along."""
        self._peers.fail(error)

    def close(self) -> None:
        """Take part in no other vote."""
        self._at_exit.cancel()
        self._peers.close()


def digest_of(kind: str) -> int:
    """A digest of the kind of arguments of a call, the same in all processes if that is."""
    digest = hashlib.blake2s(kind.encode()).digest()
    return int.from_bytes(digest, "little") % (1 << _DIGEST_BITS)


class CollectiveRules(OwnDispatchMode):
    """A mode that refuses collectives that a graph cannot hold.

    Args:
        alone: what it is a graph of, if each process would decide by itself when it is replayed; or
            nothing, if all replay it together.
        remedy: for collectives there.
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
