"""The backend of the CPU emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import set_multithreading_enabled

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Backend, Graph
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph, HostEvent
from lightning_cudagraph.device.emulator.op_recorder import OpRecorder, Undo
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import host_work_of
from lightning_cudagraph.device.sentry.inductor import refused_on_cpu
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.device.sentry.sentry import Sentry
from lightning_cudagraph.device.streams.resizes import resizes_told

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


class EmulatorBackend(Backend):
    """A CPU that emulates a GPU; see the docstring of this folder."""

    description = "emulated on the CPU, without a graph's speed"
    event_host_us = 0.0
    graphs_per_step = 1  # a replay has ended when it returns, so its events can be read at once
    overlaps = False

    def __init__(self, streams: int = 1) -> None:
        super().__init__(torch.device("cpu"), streams)
        self.generators = Generators("cpu", torch.default_generator)
        self._recording: EmulatedGraph | None = None

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        with set_multithreading_enabled(False):
            yield

    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        graph = EmulatedGraph(self.streams)
        undo = Undo(self.generators)
        self._recording = graph
        graph.capture_begin()
        try:
            recorder = OpRecorder(graph, undo, self.generators)
            self._prepare(recorder, is_compiled)
            with (
                set_multithreading_enabled(False),
                _reported_by_torch(),
                refused_on_cpu(),
                resizes_told(recorder.resized),
                host_work_of(graph.work),
                recorder.watching(_OneHotAsOnCuda()),
            ):
                result = body()
            graph.written = recorder.writes.older
            self.barriers = graph.barriers()
        except BaseException:
            graph.reset()
            raise
        finally:
            self._recording = None
            graph.capture_end()
            undo.roll_back()
        graph.memory_bytes = graph.made_bytes()
        self._live.append(graph)
        return graph, result

    def cut(self) -> None:
        assert self._recording is not None
        self._recording.cut()

    def checked(self) -> AbstractContextManager[None]:
        return Sentry("cpu", self.generators).watching(_OneHotAsOnCuda())

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

    def rng_state(self) -> Tensor:
        return self.generators.state(torch.get_rng_state())

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(self.generators.set_extra_states(state))
