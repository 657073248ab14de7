"""The base classes of devices on which steps are captured, and of their graphs."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import HostWork
from lightning_cudagraph.device.sentry.host_checks import HostChecks, LateChecks
from lightning_cudagraph.device.sentry.sentry import Sentry
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow
from lightning_cudagraph.tensors.writes import Writes, storages_held

T = TypeVar("T")

# Called at each graph break of a replay, with the index of the break.
Between = Callable[[int], None]


class Event(Protocol):
    """A point in time on the device, set by each replay of the graph that holds it."""

    def synchronize(self) -> None:
        """Block the host until the point has been reached."""

    def query(self) -> bool:
        """True if the point has been reached. Not defined for an event that only a graph sets."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to `end`."""


class Graph(ABC):
    """A captured step, in one or more parts with graph breaks between them.

    Args:
        pool: the memory pool that it is captured into.

    Attributes:
        work: the host work of each part.
        written: the tensors that it writes into and that are older than its capture.
        memory_bytes: the device memory that it takes.
    """

    def __init__(self, pool: Any = None) -> None:
        self.pool = pool
        self.work: list[HostWork] = []
        self.written: list[torch.Tensor] = []
        self.memory_bytes = 0

    @abstractmethod
    def replay(self, between: Between | None = None) -> None:
        """Run it on the current stream; at each graph break, call `between` with its index."""

    def host_value_moved(self) -> bool:
        """True if a number in host memory that it has baked in has changed."""
        return False

    def reset(self) -> None:
        """Drop what it holds."""
        self.work.clear()
        self.written.clear()


class Backend(ABC):
    """A device on which steps are warmed up, captured and replayed.

    Methods that are not abstract answer for a CPU, which has done its work at once.

    Attributes:
        graphs_per_step: instances of a timed step, replayed in turn, so that the events of one are read
            while the other runs.
        event_host_us: host time of an event in a graph for each replay, in microseconds: its launch and
            its reading.
        overlaps: True if ops on several streams run concurrently, so that trials show how many streams
            are fastest.
        barriers: the ops of the last capture that made all streams wait, with their counts.
        flow: the data flow of the last capture, if it was recorded.
        in_graph_break: True at a graph break of a replay. The pool then holds memory that the rest of
            the replay needs, so that no other graph may be replayed.
        checks: the checks of replayed steps on the host.
    """

    generators: Generators
    description: str
    graphs_per_step: int
    event_host_us: float
    overlaps: bool

    def __init__(self, device: torch.device, streams: int) -> None:
        self.device = device
        self.streams = streams
        self.barriers: dict[str, int] = {}
        self.records_flow = False
        self.flow: RecordedFlow | None = None
        self.in_graph_break = False
        self.checks = LateChecks()
        self._live: list[Graph] = []

    @abstractmethod
    def on_side_stream(self) -> AbstractContextManager[None]:
        """Run the `with` block on the side stream of warm-up and capture, in order with other work.

        Backward passes run in the calling thread, here and in a capture: so the modes that watch a step
        see the Python code in them, and matrix products use the cuBLAS handle of this thread.
        """

    def is_on_side_stream(self) -> bool:
        """True if the current stream is the side stream: graphs are replayed in order there."""
        return True

    def join_other_threads(self) -> None:  # noqa: B027 - nothing to do on a CPU
        """Order the work so far on the side stream and on the default stream, that of other threads.

        What a step hands to another thread is then complete there, as it is without a side stream.
        """

    @abstractmethod
    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        """Capture the work of `body` without executing it.

        Args:
            is_compiled: True if `body` calls compiled code, which allocates without the dispatcher.

        Returns:
            The graph, and the result of `body`. Its tensors are static, and hold values of the step
            only after a replay.

        Raises:
            CaptureError: if `body` did something that no graph can hold.
            Exception: any other exception of `body`. In both cases the capture has been ended, and
                memory and random state are as before.
        """

    def in_pool(self, pool_of: Graph | None = None) -> AbstractContextManager[None]:
        """Capture into a pool of its own, or into that of another graph, in the `with` block."""
        return nullcontext()

    def stay(self, graph: Graph) -> bool:
        """Capture from now on into a graph's pool; False if there are graphs in the present pool."""
        return True

    @abstractmethod
    def cut(self) -> None:
        """End a part of the capture at a graph break, and begin the next: the host runs between them."""

    @abstractmethod
    def checked(self) -> AbstractContextManager[None]:
        """Run the `with` block eagerly, and refuse what a capture would refuse."""

    def release(self, graph: Graph) -> None:
        """Release a graph and its memory."""
        self._live = [live for live in self._live if live is not graph]
        graph.reset()

    @abstractmethod
    def event(self) -> Event:
        """A new timing event."""

    @abstractmethod
    def mark(self, event: Any, forked: bool = True) -> None:
        """Record `event` after the work issued so far on the current stream.

        A capture makes it part of the graph, so that each replay sets it.

        Args:
            forked: True to record it, in a capture, on a branch that later work does not wait for.
        """

    @abstractmethod
    def mark_end(self, event: Any, work: Any) -> bool:
        """Record `event` at the end of an asynchronous collective; no other work waits for it.

        The tensors of the collective must live until it has ended.

        Args:
            event: the event. Events of several collectives complete in the order of these calls.
            work: the `torch.distributed.Work` of the collective.

        Returns:
            True if later work runs concurrently with the collective.
        """

    @abstractmethod
    def event_times(self, events: Sequence[Any]) -> Callable[[], list[float]]:
        """Build a reader of the times of marked events, in milliseconds after the first."""

    @abstractmethod
    def position(self) -> object | None:
        """The position in the capture: equal as long as nothing is issued; None if it is unknown."""

    def synchronize(self) -> None:  # noqa: B027 - nothing to do on a CPU
        """Block the host until the device has nothing left to do."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """The states of all generators, in host memory."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the states that `rng_state` returned."""

    def free_bytes(self) -> int:
        """Free device memory, in bytes."""
        return sys.maxsize

    def graph_bytes(self) -> int:
        """Device memory of the live graphs, in bytes."""
        return sum(graph.memory_bytes for graph in self._live)

    def workspace_bytes(self) -> int:
        """Device memory of the cuBLAS workspaces of the capture streams, in bytes."""
        return 0

    def host_value_moved(self) -> bool:
        """True if a number in host memory that a graph has baked in has changed."""
        return any(graph.host_value_moved() for graph in self._live)

    def largest_graph_bytes(self) -> int:
        """Device memory of the largest live graph, in bytes: about as much as an eager step needs."""
        return max((graph.memory_bytes for graph in self._live), default=0)

    def _prepare(self, sentry: Sentry, is_compiled: bool) -> None:
        """Make a sentry that of a capture, which finds out what replays write and check."""
        sentry.writes = Writes(storages_held() if is_compiled else None)
        sentry.host_checks = HostChecks(self.checks)
        self.flow = sentry.flow = (
            RecordedFlow(self.device.type, self.position) if self.records_flow else None
        )
