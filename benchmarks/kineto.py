"""Analysis of profiler traces of captures and replays: the kernels between two marks.

A trace of `torch.profiler` is a list of events. That of a capture has the host's launches and the marks,
in the order in which they entered the graph. That of a replay has the device's kernels with their times,
in the same order, because all were captured on one stream. So the number of a launch identifies its
kernel, and the kernels between two marks are known independently of the clock under test.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.fits import ON_GPU, synchronize
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend

__all__ = [
    "CAPTURE",
    "MARK",
    "Activity",
    "Between",
    "Captured",
    "Launch",
    "Profiled",
    "Replayed",
    "Trace",
    "annotated",
]

CAPTURE = "benchmark: capture"
MARK = "benchmark: mark"

# What the host calls, and what runs on the device for it.
_LAUNCHES = {
    "kernel": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
    "memcpy": ("cudaMemcpy", "cuMemcpy"),
    "memset": ("cudaMemset", "cuMemset"),
}
_ACTIVITIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
# Launches of a capture for which nothing runs.
_MOST_EMPTY = 16
_ENGINE = "autograd::engine::evaluate_function"
_HOST_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Launch:
    """A launch of device work by the host.

    Attributes:
        kind: kernel, memcpy or memset.
        at_us: the time of the launch.
        op: the innermost op around it.
        correlation: the number that it shares with its device activity.
        node: number of the autograd node that runs around it; None outside of backward passes.
    """

    kind: str
    at_us: float
    op: str
    correlation: int
    node: int | None


@dataclass(frozen=True)
class Captured:
    """The launches of one capture.

    Attributes:
        launches: in the order of the graph.
        marks: number of launches before each mark, in the order of the graph.
        nodes: for each mark, the number of the autograd node that is made next.
    """

    launches: tuple[Launch, ...]
    marks: tuple[int, ...]
    nodes: tuple[float, ...]

    @property
    def kinds(self) -> list[str]:
        return [launch.kind for launch in self.launches]

    def ran(self, replayed: Replayed, kernels_of_ops: Mapping[str, set[str]]) -> list[int]:
        """Match the activities of a replay with the launches of the capture.

        A launch can have no activity, such as a copy of zero bytes. Launches are left out so that most
        of the others have activities with kernel names that are known for their op.

        Args:
            replayed: the replay.
            kernels_of_ops: the kernel names of each op.

        Returns:
            Indices of launches, one for each activity; empty if the replay is not of this capture.
        """
        activities = replayed.activities
        surplus = len(self.launches) - len(activities)
        if not 0 <= surplus <= _MOST_EMPTY:
            return []
        # For each number of launches left out so far: how many names were odd, and which were left out.
        best: list[tuple[float, tuple[int, ...]]] = [(0, ()), *[(inf, ())] * surplus]
        for number, launch in enumerate(self.launches):
            known = kernels_of_ops.get(launch.op, ())
            following = []
            for left_out, (odd, which) in enumerate(best):
                place = number - left_out
                taken = (inf, which)
                if 0 <= place < len(activities) and activities[place].kind == launch.kind:
                    taken = (odd + (activities[place].name not in known), which)
                if left_out:
                    fewer_odd, fewer = best[left_out - 1]
                    taken = min(taken, (fewer_odd, (*fewer, number)))
                following.append(taken)
            best = following
        odd, which = best[-1]
        return [] if odd == inf else [n for n in range(len(self.launches)) if n not in which]

    def only(self, numbers: list[int]) -> Captured:
        """The same with these launches only."""
        launches = tuple(self.launches[number] for number in numbers)
        marks = tuple(bisect_left(numbers, mark) for mark in self.marks)
        return Captured(launches, marks, self.nodes)

    def backward_of(self, calls: Iterable[tuple[int, int]]) -> set[int]:
        """The launches in autograd nodes that were made between marks.

        Args:
            calls: pairs of marks around parts of the forward pass, by number.
        """
        made = [(self.nodes[begin], self.nodes[end]) for begin, end in calls]
        return {
            number
            for number, launch in enumerate(self.launches)
            if launch.node is not None and any(first <= launch.node < last for first, last in made)
        }


@dataclass(frozen=True)
class Activity:
    """Work on the device."""

    name: str
    kind: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Replayed:
    """Device activities of one graph launch, in the order of their starts."""

    activities: tuple[Activity, ...]

    @property
    def kinds(self) -> list[str]:
        return [activity.kind for activity in self.activities]

    def between_us(self, first: int, last: int) -> float:
        """Microseconds from the end of the activity before `first` to the end of that before `last`.

        Two marks measure this time: one before the activity `first`, the other before `last`. The first
        activity of a graph counts from its own start.
        """
        ends = [activity.end_us for activity in self.activities]
        begins_us = ends[first - 1] if first else self.activities[0].start_us
        return max(0.0, (ends[last - 1] if last else self.activities[0].start_us) - begins_us)

    def busy_us(self, first: int, last: int) -> float:
        """Microseconds for which the activities from `first` to that before `last` ran."""
        return sum(activity.end_us - activity.start_us for activity in self.activities[first:last])

    @property
    def total_us(self) -> float:
        """Microseconds from the first activity's beginning to the last one's end."""
        return self.activities[-1].end_us - self.activities[0].start_us


@dataclass(frozen=True)
class Between:
    """The time from the end of one graph's execution to the start of the next.

    Attributes:
        total_us: its duration in microseconds.
        activities: device activities in it, in the order of their starts.
    """

    total_us: float
    activities: tuple[Activity, ...]

    @property
    def idle_us(self) -> float:
        """Idle time of the device in microseconds."""
        return self.total_us - sum(each.end_us - each.start_us for each in self.activities)


def _is_call(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in _HOST_CALLS


def _launch_kind(event: dict[str, Any]) -> str | None:
    if not _is_call(event):
        return None
    return next((kind for kind, names in _LAUNCHES.items() if event["name"].startswith(names)), None)


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


@dataclass
class _Op:
    """An op that has not ended, and the autograd node that runs it, in a backward pass."""

    until_us: float
    name: str
    node: int | None


def _node(event: dict[str, Any]) -> tuple[int | None, int]:
    """The autograd node that an op makes; in a backward pass, the one it runs, with its thread."""
    args = event.get("args", {})
    return args.get("Sequence number"), args.get("Fwd thread id", 0)


class Trace:
    """The events of a trace.

    Args:
        events: ``traceEvents`` of a Chrome trace.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = sorted(
            (event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"]
        )
        self._times_us = [event["ts"] for event in self._events]
        self._launches = self._find_launches()

    def calls(self) -> Counter[str]:
        """Number of calls of each CUDA function by the host."""
        return Counter(event["name"] for event in self._events if _is_call(event))

    def captures(self) -> list[Captured]:
        """The captures with marks, in order."""
        found = []
        for capture in (event for event in self._events if event["name"] == CAPTURE):
            begins_us, ends_us = capture["ts"], capture["ts"] + capture["dur"]
            for event in self._events:
                if begins_us <= event["ts"] <= ends_us:
                    # What is launched outside of the capture proper is in no graph.
                    if event["name"].startswith("cudaStreamBeginCapture"):
                        begins_us = event["ts"]
                    elif event["name"].startswith("cudaStreamEndCapture"):
                        ends_us = event["ts"]
            launches = [launch for launch in self._launches if begins_us <= launch.at_us <= ends_us]
            times_us = [launch.at_us for launch in launches]
            # In its middle: the clocks of host and driver need not agree to the microsecond.
            marks_us = [
                event["ts"] + event["dur"] / 2
                for event in self._events
                if event["name"] == MARK and begins_us <= event["ts"] <= ends_us
            ]
            if marks_us:
                marks = tuple(bisect_left(times_us, mark_us) for mark_us in marks_us)
                nodes = tuple(self._next_node(mark_us, ends_us) for mark_us in marks_us)
                found.append(Captured(tuple(launches), marks, nodes))
        return found

    def replays(self) -> list[Replayed]:
        """The graph launches, in order."""
        return self._of_graphs()[0]

    def between_replays(self) -> list[Between]:
        """The times between graph launches, which do not overlap."""
        replays, others = self._of_graphs()
        found = []
        for one, next_one in pairwise(replays):
            ended_us = max(activity.end_us for activity in one.activities)
            begins_us = next_one.activities[0].start_us
            inside = tuple(each for each in others if ended_us <= each.start_us < begins_us)
            found.append(Between(begins_us - ended_us, inside))
        return found

    def _of_graphs(self) -> tuple[list[Replayed], list[Activity]]:
        """The graph launches, in order, and the activities outside of them."""
        graphs = [
            _correlation(event)
            for event in self._events
            if _is_call(event) and event["name"].startswith(_GRAPH_LAUNCHES)
        ]
        of_graph: dict[int, list[Activity]] = {correlation: [] for correlation in graphs}
        others = []
        for correlation, activity in self._activities():
            of_graph.get(correlation, others).append(activity)
        replays = [Replayed(tuple(activities)) for activities in of_graph.values() if activities]
        return replays, others

    def kernels_of_ops(self) -> dict[str, set[str]]:
        """The kernel names of each op, from launches outside of graphs."""
        op_of = {launch.correlation: launch.op for launch in self._launches}
        found: dict[str, set[str]] = defaultdict(set)
        for correlation, activity in self._activities():
            if correlation in op_of:
                found[op_of[correlation]].add(activity.name)
        return found

    def _activities(self) -> Iterator[tuple[int, Activity]]:
        for event in self._events:
            if (kind := _ACTIVITIES.get(event.get("cat", ""))) is not None:
                end_us = event["ts"] + event["dur"]
                yield _correlation(event), Activity(event["name"], kind, event["ts"], end_us)

    def _next_node(self, from_us: float, until_us: float) -> float:
        """The number of the autograd node that the next op of a forward pass makes."""
        for event in self._events[bisect_left(self._times_us, from_us) :]:
            if event["ts"] > until_us:
                break
            number, thread = _node(event)
            if number is not None and not thread:
                return number
        return inf

    def _find_launches(self) -> list[Launch]:
        """All launches, each with the innermost open op of its thread."""
        launches: list[Launch] = []
        open_ops: dict[Any, list[_Op]] = defaultdict(list)
        in_call_until_us: dict[Any, float] = {}
        for event in self._events:
            thread, at_us = event.get("tid"), event["ts"]
            ops = open_ops[thread]
            while ops and ops[-1].until_us < at_us:
                ops.pop()
            if event.get("cat") == "cpu_op" and event["name"] not in (CAPTURE, MARK):
                number, forward_thread = _node(event)
                node = number if forward_thread else None
                for around in ops:
                    # What the engine itself does with the gradients of a node comes behind it.
                    if node is not None and around.name.startswith(_ENGINE):
                        around.node = node
                ops.append(_Op(at_us + event["dur"], event["name"], node))
            # A call of the driver from within one of the runtime is the same launch.
            is_inner = at_us < in_call_until_us.get(thread, at_us)
            if (kind := _launch_kind(event)) is not None and not is_inner:
                name = ops[-1].name if ops else ""
                node = next((op.node for op in reversed(ops) if op.node is not None), None)
                launches.append(Launch(kind, at_us, name, _correlation(event), node))
                in_call_until_us[thread] = at_us + event["dur"]
        return launches


class Profiled:
    """A profile between `start` and `stop`."""

    trace: Trace

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
        self._profile = profile(activities=activities)

    def start(self) -> None:
        synchronize()
        self._profile.start()

    def stop(self) -> Trace:
        synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self.trace = Trace(json.loads(path.read_text())["traceEvents"])
        return self.trace

    def __enter__(self) -> Profiled:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


@contextlib.contextmanager
def annotated() -> Iterator[None]:
    """Annotate captures and marks in traces, inside the context."""
    with contextlib.ExitStack() as stack:
        for backend in (CudaBackend, EmulatorBackend):
            for method, name in (("capture", CAPTURE), ("mark", MARK)):
                original = getattr(backend, method)
                stack.callback(setattr, backend, method, original)
                setattr(backend, method, _in_range(original, name))
        yield


def _in_range(function: Any, name: str) -> Any:
    def inside(*args: Any, **kwargs: Any) -> Any:
        # Not `record_function`, which is an op, and would be seen by what watches the capture.
        with torch._C._profiler._RecordFunctionFast(name):
            return function(*args, **kwargs)

    return inside
