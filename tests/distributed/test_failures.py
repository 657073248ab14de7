"""What a process does that learns of a failure, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_cudagraph.capture.processes import failures as module
from lightning_cudagraph.capture.processes.failures import Failures

GPU = torch.device("cuda", 0)  # which nothing here touches
LIMIT_S = 30.0


class World:
    """In the place of what would end processes, and what they wait for."""

    def __init__(self) -> None:
        self.aborts = 0
        self.status: int | None = None
        self.ended = threading.Event()
        self.stuck = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.stuck.wait()

    def exit(self, status: int) -> None:
        self.status = status
        self.ended.set()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(module, "_abort", made.abort)
    monkeypatch.setattr(module.os, "_exit", made.exit)
    for name in ("_LOOK_EVERY_S", "_ABORT_AFTER_S", "_GRACE_S"):
        monkeypatch.setattr(module, name, 0.02)
    yield made
    made.stuck.set()


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def test_who_cannot_end_by_himself_is_ended(
    world: World, store: dist.HashStore, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = Failures(store, rank=1, size=2)
    failures.watch(GPU)
    store.set("failed", "rank 0: ValueError: no more cheese")
    # What would end the waits on the device does not come back.
    assert world.ended.wait(LIMIT_S)
    assert (world.status, world.aborts) == (1, 1)
    said = capfd.readouterr().err
    assert "rank 1 ends, because another process has failed: rank 0: ValueError: no more" in said
    assert "rank 1 ends by force" in said
    failures.close()


def test_who_ends_by_himself_is_not_ended(world: World, store: dist.HashStore) -> None:
    module._GRACE_S = LIMIT_S  # type: ignore[attr-defined]
    failures = Failures(store, rank=1, size=2)
    failures.watch(GPU)
    store.set("failed", "rank 0: ValueError: no more cheese")
    while not world.aborts:
        world.ended.wait(0.01)
    failures.close()
    assert failures._watch is not None
    assert not failures._watch.is_alive()
    assert not world.ended.is_set()


def test_who_fails_is_not_told_that_another_has(
    world: World,
    store: dist.HashStore,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failures = Failures(store, rank=1, size=2)
    monkeypatch.setattr(failures, "_is_stuck", lambda: True)
    failures.watch(GPU)
    left: list[str] = []
    failures.tell(KeyboardInterrupt(), lambda: left.append("left"))
    assert left == ["left"]
    assert store.get("failed") == b"rank 1: KeyboardInterrupt: "
    assert world.ended.wait(LIMIT_S)
    assert world.aborts == 1  # and not one for each who wants it
    said = capfd.readouterr().err
    assert "another process" not in said
    assert "rank 1 ends by force" in said
    failures.close()
