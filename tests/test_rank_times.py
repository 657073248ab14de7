"""The times of processes side by side: who is slow, and that nobody waits for what does not come."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from lightning_cudagraph.timing.output.rank_tables import ranks_lines, ranks_text
from lightning_cudagraph.timing.readings import rank_times
from lightning_cudagraph.timing.readings.rank_times import RankRow, RankTable, RankTimes, part_times
from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.windows import Times
from lightning_cudagraph.timing.sinks.logged_medians import MediansWriter

# Marks: begin, backward begins, last gradients, last all-reduce done, backward ends, end; gap before; an
# all-reduce that begins and one that ends; the ends of a gather in the forward pass.
STEP = SpanLayout(
    (
        Span("step_ms/forward", "forward", ((0, 1),)),
        Span("step_ms/backward", "backward", ((1, 4),)),
        Span("step_ms/clipping", "optimizer", ((4, 5),)),
        Span("step_ms/optimizer", "optimizer", ((5, 6),)),
        Span("step_ms/total", "host", ((0, 6),)),
        Span("step_ms/all_reduce", "communication", ((8, 9), (9, 3))),
        Span(EXPOSED_TAG, "communication", ((2, 3),)),
        Span("step_ms/all_gather", "communication", ((10, 11),)),
        Span("layer_forward_ms/a", "forward", ((0, 1),)),
        Span("step_ms/gap", "host", ((7, 0),)),
    ),
    12,
)
OFFSETS_MS = [0.0, 1.0, 3.0, 3.5, 3.75, 4.0, 5.0, -0.5, 1.5, 2.5, 0.25, 0.5]
# Behind something else than a step there is no gap.
FIRST = SpanLayout(STEP.spans[:-1], 12)


def reading(step: int, scale: float = 1.0, layout: SpanLayout = STEP) -> Reading:
    return Reading(layout, step, 1e9, [scale * offset_ms for offset_ms in OFFSETS_MS])


def row(rank: int, host: str = "node0", wait_ms: float = 0.5, **parts_ms: float) -> RankRow:
    """A process whose steps take just these times."""
    parts_ms = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "gap": 0.5} | parts_ms
    work_ms = sum(parts_ms.values())
    parts_ms |= {"work": work_ms, "wait": wait_ms, "step": work_ms + wait_ms}
    return RankRow(
        rank, host, 0, 9, 10, {p: Times(10, ms, ms, ms, ms, ms, 0.0) for p, ms in parts_ms.items()}
    )


def test_the_parts_of_a_step() -> None:
    parts = part_times([reading(step) for step in range(5)])
    assert {part: usual.p50_ms for part, usual in parts.items()} == pytest.approx(
        {
            "step": 5.5,
            "wait": 0.75,
            "work": 4.75,
            "forward": 1.0,
            "backward": 2.25,
            "optimizer": 1.25,
            "gap": 0.5,
            "all_reduce": 2.0,
        }
    )
    assert list(parts)[:3] == ["step", "work", "wait"]


def test_means_and_percentiles_are_over_steps() -> None:
    work = part_times([reading(step, scale=1.0 + step) for step in range(101)])["work"]
    assert work.p50_ms == pytest.approx(51 * 4.75)
    assert work.p95_ms == pytest.approx(96 * 4.75)
    assert work.mean_ms == pytest.approx(51 * 4.75)


def test_steps_without_a_gap_are_not_compared_with_others() -> None:
    parts = part_times([reading(0, 100.0, FIRST), reading(1), reading(2)])
    assert parts["step"].mean_ms == pytest.approx(5.5)
    assert parts["forward"].mean_ms == pytest.approx(34.0)
    alone = part_times([reading(0, 1.0, FIRST), reading(1, 1.0, FIRST)])
    assert alone["step"].mean_ms == pytest.approx(5.0)


def test_the_slowest_has_the_most_work_of_its_own() -> None:
    table = RankTable((row(0, wait_ms=0.9), row(1, wait_ms=0.8), row(2, wait_ms=0.3, forward=1.6)))
    assert table.slowest.rank == 2
    assert table.scalars == pytest.approx(
        {
            "ranks_ms/step": 4.9,
            "ranks_ms/work_slowest": 4.6,
            "ranks_ms/work_median": 4.0,
            "ranks_ms/work_fastest": 4.0,
            "ranks_ms/work_spread": 0.6,
            "ranks_ms/wait_least": 0.3,
            "ranks_ms/wait_most": 0.9,
            "ranks/slowest": 2.0,
        }
    )
    first, second = ranks_lines(table)
    assert first == (
        "rank 2 is slowest: 4.600 ms of its own in a step of 4.900 ms, median rank 4.000 ms;"
        " it waits least for others, 0.300 ms, median rank 0.800 ms"
    )
    assert second == "most of the difference is in its forward pass: 1.600 ms, rank 0 1.000 ms"


def test_one_that_the_host_holds_up() -> None:
    table = RankTable((row(0, "a", wait_ms=0.1, gap=1.4), row(1, "b", wait_ms=1.0)))
    first, second = ranks_lines(table)
    assert first.startswith("rank 0 (a) is slowest: 4.900 ms of its own")
    assert "rank 1 4.000 ms; it waits least for others, 0.100 ms, rank 1 1.000 ms" in first
    assert second == (
        "most of the difference is between its steps, where the device waits for the host (batches,"
        " hooks, loggers): 1.400 ms, rank 1 0.500 ms"
    )


def test_processes_that_are_as_fast() -> None:
    table = RankTable((row(0), row(1, wait_ms=0.45, forward=1.05)))
    (line,) = ranks_lines(table)
    assert line == (
        "all 2 are as fast: 4.000 to 4.050 ms of their own in a step of 4.500 ms, and 0.450 to 0.500 ms"
        " of waiting for one another"
    )


def test_a_difference_in_many_places_is_not_put_in_one() -> None:
    slow = row(1, wait_ms=0.1, forward=1.1, backward=2.1, optimizer=0.6, gap=0.6)
    assert len(ranks_lines(RankTable((row(0), slow)))) == 1


def test_the_table() -> None:
    text = ranks_text(RankTable((row(0, "node0"), row(1, "node1", wait_ms=0.1, gap=0.9))))
    lines = text.splitlines()
    assert lines[0] == "2 processes, 10 timed steps, 0 to 9"
    header, slow, fast = (line.split() for line in lines[5:8])
    assert header[:2] == ["rank", "host"]
    assert header[-4:] == ["forward", "backward", "optimizer", "gap"]
    assert slow == [
        "1",
        "node1",
        "4.400",
        "4.400",
        "4.400",
        "0.100",
        "4.500",
        "1.000",
        "2.000",
        "0.500",
        "0.900",
    ]
    assert fast[:2] == ["0", "node0"]
    on_one_host = ranks_text(RankTable((row(0), row(1))))
    assert "host" not in on_one_host.splitlines()[4].split()


def test_a_table_of_many() -> None:
    rows = tuple(row(rank, gap=0.5 + 0.001 * rank) for rank in range(1000))
    lines = ranks_text(RankTable(rows)).splitlines()
    assert len(lines) < 45
    assert any(line.startswith("... and 968 more") for line in lines)
    assert [line.split()[0] for line in lines if line.strip()[:1].isdigit()][1:4] == [
        "999",
        "998",
        "997",
    ]


class Rank:
    """A process of several in this one, which share a store."""

    def __init__(self, store: object, rank: int, size: int = 2, window: int = 10) -> None:
        self.tables: list[RankTable] = []
        self.times = RankTimes(store, rank, size, window, self.tables.append)  # type: ignore[arg-type]

    def steps(self, numbers: Sequence[int], scale: float = 1.0) -> None:
        for step in numbers:
            self.times.add(reading(step, scale))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_times, "_LAST_WORD_S", 0.1)


@pytest.mark.parametrize("kind", ["memory", "sockets", "file"])
def test_windows_are_shown_when_all_have_come_by(impatient: None, tmp_path: Path, kind: str) -> None:
    own = {
        "memory": HashStore,
        "sockets": lambda: TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
    }[kind]()
    store = PrefixStore("times/1", own)
    first, second = Rank(store, 0), Rank(store, 1)
    first.steps(range(3, 12))
    assert first.tables == []  # the other one is not as far
    second.steps(range(3, 14), 1.5)
    first.times.pause()
    assert first.tables == []  # the other one has had no pause
    second.times.pause()
    first.times.pause()
    (table,) = first.tables
    assert [(r.rank, r.first_step, r.last_step, r.n_steps) for r in table.rows] == [
        (0, 3, 9, 7),
        (1, 3, 9, 7),
    ]
    assert table.slowest.rank == 1
    first.steps(range(12, 21))
    second.steps(range(14, 21), 1.5)
    assert len(first.tables) == 1  # windows end where a later step comes in
    first.steps(range(21, 31))
    assert len(first.tables) == 1  # on the path of steps nothing is sent
    for rank in (second, first):
        rank.times.pause()
    assert [table.rows[0].first_step for table in first.tables] == [3, 10]
    second.steps(range(21, 33), 1.5)
    second.times.finish()
    last = first.times.finish()
    # Three windows more; the last has too few steps to say more than the one before it.
    assert [table.rows[0].first_step for table in first.tables] == [3, 10, 20, 30]
    assert last is first.tables[2]
    assert second.tables == []
    assert not any(store.check([f"{window}/{rank}"]) for window in range(4) for rank in (0, 1))


def test_who_does_not_come_is_not_waited_for(impatient: None) -> None:
    store = HashStore()
    first, second = Rank(store, 0), Rank(store, 1)
    second.steps(range(5))  # and ends, by an error
    first.steps(range(8))
    started_s = time.monotonic()
    assert first.times.finish() is None
    assert time.monotonic() - started_s < 3.0
    assert first.tables == []
    assert first.times.trouble.startswith("not all have sent theirs")


def test_a_window_that_one_lacks_does_not_hold_up_the_next(impatient: None) -> None:
    """It was eager there, or had no steps that are timed."""
    store = HashStore()
    first, second = Rank(store, 0), Rank(store, 1)
    first.steps(range(40))
    second.steps([*range(10), *range(20, 40)])
    second.times.pause()
    first.times.pause()
    second.times.finish()
    assert first.times.finish() is not None
    assert [table.rows[0].first_step for table in first.tables] == [0, 20, 30]


def test_a_store_that_is_gone_ends_it() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    rank = Rank(Gone(), 0)
    rank.steps(range(25))
    rank.times.pause()
    assert rank.times.finish() is None
    assert rank.times.trouble == "RuntimeError: Connection reset by peer"


def test_what_is_left_in_the_store_is_plain_text() -> None:
    store = HashStore()
    rank = Rank(store, 1)
    rank.steps(range(11))
    rank.times.pause()
    found = json.loads(store.get("0/1"))
    assert found["rank"] == 1
    assert found["parts"]["work"]["p50_ms"] == pytest.approx(4.75)


def test_other_loggers_get_the_numbers_with_the_next_window() -> None:
    class Logger:
        def __init__(self) -> None:
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, metrics))

    logger = Logger()
    writer = MediansWriter([logger], 2, lambda: 7)
    writer.add_beside({"ranks_ms/step": 2.0, "ranks/slowest": 1.0})
    writer.pause()
    assert logger.rows == []
    writer.add(reading(5))
    writer.add(reading(6))
    writer.pause()
    ((step, values),) = logger.rows
    assert step == 7
    assert values["ranks_ms/step"] == 2.0
    assert values["step_ms/forward"] == 1.0
    writer.add_beside({"ranks_ms/step": 3.0})
    writer.close()
    assert logger.rows[1:] == [(7, {"ranks_ms/step": 3.0})]
