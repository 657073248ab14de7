"""The CPU emulator: the semantics of a CUDA graph, without its speed.

A capture records every aten op of forward, backward and optimizer with the tensors that it used, and
undoes all effects at its end, because a capture on a GPU executes nothing. A replay runs the ops again
into the same storage: Python values stay frozen as they were at capture, a tensor that has been replaced
since is not seen, random numbers are drawn again, and what a capture on a GPU refuses is refused.

With it, this package can be tested, and a step be examined, on a machine without a GPU. Ops on several
streams run one after the other, in orders that the streams allow. Not emulated: the user's own streams,
reuse of memory inside a pool, asynchronous execution, the boundary between host and device. A generator
whose state is set inside the step is refused.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import set_multithreading_enabled

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.names.torch_names import is_traceable_wrapper_subclass
from lightning_cudagraph.device.backend import Graph
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.graph_parts import Between
from lightning_cudagraph.device.host_work import HostWork, host_work_of
from lightning_cudagraph.device.kept_memory import KeptMemory
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import AskedFor, first_refusal_kept, forbid
from lightning_cudagraph.device.refusals.forbidden_ops import STORAGE
from lightning_cudagraph.device.sentry.collectives import (
    is_collective,
    only_wraps,
    returned_unrun,
    wait_for,
)
from lightning_cudagraph.device.sentry.inductor import refused_on_cpu
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.device.sentry.sentry import FunctionSentry, Sentry
from lightning_cudagraph.device.streams.dataflow import Placed
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow
from lightning_cudagraph.device.streams.tape import Tape
from lightning_cudagraph.tensors.writes import Writes, storage_id, storages_held, tensors_in, written_by

T = TypeVar("T")


def _address(tensor: Tensor) -> Tensor:
    """An alias of the tensor's present storage, even if the tensor is later set to another."""
    return tensor.detach()


def _addressed(value: Any, known: dict[int, Tensor]) -> Any:
    """An argument of an op, with its tensors replaced by aliases.

    Args:
        known: aliases by the id of their tensor, so that one tensor has one alias: attention checks if
            query, key and value are the same object.
    """
    if isinstance(value, Tensor):
        return known.setdefault(id(value), _address(value))
    if type(value) in (list, tuple):
        return type(value)(_addressed(member, known) for member in value)
    return value


# The graph that each thread is capturing.
_recording_in = threading.local()


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
        """True if it has been recorded."""
        return self._time_s is not None

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`.

        Raises:
            RuntimeError: if one of them has not been recorded yet.
        """
        if self._time_s is None or end._time_s is None:
            raise RuntimeError("Both events must have been recorded, by a replay of their graph.")
        return (end._time_s - self._time_s) * 1e3


class _Op:
    """One recorded op: function, aliased arguments, and the storage of its results."""

    __slots__ = ("args", "autocast", "func", "grad_mode", "kwargs", "results")

    def __init__(self, func: Any, args: Any, kwargs: Any, results: list[Tensor | None]) -> None:
        self.func = func
        self.grad_mode = torch.is_grad_enabled()  # some kernels read it (mkldnn's RNN)
        # Composite ops pass it on to the ops that they call.
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.args = args
        self.kwargs = kwargs
        self.results = results

    def run(self) -> None:
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            autocast = torch.autocast("cpu", dtype=self.autocast, cache_enabled=False)
        with torch.set_grad_enabled(self.grad_mode), torch._C._AutoDispatchBelowAutograd(), autocast:
            results = self.func(*self.args, **self.kwargs)
            if is_collective(self.func):
                wait_for(self.func, results)
        for target, value in zip(self.results, tensors_in(results), strict=True):
            if target is not None:
                target.copy_(value)


class _Resize:
    """A resize of a storage in the middle of a step, as `fully_shard` does with weights."""

    __slots__ = ("size_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self.storage = storage
        self.size_bytes = size_bytes

    def run(self) -> None:
        _resize(self.storage, self.size_bytes)


_resize: Any = torch.UntypedStorage.resize_


class _Undo(KeptMemory):
    """The contents of memory before the capture, to restore them."""

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self._generators = generators
        self._rng_state = generators.state(torch.get_rng_state())
        self._sizes: list[_Resize] = []

    def before_resize(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if not storage.nbytes():
            self.made_inside.add(key)  # it is empty: there is nothing to restore
        elif key not in self.made_inside:
            forbid(*STORAGE, user_location())
        self._sizes.append(_Resize(storage, storage.nbytes()))

    def roll_back(self) -> None:
        for size in reversed(self._sizes):
            size.run()
        self.put_back()
        torch.set_rng_state(self._generators.set_extra_states(self._rng_state))


_Tape = Tape[_Op | _Resize | HostEvent | None]


_WRAPPER = ("which consists of other tensors, on the CPU emulator", "Use plain tensors on a CPU.")


def _is_fake(tensor: Tensor) -> bool:
    """True for a tensor without memory, with which DTensor infers the result of an op."""
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta"


class _Recorder(Sentry):
    """Records ops below autograd and autocast: the kernels that a GPU would launch."""

    def __init__(self, graph: EmulatedGraph, undo: _Undo, generators: Generators) -> None:
        super().__init__("cpu", generators)
        self._graph = graph
        self._undo = undo
        self._rng_state = torch.get_rng_state()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_generator(func)
        # A profiler's ranges are not part of a graph.
        if func.namespace == "profiler" or only_wraps(func):
            return func(*args, **kwargs)
        collective = is_collective(func)
        inputs = tensors_in(args, kwargs)
        wrappers: list[Any] = [*inputs]
        for kind in {type(tensor) for tensor in wrappers if is_traceable_wrapper_subclass(tensor)}:
            forbid(f"a `{kind.__qualname__}`, {_WRAPPER[0]}", _WRAPPER[1], user_location())
        placed = self._graph.tape.place(func, args, kwargs)
        fake = any(map(_is_fake, inputs))
        if not fake:
            self._undo.before(inputs)
        known: dict[int, Tensor] = {}
        frozen_args = _addressed(args, known)
        frozen_kwargs = {name: _addressed(value, known) for name, value in kwargs.items()}
        result = returned_unrun(func, args) if collective else func(*args, **kwargs)
        outputs = tensors_in(result)
        if fake or any(map(_is_fake, outputs)):
            if placed is not None:
                self._graph.tape.add(None, placed)
            return result
        self._undo.after(outputs)
        input_storages = {storage_id(t) for t in inputs}
        # A result that shares its storage with an input is a view, or the input itself.
        results = [None if storage_id(t) in input_storages else _address(t) for t in outputs]
        writes = func._schema.is_mutable or written_by(func, args, kwargs)
        is_only_a_view = outputs and not writes and all(target is None for target in results)
        if not is_only_a_view:
            op = _Op(func, frozen_args, frozen_kwargs, results)
            self._graph.add(op, placed, result, inputs)
        elif placed is not None:
            self._graph.tape.add(None, placed)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._rng_state = torch.get_rng_state()
        return result

    def _check_generator(self, func: Any) -> None:
        """Refuse a generator whose state was set: a GPU's capture can hold that, a tape cannot."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if not torch.equal(torch.get_rng_state(), self._rng_state):
            forbid(
                "a generator whose state is set inside the step, as activation checkpointing does with"
                " `preserve_rng_state`, on the CPU emulator",
                "On a GPU this can be captured. On a CPU, leave checkpointing out; or, if what is"
                " computed twice draws no random numbers (no dropout), pass `preserve_rng_state=False`.",
                user_location(),
                AskedFor("checkpoint"),
            )


class EmulatedGraph:
    """A recorded graph on the CPU, with the method names of `torch.cuda.CUDAGraph`."""

    def __init__(self, streams: int = 1) -> None:
        self._streams = streams
        self._parts: list[_Tape] = [Tape(streams)]
        self.work = [HostWork()]
        self._ops = 0
        self._replays = 0
        self.written: list[Tensor] = []

    @staticmethod
    def recording() -> EmulatedGraph | None:
        """The graph that the calling thread is capturing."""
        return getattr(_recording_in, "graph", None)

    def capture_begin(self) -> None:
        """Make events that are recorded in this thread part of the graph."""
        _recording_in.graph = self

    def capture_end(self) -> None:
        """End the capture."""
        _recording_in.graph = None

    @property
    def tape(self) -> _Tape:
        """The part that is being captured."""
        return self._parts[-1]

    def add(self, op: _Op, placed: Placed | None, result: Any, inputs: list[Tensor]) -> None:
        """Add an op that has run."""
        self.tape.add(op, placed, result, inputs)
        self._ops += 1

    def cut(self) -> None:
        """End this part at a graph break, and begin the next."""
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
        """Release the recorded ops and their memory."""
        self._parts = [Tape(self._streams)]
        self.work = [HostWork()]
        self.written.clear()

    def barriers(self) -> dict[str, int]:
        """The ops that made all streams wait, with their counts."""
        return dict(sum((tape.barriers for tape in self._parts), Counter[str]()))

    def memory_bytes(self) -> int:
        """Bytes of the tensors made inside the capture."""
        storages = {
            storage_id(t): t.untyped_storage().nbytes()
            for part in self._parts
            for op in part
            if isinstance(op, _Op)
            for t in op.results
            if t is not None
        }
        return sum(storages.values())


def _resizes_recorded(graph: EmulatedGraph, undo: _Undo) -> AbstractContextManager[None]:
    """Record resizes of storages during a capture; there is no op for them."""
    thread = threading.get_ident()

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if threading.get_ident() == thread:
            undo.before_resize(storage)
            graph.tape.add_mark(_Resize(storage, size_bytes))
        return _resize(storage, size_bytes)

    return setting(torch.UntypedStorage, resize_=resize_)


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
        kwargs = kwargs or {}
        if func is torch.nn.functional.one_hot:
            labels, classes = _of_one_hot(*args, **kwargs)
            if classes > 0:
                made = labels.new_zeros((*labels.shape, classes))
                return made.scatter_(-1, labels.unsqueeze(-1), 1)
        return func(*args, **kwargs)


def _of_one_hot(tensor: Tensor, num_classes: int = -1) -> tuple[Tensor, int]:
    return tensor, num_classes


class EmulatorBackend:
    """A CPU that emulates a GPU; see the module docstring."""

    description = (
        "CPU emulator: a CUDA graph's semantics without its speed, for tests and for trying things out"
    )
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
        self.generators = Generators("cpu", torch.default_generator)
        self._recording: EmulatedGraph | None = None
        self._live: list[EmulatedGraph] = []

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        with set_multithreading_enabled(False):
            yield

    def capture(self, body: Callable[[], T], is_compiled: bool = False) -> tuple[Graph, T]:
        graph = EmulatedGraph(self.streams)
        undo = _Undo(self.generators)
        self._recording = graph
        graph.capture_begin()
        try:
            recorder = _Recorder(graph, undo, self.generators)
            recorder.writes = Writes(storages_held() if is_compiled else None)
            self.flow = recorder.flow = (
                RecordedFlow("cpu", graph.position) if self.records_flow else None
            )
            with (
                set_multithreading_enabled(False),
                _reported_by_torch(),
                refused_on_cpu(),
                _resizes_recorded(graph, undo),
                host_work_of(graph.work),
                FunctionSentry("cpu"),
                _OneHotAsOnCuda(),
                recorder,
                first_refusal_kept(),
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
        self._live.append(graph)
        return graph, result

    @contextmanager
    def apart(self) -> Iterator[None]:
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
