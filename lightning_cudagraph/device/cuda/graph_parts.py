"""A capture on CUDA in one or more parts, with graph breaks between them for the host."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lightning_cudagraph.device.backend import Between, Graph
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import HostWork
from lightning_cudagraph.device.sentry.op_rewrites import HostMemory


class CudaParts(Graph):
    """A CUDA graph for each part of a capture.

    The graphs share a memory pool and are replayed in order: each finds in memory what the one before
    has left, autograd's saved tensors too.

    Args:
        host_memory: what each replay reads there.
    """

    def __init__(self, generators: Generators, pool: Any, host_memory: HostMemory) -> None:
        super().__init__(pool)
        self._generators = generators
        self._host_memory: HostMemory | None = host_memory
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # A node does not keep its event alive. At the end of a capture CUDA reads all its events, also
        # those that a failed step has released (a segmentation fault).
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators.extra:
            graph.register_generator_state(generator)
        self._graphs.append(graph)
        self.work.append(HostWork())
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Record an event on `stream` in the part that is being captured, and keep it alive."""
        self._events.append(event)
        event.record(stream)

    def end(self) -> None:
        with warnings.catch_warnings():
            # A step that is refused before its first op leaves an empty graph.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._graphs[-1].capture_end()

    def replay(self, between: Between | None = None) -> None:
        for index, (graph, work) in enumerate(zip(self._graphs, self.work, strict=True)):
            if index and between is not None:
                between(index - 1)
            with work.around_launch():
                graph.replay()

    def host_value_moved(self) -> bool:
        return self._host_memory is not None and self._host_memory.moved()

    def reset(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._host_memory = None
        super().reset()
