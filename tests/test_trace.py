"""Trace files: slices that nest, steps laid out by their gaps, and disks that are full."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.timeline import TICKS_PER_MS, calls_of
from lightning_cudagraph.timing.sinks.trace import TraceWriter, trace_of, write_trace
from tests.perfetto import import_trace
from tests.readings import gpt_readings


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def threads(trace: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


def assert_nests(trace: dict[str, Any]) -> None:
    """Slices of one thread contain one another or are apart, in whole nanoseconds, as viewers want."""
    by_thread = defaultdict(list)
    for event in slices(trace):
        begin_ns, length_ns = event["ts"] * 1000, event["dur"] * 1000
        assert begin_ns == int(begin_ns)
        assert length_ns == int(length_ns)
        assert begin_ns >= 0
        assert length_ns >= 0
        by_thread[event["pid"], event["tid"]].append((int(begin_ns), int(begin_ns + length_ns)))
    for of_thread in by_thread.values():
        open_ends: list[int] = []
        # In the order of the file for what begins at one time: that is how viewers nest them.
        for begin, end in sorted(of_thread, key=lambda one: one[0]):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (begin, end, open_ends)
            open_ends.append(end)


def test_slices_nest() -> None:
    readings = gpt_readings(n=25, with_members=True)
    trace = json.loads(json.dumps(trace_of(readings, "CharGPT")))
    assert_nests(trace)
    names = threads(trace)
    assert list(names.values()) == [
        "steps", "gap: waiting for the host", "copy of the batch", "forward", "backward", "optimizer",
    ]  # fmt: skip
    order = {
        e["tid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if "sort_index" in e["args"]
    }
    assert sorted(names, key=lambda thread: order[thread]) == list(names)
    process = next(e for e in trace["traceEvents"] if e["name"] == "process_name")
    assert process["args"] == {"name": "CharGPT"}
    per_step = 1 + 2 + 1 + 2 + 2 * (1 + 4 + 6 + 24)
    assert len(slices(trace)) == 25 * per_step
    layer = next(e for e in slices(trace) if e["name"] == "blocks.3.mlp" and e["cat"] == "backward")
    expected_ms = dict(zip(readings[0].layout.tags, readings[0].durations_ms, strict=True))
    assert layer["dur"] / 1000 == pytest.approx(expected_ms["layer_backward_ms/blocks.3.mlp"], abs=3e-4)
    assert layer["args"]["step"] == 0
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert [set(counter["args"]) for counter in counters] == [{"total", "gap"}] * 25


def test_what_perfetto_makes_of_it() -> None:
    readings = gpt_readings(n=12, with_members=True)
    found = import_trace(json.dumps(trace_of(readings, "CharGPT")))
    assert len(found.named("blocks.3.mlp")) == 24
    for one in found.named("blocks.3.mlp"):
        assert one.depth == 3  # in the pass, in `blocks`, in the block
        assert one.parent is not None
        assert one.parent.name == "blocks.3"
        assert found.threads[one.thread] == one.category
    steps = [one for one in found.slices if found.threads[one.thread] == "steps"]
    assert [one.name for one in steps] == [f"step {step}" for step in range(12)]
    assert all(one.depth == 0 for one in steps)
    # All of a step but what lies before it is drawn below it.
    for one in found.slices:
        step = steps[one.args["step"]]
        if one.category in ("forward", "backward", "optimizer"):
            assert step.begin_ns <= one.begin_ns
            assert one.end_ns <= step.end_ns
    assert found.counters.keys() == {"step ms total", "step ms gap"}
    assert len(found.counters["step ms total"]) == 12


def test_ranks_that_are_opened_together() -> None:
    texts = [json.dumps(trace_of(gpt_readings(n=2), f"rank {rank}", rank)) for rank in range(3)]
    found = import_trace(*texts)
    assert sorted(found.processes.values()) == ["rank 0", "rank 1", "rank 2"]
    assert list(found.threads.values()).count("backward") == 3
    assert len(found.named("step 1")) == 3


def test_steps_are_laid_out_by_their_gaps() -> None:
    readings = gpt_readings(n=10)
    steps = [event for event in slices(trace_of(readings)) if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {i}" for i in range(10)]
    for before, after, reading in zip(steps, steps[1:], readings[1:], strict=False):
        between_us = after["ts"] - before["ts"] - before["dur"]
        assert between_us == pytest.approx(-1000 * min(reading.offsets_ms), abs=0.2)


def test_steps_that_do_not_follow_one_another_are_laid_out_by_the_clock() -> None:
    readings = gpt_readings(n=101)[::50]
    steps = [event for event in slices(trace_of(readings)) if event["cat"] == "step"]
    apart = [after["ts"] - before["ts"] for before, after in pairwise(steps)]
    assert apart == pytest.approx([50 * 2300.0] * 2, abs=1)
    # Two that were read at once are not drawn over one another.
    at_once = [Reading(one.layout, one.step, 1e9, one.offsets_ms) for one in readings]
    assert_nests(trace_of(at_once))


def layered(*stretches: tuple[str, float, float]) -> Reading:
    offsets_ms = [offset_ms for _, begin_ms, end_ms in stretches for offset_ms in (begin_ms, end_ms)]
    spans = tuple(
        Span(f"layer_forward_ms/{name}", "forward", ((2 * i, 2 * i + 1),))
        for i, (name, _, _) in enumerate(stretches)
    )
    return Reading(SpanLayout(spans, len(offsets_ms)), 0, 0.0, offsets_ms)


def test_what_overlaps_has_a_thread_of_its_own() -> None:
    reading = layered(("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 1.0, 1.5), ("d", 2.0, 2.5))
    assert {one.span.name: (one.row, one.depth) for one in calls_of(reading)} == {
        "a": (0, 0),
        "b": (1, 0),
        "c": (0, 1),
        "d": (0, 0),
    }
    trace = trace_of([reading])
    assert_nests(trace)
    assert list(threads(trace).values()) == ["steps", "forward", "forward (2)"]


def test_what_takes_the_same_time_or_none_nests() -> None:
    reading = layered(("a.b", 0.0, 1.0), ("a", 0.0, 1.0), ("a.b.c", 0.0, 1.0), ("none", 1.0, 1.0))
    found = {one.span.name: (one.row, one.depth) for one in calls_of(reading)}
    assert found == {"a": (0, 0), "a.b": (0, 1), "a.b.c": (0, 2), "none": (0, 0)}
    names = [event["name"] for event in slices(trace_of([reading]))]
    assert names == ["step 0", "a", "a.b", "a.b.c", "none"]
    assert_nests(trace_of([reading]))


def test_rounding_lets_nothing_overlap() -> None:
    thirds = [i / 3e4 for i in range(31)]
    parts = [(f"part{i}", begin, end) for i, (begin, end) in enumerate(pairwise(thirds))]
    reading = layered(("whole", thirds[0], thirds[-1]), *parts)
    assert {one.row for one in calls_of(reading)} == {0}
    assert_nests(trace_of([reading] * 3))
    assert TICKS_PER_MS % 8 == 0


def test_the_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "layer_trace.json"
    path.write_text("the one before")
    write_trace(path, gpt_readings(n=2), "CharGPT", rank=1)
    trace = json.loads(path.read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {10_001}
    assert [file.name for file in tmp_path.iterdir()] == ["layer_trace.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_full_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layer_trace.json"
    path.write_text("the one before")

    def full(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    writer = TraceWriter(lambda: path, 3)
    for reading in gpt_readings(n=5):
        writer.add(reading)
    with pytest.warns(RuntimeWarning, match=r"last 3 timed steps was not written: .*No space left"):
        writer.close()
    assert path.read_text() == "the one before"
    assert [file.name for file in tmp_path.iterdir()] == ["layer_trace.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="a file as a folder is another error there")
def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = TraceWriter(lambda: tmp_path / "file" / "layer_trace.json", 3)
    writer.add(gpt_readings(n=1)[0])
    with pytest.warns(RuntimeWarning, match="Training is not concerned"):
        writer.close()


def test_the_last_steps_are_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "layer_trace.json"
    writer = TraceWriter(lambda: path, 4, "Net")
    for reading in gpt_readings(n=10):
        writer.add(reading)
        writer.pause()
    assert not path.exists()
    writer.close()
    steps = [event["name"] for event in slices(json.loads(path.read_text())) if event["cat"] == "step"]
    assert steps == ["step 6", "step 7", "step 8", "step 9"]
    path.unlink()
    writer.close()
    TraceWriter(lambda: path, 4).close()
    assert not path.exists()
