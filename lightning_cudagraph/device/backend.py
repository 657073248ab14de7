"""What a device must offer so that a training step can be captured on it, and the CUDA one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.autograd import set_multithreading_enabled

from lightning_cudagraph.compat.features import CUDA
from lightning_cudagraph.compat.names.torch_names import _disable_current_modes
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.driver import event_times, position_of
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.graph_parts import Between, CudaParts
from lightning_cudagraph.device.host_work import host_work_of
from lightning_cudagraph.device.refusals import clear_frames, meaning_of
from lightning_cudagraph.device.sentry.mends import Constants, HostMemory, MendingSentry
from lightning_cudagraph.device.sentry.noted import noted_refusals
from lightning_cudagraph.device.sentry.sentry import HostReads
from lightning_cudagraph.device.streams.branches import Branches, SentBackError
from lightning_cudagraph.device.streams.side_streams import (
    SideStream,
    event_stream,
    keep_all_workspaces,
)
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.writes import Writes, storages_held

__all__ = ["Backend", "CudaBackend", "Event", "Graph"]

T = TypeVar("T")

# The address of the current stream of a device.
_handle_of_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Event(Protocol):
    """A point in time on the device, set anew by each replay of the graph that holds it."""

    def synchronize(self) -> None:
        """Block the host until the point has been reached."""

    def query(self) -> bool:
        """Whether the point has been reached. Not to be asked of one that only a graph sets."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to `end`."""


class Graph(Protocol):
    """A captured piece of work, in one part or more."""

    def replay(self, between: Between | None = None) -> None:
        """Run it, on the current stream.

        Args:
            between: called after each part but the last, with the number of parts before it less one.
        """


class Backend(Protocol):
    """A device on which steps are warmed up, captured and replayed.

    Attributes:
        generators: what the steps draw random numbers from.
        device: where the training step runs.
        description: one line for the user that says what this is.
            graphs_per_step: how many captures of a timed step take turns, so that the events of one are
            read while the other runs.
        event_host_us: what an event in a graph takes of the host in each replay, in microseconds, to be
            launched and to be read.
        overlaps: ops on several streams run side by side, so that trials show how many are fastest.
        streams: on how many streams ops that do not need one another are captured.
        barriers: what all streams of the last capture waited for, and that for them, and how often.
        in_turn: the host has a turn in the middle of a replay. Memory of the pool holds what the rest of
            it needs, so that no other graph may be replayed.
    """

    in_turn: bool
    streams: int
    barriers: dict[str, int]
    generators: Generators
    device: torch.device
    description: str
    graphs_per_step: int
    event_host_us: float
    overlaps: bool

    def on_side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Run what is inside on the one side stream of warm-up and capture, in order with the rest.

        Backward passes run in the calling thread, there and in a capture: Python in them is seen by all
        that watches a step, and multiplies matrices with the handle of this thread.
        """

    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        """Capture what `body` does, without its taking effect.

        Args:
            body: the work, run once.
            is_compiled: it calls compiled code, which takes memory past all dispatch.

        Returns:
            The graph, and what `body` returned: its tensors are static, and hold values of the step
            only after a replay.

        Raises:
            CaptureError: if `body` did something that no graph can hold.
            Exception: whatever else `body` raised. In both cases the capture has been ended, and
                memory and random state are as before.
        """

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """What is captured inside shares no memory with the other graphs, and is released inside."""

    def cut(self) -> None:
        """End a part of the capture under way, and begin the next: the host has a turn between them."""

    def checked(self) -> contextlib.AbstractContextManager[None]:
        """Run what is inside, and refuse what a capture would refuse, without one."""

    def written(self, graph: Graph) -> list[torch.Tensor]:
        """Tensors older than the capture of a graph that it writes into."""

    def release(self, graph: Graph) -> None:
        """Let go of a graph and of its memory."""

    def event(self) -> Event:
        """A new timing event."""

    def mark(self, event: Any, forked: bool = True) -> None:
        """Let `event` say when the work issued so far on the current stream has finished.

        In a capture anew in each replay. Outside of one, once.

        Args:
            event: the event.
            forked: in a capture, what follows does not wait for it.
        """

    def mark_end(self, event: Any, work: Any) -> bool:
        """Let `event` say when a collective that is not waited for yet has finished.

        Nothing else waits for it. What it works on must live until it has.

        Args:
            event: the event. Those of several collectives are passed in the order of these calls.
            work: the collective, as `torch.distributed` handed it out.

        Returns:
            Whether what comes after it runs beside it.
        """

    def event_times(self, events: Sequence[Any]) -> Callable[[], list[float]]:
        """What reads when events were passed.

        Args:
            events: they have been marked.

        Returns:
            A function that gives milliseconds after the first, one for each.
        """

    def position(self) -> object | None:
        """How far the current stream has come in the capture under way.

        Returns:
            Something that equals itself as long as nothing is issued; None where that cannot be known.
        """

    def synchronize(self) -> None:
        """Block the host until the device has nothing left to do."""

    def rng_state(self) -> torch.Tensor:
        """The states of the generators, in host memory."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put the generators into the states that `rng_state` returned."""

    def free_bytes(self) -> int:
        """Device memory that can still be allocated, in bytes."""

    def graph_bytes(self) -> int:
        """Device memory that the live graphs have taken, in bytes."""

    def workspace_bytes(self) -> int:
        """Device memory that the streams of captures keep as scratch memory, in bytes."""

    def host_value_moved(self) -> bool:
        """Whether a number in host memory that a graph has baked in is another one now."""

    def largest_graph_bytes(self) -> int:
        """The part of it that one graph has taken, about as much as an eager step needs."""


@dataclass
class _Live:
    """A graph, its pool, the device memory that it has taken, and what it reads and writes outside."""

    graph: Graph
    pool: tuple[int, int]
    taken_bytes: int
    host_memory: HostMemory
    written: list[torch.Tensor]


class CudaBackend:
    """CUDA graphs through `torch.cuda.CUDAGraph`.

    One side stream serves warm-up and capture, so that autograd's accumulation nodes, cuBLAS
    workspaces and cuDNN plans made in warm-up are the ones that the capture meets. One memory pool
    serves all graphs. The capture mode is ``thread_local``: pin-memory threads of dataloaders and the
    watchdog of NCCL go on making CUDA calls while a capture is under way.
    """

    description = "CUDA graphs"
    graphs_per_step = 2
    event_host_us = 1.6  # 1.0 and 0.6 (H200, driver of CUDA 13.0): docs/times.md
    overlaps = True

    def __init__(self, device: torch.device, streams: int = 1) -> None:
        require(CUDA)
        self.device = device
        self.streams = streams
        self.barriers: dict[str, int] = {}
        self.in_turn = False
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._side = SideStream(device)
        self._side_stream = self._side.stream
        self._other_sides: list[SideStream] = []
        # Each stream that is marked has one beside it: what waits for one would hold up the other.
        self._timing_streams = {self._side_stream: event_stream(device)}
        # Waits for collectives, which run on streams that torch does not show.
        self._collectives_stream = event_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.generators = Generators("cuda", torch.cuda.default_generators[self._index])
        self._live: list[_Live] = []
        # The timing streams that take part in the capture.
        self._forked: set[torch.cuda.Stream] = set()
        self._recording: CudaParts | None = None
        self._branches: Branches | None = None
        self._current: torch.cuda.Stream | None = None  # when it was last asked for

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._side_stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._side_stream), set_multithreading_enabled(False):
                self._side.keep_workspaces()
                yield
        finally:
            current.wait_stream(self._side_stream)

    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        torch.cuda.synchronize(self.device)
        # A cycle collected in the middle of a capture may free what CUDA may not free then.
        gc.collect()
        torch.cuda.empty_cache()
        sides = self._sides()
        keep_all_workspaces(sides)
        # Replays do not wait for what this has just run on other streams, in memory that they use.
        torch.cuda.synchronize(self.device)
        if all(live.pool != self._pool for live in self._live):
            # A pool that all graphs have left cannot be entered again (an assertion in torch 2.11).
            self._pool = torch.cuda.graph_pool_handle()
        rng_state = self.rng_state()
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        memory = HostMemory()
        graph = CudaParts(self.generators, self._pool)
        branches = Branches([side.stream for side in sides], graph) if len(sides) > 1 else None
        sentry = MendingSentry(self.generators, memory, branches)
        sentry.writes = Writes(storages_held() if is_compiled else None)
        failure: BaseException | None = None
        broken: Exception | None = None
        result: Any = None
        gc_was_on = gc.isenabled()
        gc.disable()
        try:
            self._recording, self._branches = graph, branches
            with torch.cuda.stream(self._side_stream), set_multithreading_enabled(False):
                try:
                    self._begin_part(graph)
                    with (
                        host_work_of(graph.work),
                        HostReads(self.device.type),
                        Constants(memory),
                        sentry,
                        noted_refusals(),
                    ):
                        result = body()
                except BaseException as error:
                    failure = error
                broken = self._end_capture(graph)
            if failure is None and branches is not None and branches.broken is not None:
                failure = SentBackError(branches.broken)
        finally:
            self._recording = self._branches = None
            self._forked.clear()
            if gc_was_on:
                gc.enable()
        if failure is None and broken is None:
            self.barriers = {} if branches is None else branches.barriers
            taken_bytes = torch.cuda.memory_reserved(self.device) - reserved_bytes
            self._live.append(_Live(graph, self._pool, taken_bytes, memory, sentry.writes.older))
            return graph, result
        if broken is not None:
            self._repair(rng_state)
        graph.reset()
        if failure is not None:
            explained = meaning_of(failure)
            if isinstance(failure, Exception):
                # Training may go on, but the frames of the failure hold autograd's graph of the step,
                # and with it nodes of the broken capture, which the next step would meet again.
                clear_frames(failure)
            raise explained
        raise CaptureError(
            f"CUDA gave up the capture of the training step: {str(broken).splitlines()[0]}.",
            "Something in it used another stream without joining it, or an extension synchronised.",
        )

    @contextmanager
    def checked(self) -> Iterator[None]:
        memory = HostMemory()
        sentry = MendingSentry(self.generators, memory)
        with HostReads(self.device.type), Constants(memory), sentry, noted_refusals():
            yield

    def cut(self) -> None:
        assert self._recording is not None
        # Without the modes that watch the step: what torch itself writes at the beginning of a capture
        # (the seeds and offsets of generators) is not part of it.
        with _disable_current_modes():
            if (broken := self._end_capture(self._recording)) is not None:
                raise broken
            self._forked.clear()
            self._begin_part(self._recording)

    def _sides(self) -> list[SideStream]:
        """The streams of a capture, from the first: as many as ops may be on."""
        while len(self._other_sides) < self.streams - 1:
            self._other_sides.append(SideStream(self.device))
        return [self._side, *self._other_sides[: self.streams - 1]]

    def _begin_part(self, graph: CudaParts) -> None:
        graph.begin()
        if self._branches is not None:
            self._branches.begin()

    @contextmanager
    def apart(self) -> Iterator[None]:
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        try:
            yield
        finally:
            self._pool = pool

    def _end_capture(self, graph: CudaParts) -> Exception | None:
        """End the capture, on the error path too, where nothing may be left open."""
        failure: Exception | None = None
        try:
            if self._branches is not None:
                self._branches.end()
            if self._forked or self._branches is not None:
                for stream in self._forked:
                    # A capture that ends with a forked stream not joined is lost.
                    self._side_stream.wait_stream(stream)
                # In one node, and not in several branches: two graphs that take turns, and begin and end
                # in one node each, took 29 to 47 us less for a step of 2.3 ms (GPT, H200).
                graph.record(torch.cuda.Event(external=True), self._side_stream)
        except RuntimeError as error:
            failure = error
        try:
            graph.end()
        except RuntimeError as error:
            failure = failure or error
        return failure

    def _repair(self, rng_state: torch.Tensor) -> None:
        """Bring back what a capture that CUDA itself broke off leaves behind.

        The default generator would stay in capture mode to the end of the process, and torch 2.11's
        allocator would believe that the capture is still under way (pytorch#180395).
        """
        fresh = torch.Generator(device=self.device)
        for generator in (torch.cuda.default_generators[self._index], *self.generators.extra):
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            fresh = torch.Generator(device=self.device)
        self.set_rng_state(rng_state)
        with contextlib.suppress(RuntimeError, AttributeError):
            # Newer versions of torch have done this by themselves, and say so by raising. Where these
            # names are gone, the report has said so.
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
            torch._C._cuda_releasePool(self._index, self._pool)

    def written(self, graph: Graph) -> list[torch.Tensor]:
        return next(live.written for live in self._live if live.graph is graph)

    def release(self, graph: Graph) -> None:
        # Its last replay may be under way. CUDA frees such a graph when it has ended, but the host
        # memory that it copies from, and its pool, would be given to others at once.
        with contextlib.suppress(RuntimeError):  # of a device that has failed, and runs nothing any more
            torch.cuda.synchronize(self.device)
        self._live = [live for live in self._live if live.graph is not graph]
        cast(CudaParts, graph).reset()

    def event(self) -> torch.cuda.Event:
        # External: CUDA then makes an event-record node whose time the host can read after a replay.
        return torch.cuda.Event(enable_timing=True, external=True)

    def mark(self, event: Any, forked: bool = True) -> None:
        graph = self._recording
        if graph is None:
            event.record(self._current_stream())
            return
        current = torch.cuda.current_stream(self.device)
        begins = len(position_of(current) or ()) == 1  # no node yet; in one as well
        if begins or not forked:
            graph.record(event, current)
            return
        # Recorded on the stream itself, the event would become a node between two kernels and cost the
        # critical path 2 to 4 us. On a forked branch the next kernel does not wait.
        fork = torch.cuda.Event()
        graph.record(fork, current)
        if current not in self._timing_streams:
            self._timing_streams[current] = event_stream(self.device)
        branch = self._timing_streams[current]
        self._forked.add(branch)
        branch.wait_event(fork)
        graph.record(event, branch)

    def mark_end(self, event: Any, work: Any) -> bool:
        branch = self._collectives_stream
        with torch.cuda.stream(branch):
            work.wait()  # the stream waits, and not the host
        if self._recording is None:
            event.record(branch)
        else:
            self._recording.record(event, branch)
            self._forked.add(branch)
        return True

    def _current_stream(self) -> torch.cuda.Stream:
        """The current stream; to ask torch for it, which makes an object, takes several us each time."""
        handle = None if _handle_of_stream is None else _handle_of_stream(self._index)
        if handle is None or self._current is None or self._current.cuda_stream != handle:
            self._current = torch.cuda.current_stream(self.device)
        return self._current

    def event_times(self, events: Sequence[Any]) -> Callable[[], list[float]]:
        return event_times(events)

    def position(self) -> object | None:
        if self._recording is None:
            return None
        return position_of(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def rng_state(self) -> torch.Tensor:
        return self.generators.state(torch.cuda.get_rng_state(self.device))

    def set_rng_state(self, state: torch.Tensor) -> None:
        own = self.generators.set_extra_states(state)
        # Through another handle of the same state: a generator that is itself set, be it to what it is,
        # makes cuDNN's dropout begin anew (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, `reset_rnn_state`).
        torch.cuda.default_generators[self._index].graphsafe_get_state().set_state(own)

    def free_bytes(self) -> int:
        cached_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        # What the graphs' pool keeps is not free for anybody else.
        return torch.cuda.mem_get_info(self.device)[0] + max(0, cached_bytes - self.graph_bytes())

    def graph_bytes(self) -> int:
        return sum(live.taken_bytes for live in self._live)

    def workspace_bytes(self) -> int:
        return sum(side.workspace_bytes() for side in self._sides())

    def host_value_moved(self) -> bool:
        return any(live.host_memory.moved() for live in self._live)

    def largest_graph_bytes(self) -> int:
        return max((live.taken_bytes for live in self._live), default=0)
