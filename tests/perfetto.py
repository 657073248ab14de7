"""Import of a trace file by the rules of Perfetto's JSON importer and slice tracker.

Only the events of our files: complete slices, counters, and names. An event that Perfetto would drop,
close early or misread is an error here (src/trace_processor/importers/json and
importers/common/slice_tracker.cc in google/perfetto).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Imported", "Slice", "import_trace"]


@dataclass
class Slice:
    """A slice on the track of its thread."""

    name: str
    category: str
    thread: int
    begin_ns: int
    end_ns: int
    parent: Slice | None
    args: dict[str, Any]

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1


@dataclass
class Imported:
    """The contents of a file, or of several opened together."""

    slices: list[Slice] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    process_of: dict[int, int] = field(default_factory=dict)

    def named(self, name: str) -> list[Slice]:
        return [one for one in self.slices if one.name == name]


def _ns(value: Any) -> int:
    """Microseconds as whole nanoseconds; Perfetto would cut off a fraction."""
    assert type(value) in (int, float), value
    assert value * 1000 == int(value * 1000), value
    return int(value * 1000)


def _id(value: Any) -> int:
    assert type(value) is int, "a string would be another id in each file"
    assert 0 < value < 2**32, "0 is the idle process"
    return value


def import_trace(*texts: str) -> Imported:
    """Import files as one.

    Args:
        texts: of the files.
    """
    found = Imported()
    events: list[tuple[int, dict[str, Any]]] = []
    for text in texts:
        # Neither NaN nor Infinity is JSON.
        trace = json.loads(text, parse_constant=_no_json)
        assert trace["displayTimeUnit"] in ("ms", "ns")
        for event in trace["traceEvents"]:
            thread, process = _id(event["tid"]), _id(event["pid"])
            # Names are given to threads by their number alone, whatever their process.
            assert found.process_of.setdefault(thread, process) == process
            assert isinstance(event["name"], str)
            assert event["name"]
            assert isinstance(event["args"], dict)
            if event["ph"] == "M":
                _name(found, event, process, thread)
            else:
                begin_ns = _ns(event["ts"])
                assert begin_ns >= 0
                events.append((begin_ns, event))
    open_on: dict[int, list[Slice]] = {}
    for begin_ns, event in sorted(events, key=lambda pair: pair[0]):  # stable, as theirs
        if event["ph"] == "C":
            for name, value in event["args"].items():
                assert type(value) in (int, float)
                found.counters.setdefault(f"{event['name']} {name}", []).append((begin_ns, value))
            continue
        assert event["ph"] == "X", "no other kind is written"
        end_ns = begin_ns + _ns(event["dur"])
        assert end_ns >= begin_ns
        stack = open_on.setdefault(event["tid"], [])
        while stack and stack[-1].end_ns <= begin_ns:
            stack.pop()
        assert not stack or end_ns <= stack[-1].end_ns, "it ends behind what contains it: dropped"
        parent = stack[-1] if stack else None
        stack.append(
            Slice(event["name"], event["cat"], event["tid"], begin_ns, end_ns, parent, event["args"])
        )
        found.slices.append(stack[-1])
    assert {one.thread for one in found.slices} <= found.threads.keys(), "a thread without a name"
    assert set(found.process_of.values()) == found.processes.keys()
    return found


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _name(found: Imported, event: dict[str, Any], process: int, thread: int) -> None:
    args = event["args"]
    if event["name"] in ("thread_name", "process_name"):
        assert isinstance(args["name"], str)
        assert args["name"]
        names, key = (
            (found.threads, thread) if event["name"] == "thread_name" else (found.processes, process)
        )
        assert names.setdefault(key, args["name"]) == args["name"]
    elif event["name"] == "process_labels":  # for Chrome; Perfetto leaves it out
        assert isinstance(args["labels"], str)
    else:
        assert event["name"] in ("thread_sort_index", "process_sort_index")
        assert type(args["sort_index"]) is int
