"""A graph on the CPU: the recorded ops of a step, which a replay runs again."""

from __future__ import annotations

import threading
from collections import Counter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.attributes import OfThread
from lightning_cudagraph.device.backend import Between, Graph
from lightning_cudagraph.device.host_work import HostWork
from lightning_cudagraph.device.streams.dataflow import Placed
from lightning_cudagraph.device.streams.resizes import plain_resize
from lightning_cudagraph.device.streams.tape import Tape
from lightning_cudagraph.device.taped_op import TapedOp
from lightning_cudagraph.tensors.writes import storage_id

# The graph that each thread is capturing.
_recording: OfThread[EmulatedGraph | None] = OfThread(None)


class HostEvent:
    """A timing event of the host clock, instead of a CUDA event."""

    def __init__(self) -> None:
        self._time_s: float | None = None
        self._passed: threading.Event | None = None  # set by the thread that takes the time

    def record(self) -> None:
        """Take the time now; inside a capture, whenever a replay reaches this point."""
        graph = EmulatedGraph.recording()
        if graph is None:
            self.take_time()
        else:
            graph.tape.add_mark(self)

    def take_time(self) -> None:
        """Take the time now, even inside a capture."""
        self._time_s = perf_counter()

    def record_behind(self, work: Any) -> None:
        """Take the time at the end of a collective, which other threads run."""
        passed = self._passed = threading.Event()

        def ended(_: Any) -> None:
            self.take_time()
            passed.set()

        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce-scatters have none
            work.wait()
            ended(None)
        else:
            future.add_done_callback(ended)

    def synchronize(self) -> None:
        """Wait for a collective; everything else ran in the calling thread, and has ended."""
        if self._passed is not None:
            self._passed.wait()

    def query(self) -> bool:
        return self._time_s is not None

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        if self._time_s is None or end._time_s is None:
            raise RuntimeError("Both events must have been recorded, by a replay of their graph.")
        return (end._time_s - self._time_s) * 1e3


class Resize:
    """A resize of a storage in the middle of a step, as `fully_shard` does with weights."""

    __slots__ = ("size_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self.storage = storage
        self.size_bytes = size_bytes

    def run(self) -> None:
        plain_resize(self.storage, self.size_bytes)


_Tape = Tape[TapedOp | Resize | HostEvent | None]


class EmulatedGraph(Graph):
    """A recorded graph on the CPU, with the method names of `torch.cuda.CUDAGraph`."""

    def __init__(self, streams: int = 1) -> None:
        super().__init__()
        self._streams = streams
        self._parts: list[_Tape] = []
        self.cut()
        self._ops = 0
        self._replays = 0
        # The sizes at the first resize of each storage: a replay begins with these.
        self._sizes: dict[int, Resize] = {}

    @staticmethod
    def recording() -> EmulatedGraph | None:
        """The graph that the calling thread is capturing."""
        return _recording.value

    def capture_begin(self) -> None:
        """Make events that are recorded in this thread part of the graph."""
        _recording.value = self

    def capture_end(self) -> None:
        _recording.value = None

    @property
    def tape(self) -> _Tape:
        return self._parts[-1]

    def add(self, op: TapedOp, placed: Placed | None, result: Any, inputs: list[Tensor]) -> None:
        self.tape.add(op, placed, result, inputs)
        self._ops += 1

    def add_resize(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Add a resize of a storage, which all later ops come after: memory changes hands."""
        self._sizes.setdefault(int(storage._cdata), Resize(storage, storage.nbytes()))
        self.tape.add(Resize(storage, size_bytes), None)

    def cut(self) -> None:
        """Begin a part: the first, or the one behind a graph break."""
        self._parts.append(Tape(self._streams))
        self.work.append(HostWork())

    def position(self) -> tuple[int, int]:
        """The number of parts, and of ops in all of them."""
        return len(self._parts), self._ops

    def replay(self, between: Between | None = None) -> None:
        """Run the recorded ops again, into the storage they used at capture.

        Ops on several streams run in another order in each replay.
        """
        self._replays += 1
        for size in self._sizes.values():
            size.run()
        for index, (part, work) in enumerate(zip(self._parts, self.work, strict=True)):
            if index > 0 and between is not None:
                between(index - 1)
            with work.around_launch(), torch.no_grad(), torch.autocast("cpu", enabled=False):
                for op in part.order(self._replays):
                    if isinstance(op, HostEvent):
                        op.take_time()
                    elif op is not None:
                        op.run()

    def reset(self) -> None:
        self._parts.clear()
        self._sizes.clear()
        super().reset()

    def barriers(self) -> dict[str, int]:
        """The ops that made all streams wait, with their counts."""
        return dict(sum((tape.barriers for tape in self._parts), Counter[str]()))

    def made_bytes(self) -> int:
        """Bytes of the tensors made inside the capture."""
        storages = {
            storage_id(t): t.untyped_storage().nbytes()
            for part in self._parts
            for op in part
            if isinstance(op, TapedOp)
            for t in op.results
            if t is not None
        }
        return sum(storages.values())
