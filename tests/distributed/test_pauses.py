"""How processes that do not meet end together, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_cudagraph.errors import PeerError
from lightning_cudagraph.processes import failures
from lightning_cudagraph.processes.peers import Peers, Vote
from lightning_cudagraph.processes.shared_page import VALUE_BITS, SharedPage

LIMIT_S = 30.0


VOTE = Vote(0)


@contextlib.contextmanager
def _made(size: int) -> Iterator[tuple[Peers, ...]]:
    """As many processes, as far as they know."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        all_of_them = tuple(Peers() for _ in range(size))
        for rank, ranks in enumerate(all_of_them):
            ranks.rank, ranks.size, ranks._store = rank, size, all_of_them[0]._store
            failures = ranks._failures
            failures._store, failures._rank, failures._size = ranks._store, rank, size
        yield all_of_them
        for ranks in reversed(all_of_them):  # the one with the store waits for the others
            ranks.close()
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def waits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the store waits for others to read, which here are in the same thread."""
    monkeypatch.setattr(failures, "_READ_TIMEOUT_S", 0.1)


@pytest.fixture
def two() -> Iterator[tuple[Peers, ...]]:
    with _made(2) as ranks:
        yield ranks


@pytest.fixture
def three() -> Iterator[tuple[Peers, ...]]:
    with _made(3) as ranks:
        yield ranks


def test_all_end_once_all_want_to(two: tuple[Peers, ...]) -> None:
    first, second = two
    assert not first.pause("here", 1, False)
    assert not second.pause("", 1, False)
    assert not second.pause("here", 2, False)
    assert not first.pause("here", 2, False)
    assert first.pause("here", 3, False)
    assert second.pause("here", 3, False)
    assert not first.pause("there", 4, False)


def test_nobody_is_left_alone_in_a_batch(two: tuple[Peers, ...]) -> None:
    """Whose key was there first has begun the next batch, in which it may need the other one."""
    first, second = two
    assert not first.pause("here", 5, False)
    assert not second.pause("here", 5, False)
    assert first.pause("here", 6, False)
    assert second.pause("here", 6, False)


def test_who_is_ahead_is_not_asked_to_go_back(two: tuple[Peers, ...]) -> None:
    first, second = two
    assert not first.pause("here", 7, False)
    assert not first.pause("here", 8, False)
    assert not second.pause("here", 3, False)
    assert first.pause("here", 9, False)
    assert not second.pause("here", 4, False)
    assert second.pause("here", 5, True)  # it has no more


@pytest.mark.parametrize("is_last", [False, True])
def test_who_leaves_first_decides(two: tuple[Peers, ...], is_last: bool) -> None:
    first, second = two
    assert not first.pause("here", 1, True)
    assert not second.pause("here", 1, False)
    assert not second.pause("here", 2, is_last)
    # He may see it in his last look.
    assert not first.pause("there", 1, False)
    assert second.pause("there", 1, is_last) == is_last
    assert first.pause("there", 2, True)


class Gone:
    """What is left of a store with the process that had it."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_is_no_failure(two: tuple[Peers, ...]) -> None:
    first, _ = two
    first._store = first._failures._store = Gone()
    assert not first.pause("", 1, False)
    assert not first.pause("here", 2, False)
    assert not first.pause("here", 3, True)


def test_who_is_to_end_ends_when_the_store_has_come_to_its_end(two: tuple[Peers, ...]) -> None:
    """Its process was behind the batch first that all were to end behind."""
    first, second = two
    assert not first.pause("here", 1, False)
    assert not second.pause("here", 1, False)
    assert first.pause("here", 2, False)
    first.close()
    second._failures.look()  # as its thread does, which the other one waits for
    second._store = second._failures._store = Gone()
    assert second.pause("here", 2, False)
    assert second.pause("here", 3, False)


def _share_a_page(all_of_them: tuple[Peers, ...], are_here: bool = True) -> None:
    size = len(all_of_them)
    path = SharedPage.create(size)
    for rank, ranks in enumerate(all_of_them):
        ranks._page = ranks._failures.page = SharedPage(path, rank, size)
        if are_here:  # there are no locks between parts of one process
            ranks._page.gone = list  # type: ignore[assignment, method-assign]
        ranks._timeout_s = LIMIT_S
    os.unlink(path)


def test_who_fails_has_not_come_to_its_end(two: tuple[Peers, ...]) -> None:
    """However late the other one looks: a process that fails closes what it has as any other does."""
    first, second = two
    second.fail(ValueError("no more cheese"))
    second.close()
    with pytest.raises(PeerError, match=r"failed.*rank 1: ValueError: no more cheese"):
        first.pause("here", 1, False)


@pytest.mark.parametrize("error", [ValueError("no more cheese"), PeerError("it has left")], ids=repr)
def test_who_fails_has_not_come_to_its_end_on_a_page(two: tuple[Peers, ...], error: Exception) -> None:
    _share_a_page(two)
    first, second = two
    second.fail(error)
    second.close()
    with pytest.raises(PeerError, match="Another process of the run has failed"):
        first.vote(VOTE)


class LostGroup:
    """A group over sockets, of which a process is missing."""

    def alltoall_base(self, *_: object) -> None:
        raise RuntimeError("Connection closed by peer")


@contextlib.contextmanager
def _votes(all_of_them: tuple[Peers, ...], page: bool) -> Iterator[None]:
    """All vote on a page, or the first one over sockets whose other end is lost."""
    first = all_of_them[0]
    if page:
        _share_a_page(all_of_them)
    else:
        first._group = LostGroup()
    try:
        yield
    finally:
        first._group = None


@pytest.mark.parametrize("page", [False, True])
def test_who_closes_without_an_error_has_come_to_its_end(two: tuple[Peers, ...], page: bool) -> None:
    first, second = two
    with _votes(two, page):
        second.close()
        with pytest.raises(PeerError, match="Another process has come to its end"):
            first.vote(VOTE)


@pytest.mark.parametrize("page", [False, True])
def test_who_has_ended_hides_nobody_who_has_failed(three: tuple[Peers, ...], page: bool) -> None:
    first, second, third = three
    with _votes(three, page):
        second.close()
        third.fail(ValueError("no more cheese"))
        third.close()
        with pytest.raises(PeerError, match=r"failed.*rank 2: ValueError: no more cheese"):
            first.vote(VOTE)


def test_who_waits_in_vain_takes_back_what_it_has_said(two: tuple[Peers, ...]) -> None:
    """Whoever comes late does not go on alone, and learns why."""
    _share_a_page(two)
    first, second = two
    second._timeout_s = 0.0
    with pytest.raises(PeerError, match="has not come to this batch") as raised:
        second.vote(VOTE)
    second.fail(raised.value)
    second.close()
    with pytest.raises(PeerError, match=r"rank 1: PeerError: Another process has not come to this"):
        first.vote(VOTE)


def test_who_is_not_waited_for_any_more_at_the_start_learns_it(two: tuple[Peers, ...]) -> None:
    first, second = two
    with pytest.raises(PeerError, match="Rank 0 did not come to the start") as raised:
        second.gather_within("ready", timeout_s=0.01)
    second.fail(raised.value)
    second.close()
    assert first.gather_within("ready") == ["ready", "ready"]
    with pytest.raises(PeerError, match="rank 1: PeerError: Rank 0 did not come to the start"):
        first.gather_within("go", timeout_s=1)


def test_what_all_come_to_is_not_taken_back(two: tuple[Peers, ...]) -> None:
    """All have read the same, or will, and end because of it."""
    _share_a_page(two)
    first, second = two
    count = 1 << VALUE_BITS
    assert first._page is not None
    assert second._page is not None
    first._page._rows[1, 0] = count  # it has written, and reads later
    second.vote(VOTE)
    second.fail(PeerError("Batch 0 is the last one in some processes"))
    second.close()
    assert first.vote(VOTE) == (VOTE, VOTE)
    with pytest.raises(PeerError, match="has left"):
        first.vote(VOTE)


def test_what_another_has_told_is_not_told_again(three: tuple[Peers, ...]) -> None:
    """A third process may still read what this one has said before the other one failed."""
    _share_a_page(three)
    first, second, third = three
    third.fail(ValueError("no more cheese"))
    with pytest.raises(PeerError) as raised:
        second.vote(VOTE)
    second.fail(raised.value)
    assert second._page is not None
    assert second._page._rows[1, 1] == 1 << VALUE_BITS
    third.close()
    second.close()
    with pytest.raises(PeerError, match="rank 2: ValueError: no more cheese"):
        first.vote(VOTE)


def test_who_waits_learns_that_another_is_gone(two: tuple[Peers, ...]) -> None:
    _share_a_page(two, are_here=False)
    first, second = two
    with pytest.raises(PeerError, match="rank 1 is gone without a word") as raised:
        first.vote(VOTE)
    first.fail(raised.value)
    first.close()
    with pytest.raises(PeerError, match="rank 0: PeerError: The process with rank 1 is gone"):
        second.vote(VOTE)


def test_who_exchanges_objects_learns_that_another_is_gone(two: tuple[Peers, ...]) -> None:
    _share_a_page(two, are_here=False)
    first, _ = two
    with pytest.raises(PeerError, match="rank 1 is gone without a word"):
        first.gather_within("captured", timeout_s=LIMIT_S)


def test_there_is_no_page_where_locks_do_not_tell_who_is_there(two: tuple[Peers, ...]) -> None:
    """Two in one process hold no lock against each other: each would miss the other."""
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(Peers._shared_page, two)] == [None, None]
