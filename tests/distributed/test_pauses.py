"""How processes that do not meet end together, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_cudagraph.capture.processes.agreement import Intent
from lightning_cudagraph.capture.processes.board import Board
from lightning_cudagraph.capture.processes.ranks import Ranks
from lightning_cudagraph.errors import PeerError


@pytest.fixture
def two() -> Iterator[tuple[Ranks, Ranks]]:
    """Two processes, as far as they know."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        both = tuple(Ranks(lambda: (0, 0, 0), lambda lowest, highest: None) for _ in "ab")
        for rank, ranks in enumerate(both):
            ranks.rank, ranks.size, ranks._store = rank, 2, both[0]._store
            ranks._failures._store, ranks._failures._rank = ranks._store, rank
        yield both
        for ranks in both:
            ranks.close()
    finally:
        dist.destroy_process_group()


def test_all_end_once_all_want_to(two: tuple[Ranks, Ranks]) -> None:
    first, second = two
    assert not first.pause("here", False)
    assert not second.pause("", False)
    assert second.pause("here", False)
    assert first.pause("here", False)
    assert not first.pause("there", False)


@pytest.mark.parametrize("is_last", [False, True])
def test_who_leaves_first_decides(two: tuple[Ranks, Ranks], is_last: bool) -> None:
    first, second = two
    assert not first.pause("here", True)
    assert not second.pause("here", False)
    assert not second.pause("here", is_last)
    # He may see it in his last look.
    assert not first.pause("there", False)
    assert second.pause("there", is_last)
    assert first.pause("there", True)


def test_a_store_that_is_gone_is_no_failure(two: tuple[Ranks, Ranks]) -> None:
    class Gone:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("Connection reset by peer")

    first, _ = two
    first._store = first._failures._store = Gone()
    assert not first.pause("", False)
    assert not first.pause("here", False)
    assert not first.pause("here", True)


def _share_a_page(two: tuple[Ranks, Ranks]) -> None:
    path, _ = Board.made(2)
    for rank, ranks in enumerate(two):
        ranks._board = Board(path, rank, 2)
    os.unlink(path)


def test_who_fails_has_not_come_to_its_end(two: tuple[Ranks, Ranks]) -> None:
    """However late the other one looks: a process that fails closes what it has as any other does."""
    first, second = two
    second.fail(ValueError("no more cheese"))
    second.close()
    assert not first._has_ended()
    with pytest.raises(PeerError, match=r"failed.*rank 1: ValueError: no more cheese"):
        first.pause("here", False)


@pytest.mark.parametrize("error", [ValueError("no more cheese"), PeerError("it has left")], ids=repr)
def test_who_fails_has_not_come_to_its_end_on_a_page(two: tuple[Ranks, Ranks], error: Exception) -> None:
    _share_a_page(two)
    first, second = two
    second.fail(error)
    second.close()
    with pytest.raises(PeerError, match="Another process of the run has failed"):
        first.meet(Intent.REPLAY)


@pytest.mark.parametrize("page", [False, True])
def test_who_closes_without_an_error_has_come_to_its_end(two: tuple[Ranks, Ranks], page: bool) -> None:
    if page:
        _share_a_page(two)
    first, second = two
    second.close()
    if not page:
        assert first._has_ended()
        return
    with pytest.raises(PeerError, match="Another process has come to its end"):
        first.meet(Intent.REPLAY)
