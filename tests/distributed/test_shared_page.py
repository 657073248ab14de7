"""The page that processes share: what they read from it, and in which order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_cudagraph.processes.shared_page import VALUE_BITS, SharedPage
from tests.distributed.forks import ROOT

EXCHANGES = 2_000


def test_every_exchange_gives_all_numbers_in_order() -> None:
    path = SharedPage.create(2)
    pages = [SharedPage(path, rank, 2) for rank in (0, 1)]
    os.unlink(path)
    for page in pages:  # the numbers have room for so many counts, and begin again in the middle
        page._count = (1 << (63 - VALUE_BITS)) - EXCHANGES // 2
    wrong: list[object] = []

    def meet(rank: int) -> None:
        for index in range(EXCHANGES):
            said = pages[rank].exchange(2 * index + rank, lambda: None)
            if said != [2 * index, 2 * index + 1]:
                wrong.append((rank, index, said))
                return

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_the_largest_number_is_read_whole() -> None:
    path = SharedPage.create(1)
    largest = (1 << VALUE_BITS) - 1
    assert SharedPage(path, 0, 1).exchange(largest, lambda: None) == [largest]
    os.unlink(path)


def test_who_waits_learns_that_another_has_left() -> None:
    path = SharedPage.create(2)
    SharedPage(path, 1, 2).leave(takes_back=True)
    assert SharedPage(path, 0, 2).exchange(1, lambda: None) is None
    os.unlink(path)


def test_who_comes_to_one_more_exchange_learns_that_another_has_ended() -> None:
    path = SharedPage.create(2)
    first, second = SharedPage(path, 0, 2), SharedPage(path, 1, 2)

    def comes_once() -> None:
        second.exchange(5, lambda: None)
        second.leave(takes_back=False)

    thread = threading.Thread(target=comes_once)
    thread.start()
    assert first.exchange(4, lambda: None) == [4, 5]  # read all the same
    thread.join()
    assert first.exchange(6, lambda: None) is None
    os.unlink(path)


def test_what_was_said_last_is_read_when_its_process_has_gone() -> None:
    """All who exchange come to the same, and may each end because of it."""
    path = SharedPage.create(2)
    first, second = SharedPage(path, 0, 2), SharedPage(path, 1, 2)
    first._rows[1][0] = 1 << VALUE_BITS | 4  # it has written, and reads later
    assert second.exchange(5, lambda: None) == [4, 5]
    second.leave(takes_back=False)
    assert first.exchange(4, lambda: None) == [4, 5]
    assert first.exchange(6, lambda: None) is None
    os.unlink(path)


def test_who_leaves_takes_back_what_it_has_said() -> None:
    """Who has not read it yet does not begin a step that the other one does not take part in."""
    path = SharedPage.create(2)
    first, second = SharedPage(path, 0, 2), SharedPage(path, 1, 2)
    first._rows[1][0] = 1 << VALUE_BITS | 4
    assert second.exchange(5, lambda: None) == [4, 5]
    second.leave(takes_back=True)
    assert first.exchange(4, lambda: None) is None
    os.unlink(path)


HOLDS_ITS_LOCK = """
import os, sys, time
from lightning_cudagraph.processes.shared_page import SharedPage
page = SharedPage(sys.argv[1], 1, 2)
if os.fork() == 0:
    time.sleep(60)
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_who_is_killed_is_gone_and_a_fork_of_it_does_not_stand_for_it() -> None:
    path = SharedPage.create(2)
    first = SharedPage(path, 0, 2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_ITS_LOCK, path],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    ) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"here\n"
            assert first.gone() == []
            other.kill()
            other.wait()
            assert first.gone() == [1]
            # That looks take no lock for good can be seen in the next one.
            assert first.gone() == [1]
        finally:
            os.killpg(other.pid, signal.SIGKILL)  # the fork
    os.unlink(path)


@pytest.mark.parametrize("takes_back", [False, True])
def test_who_has_said_that_it_leaves_is_not_gone(takes_back: bool) -> None:
    path = SharedPage.create(2)
    first, second = (SharedPage(path, rank, 2) for rank in range(2))
    assert first.gone() == [1]  # locks are between processes, and this is one
    second.leave(takes_back)
    assert first.gone() == []
    os.unlink(path)


def test_there_is_no_page_of_another_machine(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011
        SharedPage(str(tmp_path / "elsewhere"), 0, 2)
