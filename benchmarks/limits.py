"""Lower bounds of a captured step's time: the sum of its kernels, and its longest dependent chain.

A step is captured by hand on one stream, with a mark before each op, and replayed, both under a profiler
(`benchmarks/kineto.py`). So the kernels of each op are known, with their times. The dependencies between
ops follow from the storages that they read and write. The longest chain is a lower bound for any number
of streams, as long as each kernel takes the time that it takes alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.by_hand import GraphedByHand
from benchmarks.fits import pinned, synchronize
from benchmarks.kineto import CAPTURE, MARK, Profiled, Trace
from benchmarks.models import Workload
from lightning_cudagraph.tensors.writes import storage_id, written_by

__all__ = ["Limits", "Op", "OpLog", "limits_of", "longest_chain_us", "measure_limits"]

_WARM_STEPS = 3
_SETTLING_REPLAYS = 20
_PROFILED_REPLAYS = 20


@dataclass(frozen=True)
class Limits:
    """Lower bounds of a step's time.

    Attributes:
        kernels_us: sum over all kernels, copies and fills, in microseconds.
        chain_us: the same over the longest chain of dependent ops.
        n_kernels: number of kernels, copies and fills in the step.
        n_ops: number of ops.
    """

    kernels_us: float
    chain_us: float
    n_kernels: int
    n_ops: int


@dataclass(frozen=True)
class Op:
    """The storages that an op reads and writes, by number."""

    reads: frozenset[int]
    writes: frozenset[int]


class OpLog(TorchDispatchMode):
    """Dispatch mode that records the ops of a step in order; `before_each` is called before each op."""

    def __init__(self, before_each: Callable[[], None]) -> None:
        super().__init__()
        self._before_each = before_each
        self.ops: list[Op] = []
        # Kept alive, because ops that only reuse freed memory do not depend on each other.
        self._storages: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._before_each()
        result = func(*args, **kwargs)
        if func.is_view:
            self.ops.append(Op(frozenset(), frozenset()))
            return result
        reads = self._of((args, kwargs))
        written = self._of(written_by(func, args, kwargs))
        # A result in memory of an argument is no write, if none is declared.
        self.ops.append(Op(reads, written | (self._of(result) - reads)))
        return result

    def _of(self, values: Any) -> frozenset[int]:
        """The numbers of all storages in some values."""
        found = set()
        for tensor in tree_iter(values):
            if isinstance(tensor, Tensor):
                number = self._numbers.setdefault(storage_id(tensor), len(self._storages))
                if number == len(self._storages):
                    self._storages.append(tensor.untyped_storage())
                found.add(number)
        return frozenset(found)


def longest_chain_us(ops: Sequence[Op], times_us: Sequence[float]) -> float:
    """The time of the longest chain of dependent ops.

    An op depends on the ops that wrote what it reads, and on those that wrote or read what it writes.

    Args:
        ops: in the order of the step.
        times_us: the time of each.
    """
    written_us: dict[int, float] = {}
    read_us: dict[int, float] = {}
    longest_us = 0.0
    for op, time_us in zip(ops, times_us, strict=True):
        waits_us = [written_us.get(storage, 0.0) for storage in op.reads | op.writes]
        waits_us += [read_us.get(storage, 0.0) for storage in op.writes]
        ends_us = max(waits_us, default=0.0) + time_us
        for storage in op.reads:
            read_us[storage] = max(read_us.get(storage, 0.0), ends_us)
        for storage in op.writes:
            written_us[storage] = ends_us
        longest_us = max(longest_us, ends_us)
    return longest_us


def limits_of(ops: Sequence[Op], capture: Trace, replays: Trace) -> Limits:
    """The limits of a step.

    Args:
        ops: of the step.
        capture: the trace of its capture, with a mark before each op.
        replays: the trace of some replays.

    Raises:
        RuntimeError: if the kernels of an op cannot be found in the traces.
    """
    found = capture.captures()
    if len(found) != 1 or len(found[0].marks) != len(ops):
        marks = [len(each.marks) for each in found]
        raise RuntimeError(f"the trace of the capture has marks {marks} for {len(ops)} ops")
    replayed = replays.replays()
    numbers = found[0].ran(replayed[0], capture.kernels_of_ops()) if replayed else []
    plan = found[0].only(numbers)
    alike = [each for each in replayed if each.kinds == plan.kinds]
    if not numbers or not alike:
        raise RuntimeError(
            f"{len(plan.launches)} launches of the capture are not those of {len(replayed)} replays"
        )
    activities = zip(*(each.activities for each in alike), strict=True)
    kernels_us = [
        statistics.median(activity.end_us - activity.start_us for activity in same)
        for same in activities
    ]
    ends = [*plan.marks[1:], len(kernels_us)]
    times_us = [sum(kernels_us[begin:end]) for begin, end in zip(plan.marks, ends, strict=True)]
    return Limits(sum(kernels_us), longest_chain_us(ops, times_us), len(kernels_us), len(ops))


def measure_limits(workload: Workload, tiny: bool) -> Limits:
    """Capture and replay a model's step, and find its limits."""
    batch = pinned(workload.batch(tiny))
    loop = GraphedByHand(workload, tiny)
    for _ in range(_WARM_STEPS):
        loop.warm_up(batch)
    log = OpLog(lambda: _named(MARK))

    def logged() -> None:
        with log:
            loop.step()

    with Profiled() as captured:
        # An eager step tells which kernels an op has.
        loop.warm_up(batch)
        with torch._C._profiler._RecordFunctionFast(CAPTURE):
            loop.capture(logged)
    for _ in range(_SETTLING_REPLAYS):
        loop.replay()
    synchronize()
    with Profiled() as replayed:
        for _ in range(_PROFILED_REPLAYS):
            loop.replay()
    return limits_of(log.ops, captured.trace, replayed.trace)


def _named(name: str) -> None:
    with torch._C._profiler._RecordFunctionFast(name):
        pass
