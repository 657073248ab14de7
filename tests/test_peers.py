"""The comparison with peers: known steps and traces in, known limits out; rows on whatever there is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main
from benchmarks.between_replays import TracedBatches, rows_of
from benchmarks.fits import Blocks
from benchmarks.goals import RATIOS, goal_of
from benchmarks.limits import Limits, Op, OpLog, limits_of, longest_chain_us
from benchmarks.models import CRITICS, WORKLOADS, Workload
from benchmarks.peers import (
    BY_HAND,
    COMPILED,
    DATA_FLOW,
    DEFAULTS,
    EAGER,
    GRAPHED_CALLABLES,
    ONE_STREAM,
    PEERS,
    REPLAYS,
    Outcome,
    Peer,
)
from benchmarks.picture import draw
from benchmarks.rows import Cell, Row, Table, measure_row
from benchmarks.tables import markdown
from tests.test_benchmarks import KERNELS_US, MARKS, Trace, capture_trace, replay_trace

BLOCKS = Blocks(warm_steps=8, lead_steps=1, steps=2, rounds=2)
# Enough for a capture on any number of streams.
LONG_BLOCKS = Blocks(warm_steps=60, lead_steps=1, steps=2, rounds=2)
# The MLP drops out, so that its weights also depend on whose random numbers are whose.
MLP = next(workload for workload in WORKLOADS if workload.name == "MLP")


def peers(*names: str) -> list[Peer]:
    return [peer for peer in PEERS if peer.name in names]


def op(reads: Sequence[int], writes: Sequence[int]) -> Op:
    return Op(frozenset(reads), frozenset(writes))


@pytest.mark.parametrize(
    ("ops", "expected_us"),
    [
        pytest.param([op([0], [1]), op([1], [2]), op([2], [3])], 7.0, id="a chain"),
        pytest.param([op([0], [1]), op([0], [2]), op([0], [3])], 4.0, id="side by side"),
        pytest.param([op([0], [1]), op([0], [2]), op([1, 2], [3])], 6.0, id="a join"),
        pytest.param([op([0], [1]), op([2], [0]), op([3], [4])], 4.0, id="a write waits for reads"),
        pytest.param([op([0], [9]), op([1], [9]), op([], [])], 4.0, id="a write waits for writes"),
        pytest.param([op([0], [1]), op([0], [2]), op([3], [0])], 6.0, id="a write waits for all reads"),
    ],
)
def test_the_longest_chain(ops: list[Op], expected_us: float) -> None:
    times_us = [1.0, 2.0, 4.0]
    assert longest_chain_us(ops, times_us) == expected_us


def launched_us(log: OpLog) -> list[float]:
    """A time for each op: views launch nothing, and the others all take as long."""
    return [1.0 if each.writes else 0.0 for each in log.ops]


def test_a_log_knows_which_op_waits_for_which() -> None:
    x = torch.randn(4, 8)
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    with OpLog(lambda: None) as alone:
        one(x).square().sum().backward()
    with OpLog(lambda: None) as both:
        (one(x).square().sum() + other(x).square().sum()).backward()
    # The branches know nothing of one another, forward and backward; there is one sum between them.
    assert sum(launched_us(both)) >= 1.7 * sum(launched_us(alone))
    chains_us = [longest_chain_us(log.ops, launched_us(log)) for log in (alone, both)]
    assert chains_us[0] >= 5
    # One's gradients are added to what is there.
    assert chains_us[1] <= chains_us[0] + 2
    with OpLog(lambda: None) as chain:
        for _ in range(5):
            x = x.t().add(1.0)
            x.mul_(2.0)
    assert longest_chain_us(chain.ops, launched_us(chain)) == sum(launched_us(chain)) == 10


def test_running_statistics_are_written() -> None:
    norm = nn.BatchNorm1d(4)
    assert norm.running_mean is not None
    mean = norm.running_mean
    with torch.no_grad(), OpLog(lambda: None) as log:
        norm(torch.randn(3, 4))
        mean + 1.0
    # What reads them waits for the norm.
    assert longest_chain_us(log.ops[-2:], [1.0, 1.0]) == 2.0


def test_limits_come_from_traces() -> None:
    capture = Trace([event for event in capture_trace() if event["ts"] < 20_000])
    # Four marks: the first op has one kernel, the next two, the next two, the last none.
    side_by_side = [op([0], [number]) for number in range(1, 5)]
    limits = limits_of(side_by_side, capture, Trace(replay_trace(3)))
    assert MARKS == (0, 1, 3, 5)
    assert limits == Limits(sum(KERNELS_US), max(10.0, 30.0 + 25.0, 5.0 + 40.0), 5, 4)
    chain = [op([number], [number + 1]) for number in range(4)]
    assert limits_of(chain, capture, Trace(replay_trace(3))).chain_us == sum(KERNELS_US)
    with pytest.raises(RuntimeError, match=r"has marks \[4\] for 1 ops"):
        limits_of(side_by_side[:1], capture, Trace(replay_trace(3)))
    with pytest.raises(RuntimeError, match="not those of 0 replays"):
        limits_of(side_by_side, capture, Trace([]))


def test_what_lies_between_replays() -> None:
    between = Trace(replay_trace(3)).between_replays()
    # A step begins every 1000 us with a copy that ends after 25, and its kernels run from 40 to 154.
    assert [(each.total_us, len(each.activities)) for each in between] == [(886.0, 1), (886.0, 1)]
    assert [each.idle_us for each in between] == [881.0, 881.0]
    rows = rows_of("GPT", between, Counter({"cudaGraphLaunch": 3}))
    assert rows == [
        "| GPT | from replay to replay | | 886.0 |",
        "| | of that idle | | 881.0 |",
        "| | Memcpy HtoD | 1.00 | 5.0 |",
        "| | host: cudaGraphLaunch | 1.50 | |",
    ]
    assert rows_of("GPT", [], Counter()) == ["| GPT | no replays | | |"]


# of torch: the profiler profiles a second time in one process
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_steps_in_the_middle_are_traced(accelerator: str) -> None:
    batches = TracedBatches(MLP, tiny=True, warm_steps=8, traced_steps=4)
    peers(ONE_STREAM)[0].fit(MLP, True, batches)  # type: ignore[arg-type]
    assert len(batches.trace.between_replays()) == (3 if accelerator == "gpu" else 0)


# of torch: `make_graphed_callables` captures on a stream of its own, and the profiler profiles twice
@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream does not match", "ignore:Warning. Profiler clears events"
)
def test_a_row(accelerator: str) -> None:
    chosen = peers(EAGER, GRAPHED_CALLABLES, BY_HAND, ONE_STREAM, DATA_FLOW, DEFAULTS, REPLAYS)
    row = measure_row(MLP, chosen, LONG_BLOCKS, tiny=True)
    for peer in chosen:
        cell = row.cells[peer.name]
        if peer.needs_gpu and accelerator == "cpu":
            assert (cell.failure, cell.unavailable) == ("needs a GPU", True)
            continue
        assert cell.failure is None, peer.name
        assert len(cell.step_us) == 2
        if peer.same_numbers:
            assert cell.equal is True, peer.name
            assert cell.furthest == 0.0
    assert row.cells[ONE_STREAM].report is not None
    assert (row.limits is not None) == (accelerator == "gpu"), row.limits_failure
    if row.limits is not None:
        assert 0 < row.limits.chain_us < row.limits.kernels_us


def test_a_peer_that_fails_leaves_the_others_alone() -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("no | such\nthing")

    def differ(workload: Workload, tiny: bool, batches: Any) -> Any:
        outcome = peers(EAGER)[0].fit(workload, tiny, batches)
        next(iter(outcome.weights.values())).view(-1)[0] += 0.25
        return outcome

    chosen = [
        *peers(EAGER),
        Peer("failing", fail),
        Peer("differing", differ, same_numbers=True, in_main_thread=True),
        *peers(ONE_STREAM),
    ]
    row = measure_row(CRITICS, chosen, BLOCKS, tiny=True)
    assert row.cells["failing"].failure == "ValueError: no / such"
    assert row.cells["failing"].is_wrong
    assert row.cells["differing"].furthest == pytest.approx(0.25)
    assert row.cells["differing"].is_wrong
    assert not row.cells[ONE_STREAM].is_wrong
    assert row.cells[ONE_STREAM].equal is True


REPORT = """lightning_cudagraph: CUDA graphs
  note      captured on 4 streams, 2.00 times as fast as on one (ms a replay, 1: 0.100, 4: 0.050)
  note      2 replay(s) verified against eager steps"""


def table() -> Table:
    cells = {
        EAGER: Cell([1000.0, 1100.0, 1050.0], 1.0),
        BY_HAND: Cell([100.0, 100.0, 100.0], 1.0, equal=True, furthest=0.0, must_be_equal=True),
        ONE_STREAM: Cell([105.0, 104.0, 106.0], 1.0, equal=True, memory_bytes=2**20),
        DATA_FLOW: Cell(
            [50.0, 52.0, 70.0], 2.0, equal=False, furthest=0.5, must_be_equal=True, report=REPORT
        ),
        COMPILED: Cell(failure="needs a GPU", unavailable=True),
        REPLAYS: Cell(failure="RuntimeError: no"),
    }
    rows = [
        Row("DLRM 128", "26 tables", cells, Limits(90.0, 30.0, 40, 35), took_s=3.0),
        Row("GPT", "6 layers", failure="its process ended with -11"),
    ]
    return Table({"device": "some GPU", "torch": "2"}, 25, 3, on_gpu=True, rows=rows)


def test_tables_say_all(tmp_path: Path) -> None:
    text = markdown(table())
    assert "device some GPU, torch 2; medians of 3 blocks of 25 steps" in text
    line = next(line for line in text.splitlines() if line.startswith("| DLRM 128 | 1050"))
    times = ["1050 (1025 to 1075)", "100 (100 to 100)", "105 (104 to 106)", "52 (51 to 61)"]
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [*times, "-", "failed"]
    data_flow, _, ours, *_ = RATIOS
    assert f"| {data_flow.name} | 0.500 (0.488 to 0.580) | ≤ 0.55 | met |" in text
    assert f"| {ours.name} | 1.050 (1.045 to 1.055) | ≤ 1.10 | met |" in text
    assert "| DLRM 128 | 40 | 90 | 30 | 3.00 |" in text
    assert "; callback, one stream |" in text
    assert "| callback, data flow (5.0e-01) **but must be** |" in text
    assert "| DLRM 128 | callback, one stream | 1.0 | 1.0 |" in text
    assert "- DLRM 128: captured on 4 streams, 2.00 times as fast as on one (ms a replay," in text
    assert "verified" not in text
    assert "- GPT: failed: its process ended with -11" in text
    assert "- DLRM 128, callback, compiled: not compared: needs a GPU" in text
    assert "- DLRM 128, replays alone: failed: RuntimeError: no" in text
    path = tmp_path / "table.json"
    table().write(path)
    assert markdown(Table.read(path)) == text
    draw(table(), tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_goals() -> None:
    data_flow, compiled, ours, *_ = RATIOS
    assert goal_of(data_flow, "DLRM 4096", 800.0) == 0.55
    assert goal_of(data_flow, "ResNet-18", 800.0) == 1.0
    assert goal_of(compiled, "MLP", 800.0) is None
    assert [goal_of(ours, "MLP", us) for us in (500.0, 200.0)] == [1.02, 1.10]
    eager = next(ratio for ratio in RATIOS if ratio.large and ratio.goals)
    assert eager.is_met(6.5, 6.0)
    assert not data_flow.is_met(0.56, 0.55)
    # Those of the models that there are, and of nothing else.
    starts = {start for ratio in RATIOS for start in ratio.goals}
    assert all(any(each.name.startswith(start) for each in WORKLOADS) for start in starts)


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    short = ["--tiny", "--steps", "2", "--rounds", "2", "--no-limits", "--peers", EAGER, ONE_STREAM]
    assert main([*short, "--models", "two critics", "--json", str(one)]) == 0
    assert main([*short, "--models", "DLRM 512", "actor-critic", "--json", str(other)]) == 0
    capsys.readouterr()
    assert main(["--read", str(one), str(other), "--figure", str(tmp_path / "all.svg")]) == 0
    said = capsys.readouterr().out
    assert all(f"\n| {model} | " in said for model in ("two critics", "DLRM 512", "actor-critic"))
    assert (tmp_path / "all.svg").exists()
    changed = json.loads(other.read_text()) | {"steps": 3}
    other.write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match="Not measured alike"):
        main(["--read", str(one), str(other)])


def test_the_names_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{peer.name}\n" in said for peer in PEERS)
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize("steady", [True, False])
def test_nobody_must_come_to_what_eager_lightning_does_not_come_to_twice(steady: bool) -> None:
    fits = iter(range(9))

    def eager(workload: Workload, tiny: bool, batches: Any) -> Outcome:
        list(batches)
        return Outcome({"weight": torch.tensor([0.0 if steady else float(next(fits))])})

    def other(workload: Workload, tiny: bool, batches: Any) -> Outcome:
        list(batches)
        return Outcome({"weight": torch.tensor([5.0])})

    ways = [Peer(EAGER, eager), Peer(BY_HAND, other, same_numbers=True)]
    row = measure_row(MLP, ways, BLOCKS, tiny=True)
    assert row.cells[BY_HAND].equal is False
    assert row.cells[BY_HAND].is_wrong == steady
    assert row.eager_again == (0.0 if steady else 1.0)
    text = markdown(Table({}, BLOCKS.steps, BLOCKS.rounds, rows=[row]))
    assert ("**but must be**" in text) == steady
    assert (f"{EAGER} itself, trained again, comes to others (1.0e+00)" in text) != steady
