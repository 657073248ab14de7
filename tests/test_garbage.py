"""Collections of garbage in the middle of a step: code of others that Python runs there."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, assert_same, make, train


class _Timed:
    """Garbage with a finalizer, and a reference to itself."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        time.perf_counter()


class _Littering(Net):
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        _Timed()


@pytest.fixture
def collections_s() -> Iterator[list[float]]:
    """The times of collections, of which there are many."""
    seen: list[float] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(time.perf_counter())

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(400, 1000, 1000)  # of young objects alone
    try:
        yield seen
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)


def test_finalizers_and_callbacks_of_the_collector_are_no_part_of_the_step(
    tmp_path: Path, accelerator: str, collections_s: list[float]
) -> None:
    plain = train(make(_Littering), tmp_path / "plain", accelerator=accelerator)
    before = len(collections_s)
    callback = CUDAGraphCallback()
    graph = train(make(_Littering), tmp_path / "graph", callback, accelerator=accelerator)
    assert len(collections_s) > before
    assert_same(plain, graph, ignore=("_ms/",))
    assert graph.counts.replayed >= 10, graph.counts
    assert gc.isenabled()
