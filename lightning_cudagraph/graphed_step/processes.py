"""The processes that call one captured function together.

A graph with collectives in it is launched by all processes or by none. So before each call they say what
they would do by themselves, and which arguments they were called with: all do the same to calls that are
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

from lightning_cudagraph.capture.own_modes import OwnDispatchMode
from lightning_cudagraph.capture.processes.agreement import Intent
from lightning_cudagraph.capture.processes.ending import AtEnd
from lightning_cudagraph.capture.processes.ranks import Ranks
from lightning_cudagraph.capture.sentry import forbid, user_location
from lightning_cudagraph.errors import UnsupportedError

__all__ = [
    "CollectiveRules",
    "StepProcesses",
    "are_several",
    "digest_of",
    "is_in_group",
]

T = TypeVar("T")

# Of the digest of what a call is made with, which is exchanged in the place of a batch's number.
_DIGEST_BITS = 40
_TIMEOUT = timedelta(minutes=30)
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The host waits in them.
_HOST_WAITS = ("c10d::barrier", "c10d::monitored_barrier_")


def is_in_group() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def are_several() -> bool:
    """Whether this process is one of several."""
    return is_in_group() and dist.get_world_size() > 1


class StepProcesses:
    """An `Agreement` on the calls of one function. Every process makes one, and calls it as often.

    Args:
        device: where the function runs.
        end: lets go of the graphs, given what has ended the program, if that was an error. Called at the
            end of Python if nobody has before, because process groups are not torn down under graphs.
    """

    def __init__(self, device: torch.device, end: weakref.WeakMethod[Any]) -> None:
        self._device = device
        self._digest = 0
        self._differ = False  # the arguments of the call at hand
        self._ranks = Ranks(lambda: (0, 0, self._digest), self._met)
        # Until all are at their first call, processes may wait in NCCL for one that has failed.
        self._ranks.watch(device)

        def ended(error: BaseException | None) -> None:
            if (method := end()) is not None:
                method(error)
            else:
                self.close()  # it was dropped, and has not said so

        self._at_end = AtEnd(ended)

    def compare(self, asked: Mapping[str, Any], refused: UnsupportedError | None) -> None:
        """At the first call: let no process begin what another one does not.

        Args:
            asked: what was asked for in this process, by name.
            refused: why this process would go on without graphs.

        Raises:
            ConfigurationError: if the processes were asked for different things.
            UnsupportedError: if one of them would go on without graphs.
        """
        words = {f"argument `{name}`": repr(value) for name, value in asked.items()}
        self._ranks.compare(words, refused)

    def start(self) -> None:
        """Meet before each call from now on."""
        self._ranks.start(_TIMEOUT, self._device)

    def begin(self, digest: int) -> None:
        """A call comes.

        Args:
            digest: of what graphs for it take for granted.
        """
        self._digest = digest

    def meet(self, intent: Intent) -> tuple[Intent, Intent]:
        """Say what this process would do; see `Agreement`."""
        lowest, highest = self._ranks.meet(intent)
        if self._differ:
            # Nobody replays or captures, and nobody gives up what it has.
            return Intent.EAGER, Intent.WARM_UP
        return lowest, highest

    def tell(self, mine: T) -> list[T]:
        """Exchange objects; see `Agreement`."""
        return self._ranks.tell(mine)

    def fail(self, error: BaseException) -> None:
        """Something ends with an error: take the other processes along."""
        self._ranks.fail(error)

    def close(self) -> None:
        """Meet no more."""
        self._at_end.cancel()
        self._ranks.close()

    def _met(self, lowest: tuple[int, ...], highest: tuple[int, ...]) -> None:
        self._differ = lowest[2] != highest[2]


def digest_of(kind: str) -> int:
    """A number for what a call is made with, which is the same in all processes if that is."""
    digest = hashlib.blake2s(kind.encode()).digest()
    return int.from_bytes(digest, "little") % (1 << _DIGEST_BITS)


class CollectiveRules(OwnDispatchMode):
    """Refuses collectives that a graph cannot hold.

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
            if name in _HOST_WAITS:
                forbid(
                    f"a barrier (`{name}`), in which the host waits for other processes",
                    "Call it before or after the step.",
                    user_location(),
                )
            if self._alone:
                forbid(
                    f"a collective (`{name}`) in {self._alone}: a graph with collectives is replayed by"
                    " all processes or by none, and each would decide by itself",
                    self._remedy,
                    user_location(),
                )
        return func(*args, **(kwargs or {}))
