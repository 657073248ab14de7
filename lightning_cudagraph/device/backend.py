"""The protocol of a device on which steps are captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.sentry.host_checks import LateChecks
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow

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


class Graph(Protocol):
    """A captured step, in one or more parts with graph breaks between them."""

    def replay(self, between: Between | None = None) -> None:
        """Run it on the current stream; at each graph break, call `between` with its index."""


class Backend(Protocol):
    """A device on which steps are warmed up, captured and replayed.

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

    checks: LateChecks
    in_graph_break: bool
    streams: int
    barriers: dict[str, int]
    records_flow: bool
    flow: RecordedFlow | None
    generators: Generators
    device: torch.device
    description: str
    graphs_per_step: int
    event_host_us: float
    overlaps: bool

    def on_side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Run the `with` block on the side stream of warm-up and capture, in order with other work.

        Backward passes run in the calling thread, here and in a capture: so the modes that watch a step
        see the Python code in them, and matrix products use the cuBLAS handle of this thread.
        """

    def is_on_side_stream(self) -> bool:
        """True if the current stream is the side stream: graphs are replayed in order there."""

    def join_other_threads(self) -> None:
        """Order the work so far on the side stream and on the default stream, that of other threads.

        What a step hands to another thread is then complete there, as it is without a side stream.
        """

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

    def in_pool(self, pool_of: Graph | None = None) -> contextlib.AbstractContextManager[None]:
        """Capture into a pool of its own, or into that of another graph, in the `with` block."""

    def stay(self, graph: Graph) -> bool:
        """Capture from now on into a graph's pool; False if there are graphs in the present pool."""

    def cut(self) -> None:
        """End a part of the capture at a graph break, and begin the next: the host runs between them."""

    def checked(self) -> contextlib.AbstractContextManager[None]:
        """Run the `with` block eagerly, and refuse what a capture would refuse."""

    def written(self, graph: Graph) -> list[torch.Tensor]:
        """The tensors that a graph writes into and that are older than its capture."""

    def release(self, graph: Graph) -> None:
        """Release a graph and its memory."""

    def event(self) -> Event:
        """A new timing event."""

    def mark(self, event: Any, forked: bool = True) -> None:
        """Record `event` after the work issued so far on the current stream.

        A capture makes it part of the graph, so that each replay sets it.

        Args:
            forked: True to record it, in a capture, on a branch that later work does not wait for.
        """

    def mark_end(self, event: Any, work: Any) -> bool:
        """Record `event` at the end of an asynchronous collective; no other work waits for it.

        The tensors of the collective must live until it has ended.

        Args:
            event: the event. Events of several collectives complete in the order of these calls.
            work: the `torch.distributed.Work` of the collective.

        Returns:
            True if later work runs concurrently with the collective.
        """

    def event_times(self, events: Sequence[Any]) -> Callable[[], list[float]]:
        """Build a reader of the times of marked events, in milliseconds after the first."""

    def position(self) -> object | None:
        """The position in the capture: equal as long as nothing is issued; None if it is unknown."""

    def synchronize(self) -> None:
        """Block the host until the device has nothing left to do."""

    def rng_state(self) -> torch.Tensor:
        """The states of all generators, in host memory."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the states that `rng_state` returned."""

    def free_bytes(self) -> int:
        """Free device memory, in bytes."""

    def graph_bytes(self) -> int:
        """Device memory of the live graphs, in bytes."""

    def workspace_bytes(self) -> int:
        """Device memory of the cuBLAS workspaces of the capture streams, in bytes."""

    def host_value_moved(self) -> bool:
        """True if a number in host memory that a graph has baked in has changed."""

    def largest_graph_bytes(self) -> int:
        """Device memory of the largest live graph, in bytes: about as much as an eager step needs."""
