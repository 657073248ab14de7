"""However a run ends in one process, all processes end, in seconds, with a reason."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import Process, assert_all_ok, launch, told

# Less than this after one process has met its end.
ALL_ENDED_S = 30.0
BEGUN_S = 240.0
FOR_EVER = "trains_for_ever"
AND_READS = "trains_for_ever_and_reads"
IN_A_CAPTURE = ("an_error_in_a_capture_on_rank_1", "an_error_in_a_capture_on_rank_1_eager")

# Of what is the same for both ranks or in both ways of exchange, the default run takes one.
long = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        "an_error_in_a_step_on_rank_0",
        pytest.param("an_error_in_a_step_on_rank_1", marks=long),
        pytest.param(IN_A_CAPTURE[0], marks=long),
        pytest.param(IN_A_CAPTURE[1], marks=long),
        pytest.param("an_error_behind_a_signal", marks=long),
    ],
)
def test_an_error_in_a_step_of_one_process_ends_all(tmp_path: Path, accelerator: str, case: str) -> None:
    ended = launch(tmp_path, [case], accelerator, timeout_s=BEGUN_S)
    # Behind a signal, the host of the other one can be through with the last step, which waits on the
    # GPU. It ends as the signal asked: Lightning's exception for it ends Python as `sys.exit()` does.
    through = accelerator == "gpu" and case == "an_error_behind_a_signal"
    rank = 0 if case.endswith("rank_0") else 1
    other = ended[1 - rank]
    assert other.status in ((0, 1) if through else (1,)), ended
    assert ended[rank].status == 1, ended
    assert "ValueError: no more cheese" in ended[rank].cases[case]
    # In a collective of the step, the connection is what it misses; then the reason is told beside it.
    heard = other.cases.get(case, "") + other.said
    assert f"rank {rank}: ValueError: no more cheese" in heard, other
    if case in IN_A_CAPTURE:
        assert "ValueError in the capture: no more cheese" in ended[rank].said, ended[rank]
    apart_s = abs(ended[0].ended_s - ended[1].ended_s)
    assert apart_s < ALL_ENDED_S, apart_s


def test_a_failed_check_of_one_process_ends_all(tmp_path: Path, accelerator: str) -> None:
    case = "a_failed_check_on_rank_1"
    ended = launch(tmp_path, [case], accelerator, timeout_s=BEGUN_S)
    assert [process.status for process in ended] == [1, 1], told(ended)
    assert re.search(r"CheckError: In replay \d+ \(.*`self.global_step` 18\)", ended[1].cases[case])
    assert "rank 1: CheckError: In replay" in ended[0].cases[case] + ended[0].said, told(ended)


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=long), 1])
def test_an_error_before_training_in_one_process_ends_all(
    tmp_path: Path, accelerator: str, rank: int
) -> None:
    case = f"an_error_before_training_on_rank_{rank}"
    ended = launch(tmp_path, [case], accelerator, timeout_s=BEGUN_S)
    assert [process.status for process in ended] == [1, 1], told(ended)
    assert "ValueError: no more cheese" in ended[rank].cases[case]
    # In a barrier of Lightning's, the connection is what it misses; then the reason is told beside it.
    other = ended[1 - rank]
    assert f"rank {rank}: ValueError: no more cheese" in other.cases[case] + other.said, other
    assert abs(ended[0].ended_s - ended[1].ended_s) < ALL_ENDED_S


@pytest.mark.parametrize(
    ("rank", "where"),
    [pytest.param(0, "", marks=long), (1, ""), pytest.param(1, "_over_sockets", marks=long)],
)
def test_an_error_in_one_process_ends_all(
    tmp_path: Path, accelerator: str, rank: int, where: str
) -> None:
    case = f"an_error_on_rank_{rank}{where}"
    ended = launch(tmp_path, [case], accelerator, timeout_s=BEGUN_S)
    assert [process.status for process in ended] == [1, 1], told(ended)
    assert "ValueError: no more cheese" in ended[rank].cases[case]
    other = ended[1 - rank]
    assert "PeerError: Another process of the run has failed" in other.cases[case], other.said[-2000:]
    assert f"rank {rank}: ValueError: no more cheese" in other.cases[case], other.cases
    apart_s = abs(ended[0].ended_s - ended[1].ended_s)
    assert apart_s < ALL_ENDED_S, apart_s


@long
def test_all_learn_why_where_the_one_with_the_store_ends_at_once(tmp_path: Path) -> None:
    case = "an_error_on_rank_1_of_three"
    ended = launch(tmp_path, [case], "cpu", timeout_s=BEGUN_S, size=3)
    assert [process.status for process in ended] == [1, 1, 1], ended
    for rank in (0, 2):
        assert "rank 1: ValueError: no more cheese" in ended[rank].cases[case], ended[rank]


@pytest.mark.parametrize("where", ["", pytest.param("_over_sockets", marks=long)])
def test_a_process_that_is_killed_ends_all(tmp_path: Path, accelerator: str, where: str) -> None:
    case = f"killed_on_rank_1{where}"
    ended = launch(tmp_path, [case], accelerator, timeout_s=BEGUN_S)
    assert [process.status for process in ended] == [1, -signal.SIGKILL], ended
    heard = ended[0].cases.get(case, "") + ended[0].said
    reason = "the connection to it was lost" if where else "The process with rank 1 is gone without a"
    assert reason in heard, ended[0]


@long  # a shorter loader in one process: test_together.py
@pytest.mark.parametrize("where", ["on_rank_0", "on_rank_1_over_sockets", "on_rank_1"])
def test_who_has_more_to_do_than_the_others_ends(tmp_path: Path, accelerator: str, where: str) -> None:
    cases = [f"fewer_epochs_{where}"]
    assert_all_ok(launch(tmp_path, cases, accelerator, timeout_s=BEGUN_S), cases)


def _sender(
    number: int, ranks: tuple[int, ...], case: str = FOR_EVER
) -> Callable[[Path, list[Process]], None]:
    """What sends a signal to some processes once all have begun to replay."""

    def send(folder: Path, processes: list[Process]) -> None:
        deadline_s = time.monotonic() + BEGUN_S
        while not all((folder / case / f"begun{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline_s, (folder / "said0.txt").read_text()[-2000:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(timeout=0.1)
        for rank in ranks:
            processes[rank].send_signal(number)

    return send


@long  # signals in evaluations: test_together.py
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=str)
def test_a_signal_ends_all_behind_the_same_batch(
    tmp_path: Path, accelerator: str, ranks: tuple[int, ...]
) -> None:
    act = _sender(signal.SIGTERM, ranks)
    ended = launch(
        tmp_path, [FOR_EVER], accelerator, ALL_ENDED_S, act=act, limit_s=BEGUN_S + ALL_ENDED_S
    )
    # Lightning's exception for the signal ends Python as `sys.exit()` does.
    assert [process.status for process in ended] == [0, 0], told(ended)
    notes = {(tmp_path / FOR_EVER / f"ended{rank}").read_text() for rank in (0, 1)}
    assert len(notes) == 1, notes
    assert notes.pop().startswith("SIGTERMException after ")
    assert "Received SIGTERM: 15" in ended[ranks[0]].said


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (FOR_EVER, (1,)),
        *(pytest.param(FOR_EVER, ranks, marks=long) for ranks in ((0,), (0, 1))),
        *(pytest.param(AND_READS, ranks, marks=long) for ranks in ((0,), (1,))),
    ],
    ids=str,
)
def test_ctrl_c_ends_all(tmp_path: Path, accelerator: str, case: str, ranks: tuple[int, ...]) -> None:
    act = _sender(signal.SIGINT, ranks, case)
    ended = launch(tmp_path, [case], accelerator, ALL_ENDED_S, act=act, limit_s=BEGUN_S + ALL_ENDED_S)
    assert [process.status for process in ended] == [1, 1], told(ended)
    for rank, process in enumerate(ended):
        note = (tmp_path / case / f"ended{rank}").read_text()
        # In a collective, the connection is what it misses; then the reason is told beside it.
        heard = note + process.cases.get(case, "") + process.said
        if ranks == (rank,):
            assert note.startswith("KeyboardInterrupt after "), note
            assert "KeyboardInterrupt" in heard, process
        elif rank in ranks:  # or that of the other one, which was faster
            assert "KeyboardInterrupt" in heard, process
        else:
            assert f"rank {ranks[0]}: KeyboardInterrupt" in heard, process
