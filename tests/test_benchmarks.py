"""What the benchmarks make of traces and of blocks: known numbers in, the same numbers out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    agreement_at_scale,
    first_replay,
    guards,
    manual,
    optimizers,
    pairs,
    shapes,
    surroundings,
)
from benchmarks.agreement_at_scale import Hosts, Links, Network, around_a_ring, in_pairs, to_all
from benchmarks.fits import BlockedBatches, Blocks, fits_in_turn
from benchmarks.host_floor import CALLBACKS, HANDING_OVER, line, rows
from benchmarks.kineto import CAPTURE, MARK, Trace
from benchmarks.layer_timings import BASELINE, VARIANTS, measure, table
from benchmarks.models import MODELS, Workload, leaf_names
from benchmarks.stopwatch import BLOCK_STEPS, WARM_STEPS, Blockwise
from benchmarks.surroundings import EAGER, NOTHING, WAYS
from benchmarks.timing_truth import Alone, Truth, Watched, alone, compare, details, summary, watch
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout

Event = dict[str, Any]
KERNELS_US = (10.0, 30.0, 25.0, 5.0, 40.0)
GAP_US = 1.0
COMPUTED = ("aten::mm", "aten::sum", "aten::threshold_backward", "aten::gelu_backward")
# An op for each kernel: two of them are one op's.
OPS = ("aten::addmm", "aten::addmm", "aten::relu", "aten::mse_loss", "AddmmBackward0")
# Marks of the step, and around the second and the third kernel.
MARKS = (0, 1, 3, 5)


def event(category: str, name: str, ts: float, dur: float, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def step_by_host(at_us: float, correlations: Iterator[int], with_marks: bool) -> list[Event]:
    """Ops and their launches, 100 µs apart, and marks between them."""
    found: list[Event] = []
    for number, op in enumerate((*OPS, None)):
        here_us = at_us + 100 * number
        if with_marks and number in MARKS:
            found.append(event("cpu_op", MARK, here_us - 50, 20))
        if op is not None:
            found.append(event("cpu_op", op, here_us, 40))
            found.append(
                event(
                    "cuda_runtime", "cudaLaunchKernel", here_us + 10, 10, correlation=next(correlations)
                )
            )
            found.append(event("cuda_driver", "cuLaunchKernel", here_us + 12, 5, correlation=-1))
    return found


def step_on_device(at_us: float, correlations: Iterator[int], gap_us: float = GAP_US) -> list[Event]:
    found = []
    for op, kernel_us in zip(OPS, KERNELS_US, strict=True):
        name = f"kernel of {op}"
        found.append(event("kernel", name, at_us, kernel_us, correlation=next(correlations)))
        at_us += kernel_us + gap_us
    return found


def capture_trace() -> list[Event]:
    """An eager step, and then two captures of it."""
    events = step_by_host(1000, count(1), with_marks=False) + step_on_device(1200, count(1))
    for begins_us in (10_000, 20_000):
        events += [
            event("cpu_op", CAPTURE, begins_us, 2000),
            # Before the capture proper: in no graph.
            event("cuda_runtime", "cudaLaunchKernel", begins_us + 10, 5, correlation=50),
            event("cuda_runtime", "cudaStreamBeginCapture", begins_us + 20, 5),
            *step_by_host(begins_us + 200, count(100), with_marks=True),
            event("cuda_runtime", "cudaStreamEndCapture", begins_us + 1900, 5),
        ]
    return events


def replay_trace(replays: int, gap_us: float = GAP_US) -> list[Event]:
    events = []
    for number in range(replays):
        at_us = 1000.0 * number
        events += [
            event("cuda_runtime", "cudaMemcpyAsync", at_us, 5, correlation=1000 + number),
            event("gpu_memcpy", "Memcpy HtoD", at_us + 20, 5, correlation=1000 + number),
            event("cuda_runtime", "cudaGraphLaunch", at_us + 10, 5, correlation=number),
            # Kernels of a graph have the correlation of its launch, each of them.
            *step_on_device(at_us + 40, (number for _ in OPS), gap_us),
        ]
    return events[::-1]  # traces are not sorted


LAYOUT = SpanLayout(
    (
        Span("step_ms/forward", "forward", ((0, 2),)),
        Span("step_ms/backward", "backward", ((2, 3),)),
        Span("step_ms/total", "host", ((0, 3),)),
        Span("layer_forward_ms/net.0", "forward", ((1, 2),)),
        Span("layer_backward_ms/net", "backward", ((2, 3),)),
        Span("step_ms/copy", "copy", ((4, 0),)),
    ),
    5,
)


def watched(off_us: float = 0.0, replays: int = 3) -> Watched:
    # When kernels end: 10, 41, 67, 73, 114. Before the step, a copy.
    offsets_ms = [0.0, 0.010, (67 + off_us) / 1e3, 0.114, -0.020]
    readings = [Reading(LAYOUT, step, 0.0, offsets_ms) for step in range(replays)]
    return Watched(Trace(capture_trace()), Trace(replay_trace(replays)), readings)


def unwatched(whole: Watched) -> Alone:
    return Alone(whole.readings, 150.0)


def test_captures_are_found_with_their_launches_and_marks() -> None:
    captures = Trace(capture_trace()).captures()
    assert [capture.marks for capture in captures] == [MARKS, MARKS]
    for capture in captures:
        assert [launch.op for launch in capture.launches] == list(OPS)
        assert capture.kinds == ["kernel"] * 5
    # Without what begins and ends it, all of the range counts.
    unbounded = [event for event in capture_trace() if "StreamBegin" not in event["name"]]
    assert [len(capture.launches) for capture in Trace(unbounded).captures()] == [6, 6]


def test_replays_are_found_with_their_kernels() -> None:
    replays = Trace(replay_trace(3)).replays()
    assert len(replays) == 3
    for replay in replays:
        assert [activity.end_us - activity.start_us for activity in replay.activities] == list(
            KERNELS_US
        )
        assert replay.total_us == sum(KERNELS_US) + 4 * GAP_US
        assert replay.between_us(0, 5) == replay.total_us
        assert replay.between_us(1, 3) == 30 + 25 + 2 * GAP_US
        assert replay.busy_us(1, 3) == 55
        assert replay.between_us(3, 3) == replay.between_us(0, 0) == 0
    ops = Trace(capture_trace()).kernels_of_ops()
    assert ops["aten::relu"] == {"kernel of aten::relu"}


def test_readings_are_held_against_the_kernels() -> None:
    truth = compare("net", watched(), unwatched(watched()), {"net.0"})
    rows = {row.tag: row for row in truth.rows}
    assert truth.n_replays == 3
    assert truth.n_kernels == truth.n_named == 5
    assert rows["layer_forward_ms/net.0"].kernels == 2
    assert rows["layer_forward_ms/net.0"].is_leaf
    assert not rows["layer_backward_ms/net"].is_leaf
    for tag, profiler_us, busy_us in (
        ("layer_forward_ms/net.0", 57, 55),
        ("layer_backward_ms/net", 47, 45),
        ("step_ms/forward", 67, 65),
        ("step_ms/total", 114, 110),
    ):
        row = rows[tag]
        assert (row.ours_us, row.profiler_us, row.busy_us) == pytest.approx(
            (profiler_us,) * 2 + (busy_us,)
        )
        assert row.is_within
        assert row.alone_is_within
    assert truth.problems == ["not in the graph, and so not compared: step_ms/copy"]
    assert "2 above 20 µs, 1 of them leaves | 2 of 2 | " in summary([truth], 20)
    assert "layer_forward_ms/net.0 | 2 | 57.0 | 57.0 | 55.0 | 57.0 |" in details(truth, 20, 5)


def test_a_reading_that_is_off_is_told() -> None:
    truth = compare("net", watched(4.0), unwatched(watched(4.0)), {"net.0"})
    assert [row.is_within for row in truth.layers(20)] == [False, False]
    # Alone, it may be shorter than under the profiler, by the gaps.
    assert [row.alone_is_within for row in truth.layers(20)] == [False, True]
    assert "0 of 2 | +4.0 µs (+7.0%)" in summary([truth], 20)


def test_what_cannot_be_mapped_is_said() -> None:
    def problems(**changed: Any) -> list[str]:
        whole = watched()
        truth = compare("net", Watched(**{**whole.__dict__, **changed}), unwatched(whole), set())
        assert "not compared" in summary([truth], 20)
        return truth.problems

    (none,) = problems(capture=Trace([]))
    assert none.startswith("no launches of a capture")
    events = capture_trace()
    del events[-4:-2]  # the last launch of the second capture
    (differ,) = problems(capture=Trace(events))
    assert "two captures of the step differ" in differ
    (fewer,) = problems(readings=watched().readings[:2])
    assert fewer == "3 launches of graphs for 2 readings"
    (none,) = problems(replays=Trace([]))
    assert none == "0 launches of graphs for 3 readings"


def test_a_fit_with_other_marks_is_no_fit_of_the_same() -> None:
    whole = watched()
    fewer = SpanLayout(LAYOUT.spans[:-1], LAYOUT.n_marks)
    quiet = Alone([Reading(fewer, 0, 0.0, whole.readings[0].offsets_ms)], 150.0)
    truth = compare("net", whole, quiet, {"net.0"})
    assert truth.problems == ["a fit that is not watched has other marks"]
    assert truth.rows == []


def test_a_launch_for_which_nothing_runs_is_left_out() -> None:
    whole = watched()
    kernels = [event for event in replay_trace(3) if event["name"] != "kernel of aten::mse_loss"]
    whole.replays = Trace(kernels)
    truth = compare("net", whole, unwatched(whole), {"net.0"})
    assert truth.problems[0].startswith("4 kernels, copies and fills for 5 launches of the capture")
    assert truth.problems[0].endswith("nothing ran for a kernel of 'aten::mse_loss'")
    rows = {row.tag: row for row in truth.rows}
    assert rows["layer_forward_ms/net.0"].kernels == 2
    assert rows["layer_backward_ms/net"].kernels == 1
    # That before the hole takes what would have been its time.
    assert rows["layer_backward_ms/net"].busy_us == 40
    # Of another kind, they are not those of the capture.
    whole.replays = Trace(
        [event | {"cat": event["cat"].replace("kernel", "gpu_memset")} for event in kernels]
    )
    truth = compare("net", whole, unwatched(whole), {"net.0"})
    assert truth.rows == []
    assert truth.problems[0].endswith("which cannot be told apart")
    assert truth.problems[1] == "these are {'memset': 4} for {'kernel': 5}"


def test_kernels_that_the_op_has_not_eagerly_are_counted() -> None:
    events = [event for event in capture_trace() if event["name"] != "kernel of AddmmBackward0"]
    whole = watched()
    whole.capture = Trace(events)
    truth = compare("net", whole, unwatched(whole), set())
    assert truth.n_named == 4
    assert "'kernel of AddmmBackward0' of 'AddmmBackward0'" in truth.problems[0]


@pytest.mark.long
def test_marks_of_a_fit_are_in_its_trace() -> None:
    found = watch(MODELS[0], replays=2, tiny=True)
    (capture,) = [event for event in found.capture._events if event["name"] == CAPTURE]
    marks = [
        event
        for event in found.capture._events
        if event["name"] == MARK and capture["ts"] <= event["ts"] <= capture["ts"] + capture["dur"]
    ]
    assert len(found.readings) == 2
    layout = found.readings[0].layout
    of_layers = [span for span in layout.spans if span.tag.startswith("layer_")]
    assert len(of_layers) == 2 * 38
    assert {mark for span in of_layers for call in span.calls for mark in call} < set(range(len(marks)))
    assert layout.n_marks >= len(marks)
    quiet = alone(MODELS[0], replays=3, tiny=True)
    assert [reading.layout.spans for reading in quiet.readings] == [layout.spans] * 3
    assert compare("MLP", found, quiet, set()).problems[0].startswith("no launches of a capture")


# The example validates, which takes no part in this.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no")
@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.name)
def test_kernels_of_a_backward_pass_lie_between_the_marks_of_their_layer(model: Workload) -> None:
    found = watch(model, replays=2, tiny=True)
    # On a CPU nothing is launched: so let every op have a kernel that comes in as it does on a GPU.
    events = found.capture._events
    inner = [e for e in events if e["name"] in COMPUTED and "Sequence number" not in e["args"]]
    launches = [
        event("cuda_runtime", "cudaLaunchKernel", op["ts"] + op["dur"] / 2, 0, correlation=number)
        | {"tid": op["tid"]}
        for number, op in enumerate(inner)
    ]
    (plan,) = Trace([*events, *launches]).captures()
    spans = {span.tag: span.calls for span in found.readings[-1].layout.spans}
    seen = 0
    for leaf in leaf_names(model.make(True)):
        if (calls := spans.get(f"layer_backward_ms/{leaf}")) is None:
            continue
        own = plan.backward_of(spans[f"layer_forward_ms/{leaf}"])
        between = {n for begin, end in calls for n in range(plan.marks[begin], plan.marks[end])}
        assert own == between, leaf
        seen += len(own)
    assert seen > 30


def test_fits_take_turns() -> None:
    order: list[str] = []

    def fit(name: str) -> Any:
        def run(batches: BlockedBatches) -> None:
            for number, _ in enumerate(batches):
                order.append(name)
                if name == "b" and number == 3:
                    raise ValueError("no more")

        return run

    blocks = Blocks(warm_steps=2, lead_steps=1, steps=1, rounds=3)
    measured = fits_in_turn({name: fit(name) for name in "abc"}, lambda: None, blocks)
    # All begin, then there and back; `b` ends in its first block.
    assert "".join(order) == "aabbcc" + "aabbcc" + "ccaa" + "aacc" + "ac"
    assert [len(measured[name].step_us) for name in "abc"] == [3, 0, 3]
    assert str(measured["b"].failure) == "no more"
    assert measured["a"].ratio_to(measured["a"]) == (1.0, 1.0, 1.0)


def test_a_benchmark_runs(accelerator: str) -> None:
    blocks = Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2)
    result = measure(MODELS[0], list(VARIANTS)[:2], blocks, tiny=True, streams=1)
    assert result.layers == len(leaf_names(MODELS[0].make(True))) == 37
    assert [fit.failure for fit in result.fits.values()] == [None, None]
    assert all(len(fit.step_us) == 2 for fit in result.fits.values())
    lines = table([result]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith(f"| MLP (37) | {BASELINE} | ")
    assert "%" in lines[3]


def test_a_model_without_comparison_has_a_line() -> None:
    assert "| none | 0 | not compared |" in summary([Truth("none")], 20)


@pytest.mark.long
def test_the_floor_of_the_host() -> None:
    blocks = Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2)
    shown = "both, first value shown"
    found = list(rows([shown, HANDING_OVER], blocks))
    assert [(row.group, row.values, row.name) for row in found[:3]] == [
        (shown, 1, name) for name in CALLBACKS
    ]
    assert [row.values for row in found if row.group == HANDING_OVER] == [0, 1, 3, 10]
    assert all(len(row.times.step_us) == 2 for row in found if row.group == shown)
    assert len(found) == 9 + 4
    assert all(line(row).count("|") == 5 for row in found)


def test_a_late_check_is_no_part_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of a hundred takes 0.2 s, the others 2 ms."""
    now_s = 0.0
    monkeypatch.setattr("benchmarks.stopwatch.time.perf_counter", lambda: now_s)
    blocks = Blockwise()
    for number in range(WARM_STEPS + 5 * BLOCK_STEPS):
        blocks.begin_step(number)
        now_s += 0.2 if number == WARM_STEPS + 7 else 0.002
    blocks.begin_step(WARM_STEPS + 5 * BLOCK_STEPS)
    assert blocks.step_us == pytest.approx(2000)


@pytest.mark.long
def test_the_surroundings_of_a_step() -> None:
    blocks = Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2)
    names = [NOTHING, "the same, loss in the bar", "`LearningRateMonitor`, `ModelCheckpoint`, no bar"]
    measured, bars = surroundings.measure(names, blocks)
    assert [(name, [*ways]) for name, ways in measured.items()] == [(name, [*WAYS]) for name in names]
    assert all(len(ways[EAGER].step_us) == 2 for ways in measured.values())
    found = [line.split(" | ") for line in surroundings.table(measured)[2:]]
    assert [cells[0] for cells in found] == [f"| {name}" for name in names]
    assert found[0][4] == "1.00 (1.00 to 1.00)"
    assert {len(cells) for cells in found} == {len(WAYS) + 3}
    (line,) = surroundings.lines_of_bars(measured, bars)
    assert line.startswith(f"{names[1]}: the bar takes ")
    assert bars[names[1]].step_us > 1.0


@pytest.mark.long
def test_the_price_of_checks() -> None:
    measured = guards.price("MLP", 1, Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2))
    assert {way: len(found.step_us) for way, found in measured.items()} == {"all checks": 2, "none": 2}


@pytest.mark.long
def test_the_time_to_the_first_replay(capsys: pytest.CaptureFixture[str]) -> None:
    first_replay.main(["--models", "two critics", "--streams", "1", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [["| two critics", streams] for streams in "1212"]
    assert all(float(row[2]) > float(row[3]) > 0 for row in rows)


@pytest.mark.long
def test_the_forms_of_an_optimizer() -> None:
    blocks = Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2)
    found = [line.split(" | ") for line in optimizers.rows("MLP", None, blocks)]
    assert [line[2] for line in found] == list(optimizers.FORMS)
    assert found[0][-1] == "1.000 |"


# The example validates, which takes no part in this.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no")
@pytest.mark.parametrize(("rows", "least"), [(shapes.ROWS, 0.4), (manual.ROWS, 0.5)])
def test_plain_lightning_and_the_callback_in_turn(rows: dict[str, pairs.Row], least: float) -> None:
    blocks = Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2)
    some = {name: row for name, row in rows.items() if "the longest" not in name}
    measured = {name: pairs.measure(row, blocks) for name, row in some.items()}
    assert {plain.summary.replayed_share for plain, _ in measured.values()} == {0}
    shares = {name: graph.summary.replayed_share for name, (_, graph) in measured.items()}
    assert shares.pop(shapes.NO_GRAPH, 0) == 0
    assert all(share > least for share in shares.values())
    found = [pairs.line(name, *fits, goal=1.0).split(" | ") for name, fits in measured.items()]
    assert {cells[-1] for cells in found} == {"equal |"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_captures_of_one_graph_and_of_several() -> None:
    (one, alone), (several, together) = shapes.measure_captures().items()
    assert (one, several) == ("the longest alone", shapes.IN_BUCKETS)
    assert (alone.captures, together.captures) == (1, len(shapes.BUCKETS.lengths))
    assert 0 < alone.capture_ms < together.capture_ms


@pytest.fixture
def ten_us(monkeypatch: pytest.MonkeyPatch) -> Network:
    """A network on which each message takes ten microseconds, as on one machine."""
    network = Network("even", (10.0,) * 8)
    monkeypatch.setattr(agreement_at_scale, "LOOPBACK", network)
    return network


def test_votes_take_as_many_messages_as_they_wait_for(ten_us: Network) -> None:
    links = Links(ten_us, 8, n_votes=3)
    call, message, wake = 28.0, 5.0, 6.0
    assert to_all(2, links) == pytest.approx([call + 10 + 4 * message + 10 + wake] * 3)
    assert to_all(64, links) == pytest.approx([call + 10 + 4 * 63 * message + 10 + wake] * 3)
    assert in_pairs(64, links) == pytest.approx([call + 6 * (2 * message + 10 + 10 + wake)] * 3)
    # A segment goes round twice, and waits for the ones before it.
    hops = [2 * (size - 1) for size in (64, 128)]
    shorter, longer = (around_a_ring(size, links)[0] for size in (64, 128))
    assert shorter > call + hops[0] * (10 + wake)
    assert longer - shorter == pytest.approx((hops[1] - hops[0]) * (shorter - call) / hops[0], rel=0.1)


def test_votes_are_hidden_until_host_and_vote_take_longer_than_the_device() -> None:
    hosts = Hosts(8, late_share=0.0, n_steps=100)
    votes = np.array([[1000.0], [2000.0], [4000.0]])
    added = hosts.added_percent(votes, 1)
    assert added == pytest.approx([0, 8, 108], abs=1)  # a host works 150 us, the slowest a little more
    assert hosts.added_percent(votes, 1, ahead=0) == pytest.approx([50, 100, 200], abs=1)
    assert hosts.added_percent(votes, 4) == pytest.approx([0, 0, 0], abs=1)
    late = Hosts(1024, late_share=0.01, n_steps=100)
    assert late.added_percent(votes[:1], 1)[0] > 50  # each waits for the latest of all


def test_agreement_at_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = [tmp_path / "votes.png", tmp_path / "votes.json"]
    sizes = ["--sizes", "2", "128", "--steps", "60"]
    agreement_at_scale.main([*sizes, "--figure", str(written[0]), "--json", str(written[1])])
    said = capsys.readouterr().out.splitlines()
    assert said[1].count("|") == said[2].count("|") == 8
    assert f"{agreement_at_scale.ALL}: more than 1 % at 128" in said
    assert "128 processes know of one that was killed after 3.04 s" in said
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(written[1].read_text())) == 2 * 4 * 4


@pytest.mark.long
def test_collectives_of_gloo_here() -> None:
    lines = [*agreement_at_scale.here([2])]
    assert [line.rpartition(" ")[0].rpartition(": ")[0] for line in lines] == [
        f"2 processes here, {way}" for way in (agreement_at_scale.RING, agreement_at_scale.ALL)
    ]
