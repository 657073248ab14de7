"""A capture on CUDA in one part or more, between which the host has a turn in every replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import HostWork

__all__ = ["Between", "CudaParts"]

# Called between two parts of a replay, with the number of parts before it less one.
Between = Callable[[int], None]


class CudaParts:
    """A CUDA graph for each part of a capture.

    They share a pool, and are replayed one after another: what one leaves in memory the next one finds,
    autograd's saved tensors too.

    Args:
        generators: what may be drawn from.
        pool: the memory pool.

    Attributes:
        work: what the host does around the launch of each part.
    """

    def __init__(self, generators: Generators, pool: Any) -> None:
        self._generators = generators
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.work: list[HostWork] = []
        # A node does not keep its event alive; and CUDA, when a capture ends, looks at those that it has
        # met, also where a step that failed has let go of its own (a segmentation fault).
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Begin the capture of the next part, on the current stream."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators.extra:
            graph.register_generator_state(generator)
        self._graphs.append(graph)
        self.work.append(HostWork())
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Record an event in the part under way, behind all that `stream` waits for, and keep it."""
        self._events.append(event)
        event.record(stream)

    def end(self) -> None:
        """End the capture of the part under way."""
        with warnings.catch_warnings():
            # What is refused before the first op of the step leaves a graph without any.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._graphs[-1].capture_end()

    def replay(self, between: Between | None = None) -> None:
        """Run the parts, on the current stream."""
        for index, (graph, work) in enumerate(zip(self._graphs, self.work, strict=True)):
            if index and between is not None:
                between(index - 1)
            with work.around_launch():
                graph.replay()

    def reset(self) -> None:
        """Let go of the graphs and of their memory."""
        for graph in self._graphs:
            graph.reset()
        self.work.clear()
