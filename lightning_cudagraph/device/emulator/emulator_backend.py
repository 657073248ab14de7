"""The implementation of the device protocol for the CPU emulator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import set_multithreading_enabled

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Graph
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph, HostEvent
from lightning_cudagraph.device.emulator.op_recorder import OpRecorder, Undo
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import host_work_of
from lightning_cudagraph.device.refusals.first_refusal import first_refusal_kept
from lightning_cudagraph.device.sentry.host_checks import HostChecks, LateChecks
from lightning_cudagraph.device.sentry.inductor import refused_on_cpu
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.device.sentry.sentry import FunctionSentry, Sentry
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow
from lightning_cudagraph.device.streams.resizes import resizes_told
from lightning_cudagraph.tensors.writes import Writes, storages_held

T = TypeVar("T")


@contextmanager
def _reported_by_torch() -> Iterator[None]:
    """Make `torch.cuda.is_current_stream_capturing` true during a capture, for libraries that ask."""
    plain = torch.cuda.is_current_stream_capturing

    def asked() -> bool:
        return EmulatedGraph.recording() is not None or plain()

    with (
        setting(torch.cuda, is_current_stream_capturing=asked),
        setting(torch.cuda.graphs, is_current_stream_capturing=asked),
    ):
        yield


class _OneHotAsOnCuda(OwnFunctionMode):
    """Function mode around a capture in which `one_hot` for a number of classes reads no values.

    On the CPU it looks for labels that are out of range, on CUDA it does not (`one_hot` in
    aten/src/ATen/native/Onehot.cpp). It makes the same tensor here.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.one_hot:
            labels, classes = _of_one_hot(*args, **kwargs)
            if classes > 0:
                made = labels.new_zeros((*labels.shape, classes))
                return made.scatter_(-1, labels.unsqueeze(-1), 1)
        return func(*args, **kwargs)


def _of_one_hot(tensor: Tensor, num_classes: int = -1) -> tuple[Tensor, int]:
    return tensor, num_classes


class EmulatorBackend:
    """A CPU that emulates a GPU; see the docstring of this folder."""

    description = "emulated on the CPU, without a graph's speed"
    event_host_us = 0.0
    graphs_per_step = 1  # a replay has ended when it returns, so its events can be read at once
    overlaps = False

    def __init__(self, streams: int = 1) -> None:
        self.device = torch.device("cpu")
        self.streams = streams
        self.barriers: dict[str, int] = {}
        self.records_flow = False
        self.flow: RecordedFlow | None = None
        self.in_graph_break = False
        self.checks = LateChecks()
        self.generators = Generators("cpu", torch.default_generator)
        self._recording: EmulatedGraph | None = None
        self._live: list[EmulatedGraph] = []

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        with set_multithreading_enabled(False):
            yield

    def is_on_side_stream(self) -> bool:
        return True

    def join_other_threads(self) -> None:
        """Do nothing: work is done at once."""

    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        graph = EmulatedGraph(self.streams)
        undo = Undo(self.generators)
        self._recording = graph
        graph.capture_begin()
        try:
            recorder = OpRecorder(graph, undo, self.generators)
            recorder.writes = Writes(storages_held() if is_compiled else None)
            recorder.host_checks = HostChecks(self.checks)
            self.flow = recorder.flow = (
                RecordedFlow("cpu", graph.position) if self.records_flow else None
            )
            with (
                set_multithreading_enabled(False),
                _reported_by_torch(),
                refused_on_cpu(),
                resizes_told(recorder.resized),
                host_work_of(graph.work),
                FunctionSentry("cpu"),
                _OneHotAsOnCuda(),
                recorder,
                first_refusal_kept(),
            ):
                result = body()
                recorder.host_checks.end()
            graph.written = recorder.writes.older
            self.barriers = graph.barriers()
        except BaseException:
            graph.reset()
            raise
        finally:
            self._recording = None
            graph.capture_end()
            undo.roll_back()
        self._live.append(graph)
        return graph, result

    @contextmanager
    def in_pool(self, pool_of: Graph | None = None) -> Iterator[None]:
        yield  # emulated graphs share no memory

    def stay(self, graph: Graph) -> bool:
        return True

    def cut(self) -> None:
        assert self._recording is not None
        self._recording.cut()

    @contextmanager
    def checked(self) -> Iterator[None]:
        sentry = Sentry("cpu", self.generators)
        with FunctionSentry("cpu"), _OneHotAsOnCuda(), sentry, first_refusal_kept():
            yield

    def written(self, graph: Graph) -> list[Tensor]:
        return cast(EmulatedGraph, graph).written

    def release(self, graph: Graph) -> None:
        self._live = [live for live in self._live if live is not graph]
        cast(EmulatedGraph, graph).reset()

    def event(self) -> HostEvent:
        return HostEvent()

    def mark(self, event: HostEvent, forked: bool = True) -> None:
        event.record()

    def mark_end(self, event: HostEvent, work: Any) -> bool:
        if self._recording is None:
            event.record_behind(work)
            return True
        event.record()
        return False  # a replay waits for each collective

    def event_times(self, events: Sequence[HostEvent]) -> Callable[[], list[float]]:
        return lambda: [0.0, *map(events[0].elapsed_time, events[1:])]

    def position(self) -> object | None:
        return None if self._recording is None else self._recording.position()

    def synchronize(self) -> None:
        """Return at once: nothing is asynchronous."""

    def rng_state(self) -> Tensor:
        return self.generators.state(torch.get_rng_state())

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(self.generators.set_extra_states(state))

    def free_bytes(self) -> int:
        return sys.maxsize  # host memory is not limited here

    def graph_bytes(self) -> int:
        return sum(graph.memory_bytes() for graph in self._live)

    def workspace_bytes(self) -> int:
        return 0

    def host_value_moved(self) -> bool:
        return False  # host tensors are device tensors here: every replay reads them

    def largest_graph_bytes(self) -> int:
        return max((graph.memory_bytes() for graph in self._live), default=0)
