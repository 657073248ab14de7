"""The backend of CUDA."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

import torch
from torch.autograd import set_multithreading_enabled

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.features import CUDA
from lightning_cudagraph.compat.garbage import garbage_kept
from lightning_cudagraph.compat.names.torch_names import _disable_current_modes
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.backend import Backend, Graph
from lightning_cudagraph.device.cuda.capture_errors import clear_frames, meaning_of
from lightning_cudagraph.device.cuda.graph_parts import CudaParts
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import HostInput, host_work_of
from lightning_cudagraph.device.sentry.collective_hooks import group_and_work
from lightning_cudagraph.device.sentry.host_ops import INPUT_BYTES
from lightning_cudagraph.device.sentry.op_rewrites import Constants, HostMemory, RewritingSentry
from lightning_cudagraph.device.streams.branches import Branches, SentBackError
from lightning_cudagraph.device.streams.driver import event_times, position_of
from lightning_cudagraph.device.streams.resizes import resizes_told
from lightning_cudagraph.device.streams.side_streams import EventStream, SideStream, keep_all_workspaces
from lightning_cudagraph.errors import CaptureError

T = TypeVar("T")

# Garbage was collected recently.
_RECENT_S = 20.0
# The address of the current stream of a device.
_handle_of_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class CudaBackend(Backend):
    """CUDA graphs through `torch.cuda.CUDAGraph`.

    Warm-up and capture share one side stream, so that the capture uses the autograd accumulation nodes,
    cuBLAS workspaces and cuDNN plans that warm-up has made. All graphs share one memory pool. The
    capture mode is ``thread_local``, because pin-memory threads of dataloaders and NCCL's watchdog make
    CUDA calls during a capture.
    """

    description = "CUDA graphs"
    graphs_per_step = 2
    event_host_us = 1.6  # 1.0 and 0.6 (H200, driver of CUDA 13.0): docs/times.md
    overlaps = True

    def __init__(self, device: torch.device, streams: int = 1) -> None:
        require(CUDA)
        super().__init__(device, streams)
        self._collected_s = float("-inf")
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._side = SideStream(device)
        self._side_stream = self._side.stream
        self._other_sides: list[SideStream] = []
        # One timing stream for each stream with marks: on a shared one, events of one stream would delay
        # those of another.
        self._timing_streams = {self._side_stream: EventStream(device)}
        # Waits for collectives, which run on streams that torch does not expose.
        self._collectives_stream = EventStream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self.generators = Generators("cuda", torch.cuda.default_generators[self._index])
        self._host_input: HostInput | None = None  # of graphs for which the host draws
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

    def is_on_side_stream(self) -> bool:
        return self._current_stream() == self._side_stream

    def join_other_threads(self) -> None:
        default = torch.cuda.default_stream(self.device)
        default.wait_stream(self._side_stream)
        self._side_stream.wait_stream(default)

    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        torch.cuda.synchronize(self.device)
        self._collect()
        torch.cuda.empty_cache()
        sides = self._sides()
        keep_all_workspaces(sides)
        # Not of the memory pool: ops before its first use would write there.
        host_input = self._host_input or HostInput(self.device, INPUT_BYTES)
        # Replays do not wait for what these lines have run on other streams, in memory that they use.
        torch.cuda.synchronize(self.device)
        if not self._is_in_use(self._pool):
            # A pool without graphs cannot be used again (an assertion in torch 2.11).
            self._pool = torch.cuda.graph_pool_handle()
        rng_state = self.rng_state()
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        memory = HostMemory()
        graph = CudaParts(self.generators, self._pool, memory)
        streams = [side.stream for side in sides]
        branches = Branches(streams, graph.record, group_and_work) if len(sides) > 1 else None
        sentry = RewritingSentry(self.generators, memory, branches, host_input)
        self._prepare(sentry, is_compiled)

        def resized(storage: torch.UntypedStorage, size_bytes: int) -> None:
            if branches is not None:
                branches.resized()
            if self.flow is not None:
                self.flow.bar()

        failure: BaseException | None = None
        broken: Exception | None = None
        result: Any = None
        try:
            self._recording, self._branches = graph, branches
            with (
                garbage_kept(),
                torch.cuda.stream(self._side_stream),
                set_multithreading_enabled(False),
            ):
                try:
                    self._begin_part(graph)
                    with (
                        host_work_of(graph.work),
                        sentry.host_ops.draws.hidden(),
                        resizes_told(resized),
                        sentry.watching(Constants(memory)),
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
        if failure is None and broken is None:
            self._host_input = sentry.host_ops.register(self.generators) or self._host_input
            self.barriers = {} if branches is None else branches.barriers
            graph.memory_bytes = torch.cuda.memory_reserved(self.device) - reserved_bytes
            graph.written = sentry.writes.older
            self._live.append(graph)
            return graph, result
        if broken is not None:
            self._repair(rng_state)
        graph.reset()
        if failure is not None:
            explained = meaning_of(failure)
            if isinstance(failure, Exception):
                # Training may go on. The frames of the failure hold the autograd graph of the step, and
                # so nodes of the broken capture, which the next step would use again.
                clear_frames(failure)
            raise explained
        raise CaptureError(
            f"CUDA gave up the capture of the training step: {str(broken).splitlines()[0]}.",
            "Something in it used another stream without joining it, or an extension synchronised.",
        )

    def _collect(self) -> None:
        """Collect garbage: during the capture a collection may free what CUDA must not free then."""
        # Another capture of a step follows the first, which has collected everything: what has been made
        # since is enough then. (A full collection took 0.25 s beside transformers, with 500000 objects.)
        now_s = monotonic()
        is_recent = now_s - self._collected_s < _RECENT_S
        gc.collect(1 if is_recent else 2)
        if not is_recent:
            self._collected_s = now_s

    @contextmanager
    def checked(self) -> Iterator[None]:
        memory = HostMemory()
        sentry = RewritingSentry(self.generators, memory)
        with sentry.host_ops.draws.hidden(), sentry.watching(Constants(memory)):
            yield

    def cut(self) -> None:
        assert self._recording is not None
        # Without the modes that watch the step: torch's own writes at the beginning of a capture (seeds
        # and offsets of generators) are not part of it.
        with _disable_current_modes():
            if (broken := self._end_capture(self._recording)) is not None:
                raise broken
            self._forked.clear()
            self._begin_part(self._recording)

    def _sides(self) -> list[SideStream]:
        """The `streams` streams of a capture, the main one first."""
        while len(self._other_sides) < self.streams - 1:
            self._other_sides.append(SideStream(self.device))
        return [self._side, *self._other_sides[: self.streams - 1]]

    def _begin_part(self, graph: CudaParts) -> None:
        graph.begin()
        if self._branches is not None:
            self._branches.begin()

    @contextmanager
    def in_pool(self, pool_of: Graph | None = None) -> Iterator[None]:
        pool = torch.cuda.graph_pool_handle() if pool_of is None else pool_of.pool
        with setting(self, _pool=pool):
            yield

    def stay(self, graph: Graph) -> bool:
        if self._is_in_use(self._pool):
            return False
        self._pool = graph.pool
        return True

    def _is_in_use(self, pool: Any) -> bool:
        return any(live.pool == pool for live in self._live)

    def _end_capture(self, graph: CudaParts) -> Exception | None:
        """End the capture, on the error path too, so that none stays open; return its error."""
        failure: Exception | None = None
        try:
            if self._branches is not None:
                self._branches.end()
            if self._forked or self._branches is not None:
                for stream in self._forked:
                    # A forked stream that is not joined makes the capture fail.
                    self._side_stream.wait_stream(stream)
                # End in one node rather than in several branches: two graphs replayed in turn, each with
                # one first and one last node, took 29 to 47 us less for a step of 2.3 ms (GPT, H200).
                graph.record(torch.cuda.Event(external=True), self._side_stream)
        except RuntimeError as error:
            failure = error
        try:
            graph.end()
        except RuntimeError as error:
            failure = failure or error
        return failure

    def _repair(self, rng_state: torch.Tensor) -> None:
        """Repair generators and allocator after a capture that CUDA itself broke off.

        Otherwise the default generator stays in capture mode to the end of the process, and torch 2.11's
        allocator takes the capture to be still under way (pytorch#180395).
        """
        fresh = torch.Generator(device=self.device)
        for generator in (torch.cuda.default_generators[self._index], *self.generators.extra):
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            fresh = torch.Generator(device=self.device)
        self.set_rng_state(rng_state)
        with contextlib.suppress(RuntimeError, AttributeError):
            # Newer versions of torch have done this already, and raise, or do not have these names.
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
            torch._C._cuda_releasePool(self._index, self._pool)

    def release(self, graph: Graph) -> None:
        # Its last replay may be running. CUDA frees the graph only after it, but its pool, and the host
        # memory that it copies from, could be reused at once.
        with contextlib.suppress(RuntimeError):  # raised by a failed device, which runs nothing any more
            torch.cuda.synchronize(self.device)
        super().release(graph)

    def event(self) -> torch.cuda.Event:
        # External events become event-record nodes, whose times the host can read after a replay.
        return torch.cuda.Event(enable_timing=True, external=True)

    def mark(self, event: Any, forked: bool = True) -> None:
        graph = self._recording
        if graph is None:
            event.record(self._current_stream())
            return
        current = torch.cuda.current_stream(self.device)
        begins = len(position_of(current) or ()) == 1  # no node yet: begin in one node too
        if begins or not forked:
            graph.record(event, current)
            return
        # An event on the stream itself is a node between two kernels, and costs 2 to 4 us on the
        # critical path. The next kernel does not wait for one on a forked branch.
        fork = torch.cuda.Event()
        graph.record(fork, current)
        if current not in self._timing_streams:
            self._timing_streams[current] = EventStream(self.device)
        branch = self._timing_streams[current].stream
        self._forked.add(branch)
        branch.wait_event(fork)
        graph.record(event, branch)

    def mark_end(self, event: Any, work: Any) -> bool:
        branch = self._collectives_stream.stream
        with torch.cuda.stream(branch):
            work.wait()  # the stream waits, not the host
        if self._recording is None:
            event.record(branch)
        else:
            self._recording.record(event, branch)
            self._forked.add(branch)
        return True

    def _current_stream(self) -> torch.cuda.Stream:
        """The current stream, cached by its handle: torch makes an object each time, in several us."""
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
        # Through another handle of the same state: setting the generator itself, even to its own state,
        # restarts cuDNN's dropout (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, `reset_rnn_state`).
        torch.cuda.default_generators[self._index].graphsafe_get_state().set_state(own)

    def free_bytes(self) -> int:
        cached_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        # Cached memory of the graphs' pool cannot be used for anything else.
        return torch.cuda.mem_get_info(self.device)[0] + max(0, cached_bytes - self.graph_bytes())

    def workspace_bytes(self) -> int:
        snapshot = torch.cuda.memory_snapshot()
        return sum(side.workspace_bytes(snapshot) for side in self._sides())
