"""What a process does that learns of a failure, in one process."""

from __future__ import annotations

import io
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cudagraph.errors import PeerError
from lightning_cudagraph.processes import failures as module
from lightning_cudagraph.processes.failures import Failures

THROW = module.throw
GPU = torch.device("cuda", 0)  # which nothing here touches
LIMIT_S = 30.0


class World:
    """The process group: an abort of it comes back once `stuck` is set."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.aborts = 0
        self.stuck = threading.Event()
        self.thrown: list[type[BaseException]] = []

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()
        self.stuck.wait()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(module, "_abort", made.abort)
    monkeypatch.setattr(module, "throw", lambda thread, error: made.thrown.append(error))
    for name in ("_LOOK_EVERY_S", "_ABORT_AFTER_S", "_ABORT_TIMEOUT_S"):
        monkeypatch.setattr(module, name, 0.02)
    yield made
    made.stuck.set()


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def failures(world: World, store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failures]:
    """Those of rank 1, which waits on the device for what does not come."""
    made = Failures(store, rank=1, size=2)
    monkeypatch.setattr(made, "_is_stuck", lambda: True)
    made.watch(GPU)
    yield made
    world.stuck.set()
    made.close()


def test_the_device_does_not_wait_for_who_has_failed(
    world: World, store: dist.HashStore, failures: Failures, capfd: pytest.CaptureFixture[str]
) -> None:
    store.set("failed", "rank 0: ValueError: no more cheese")
    assert world.aborted.wait(LIMIT_S)
    said = capfd.readouterr().err
    assert "rank 1 ends, because another process has failed: rank 0: ValueError: no more" in said


class Stream:
    """Stands in for the stream and its event: `record` comes back once `free` is set."""

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done
        self.free = threading.Event()

    def record(self, stream: Any) -> None:
        self.free.wait()

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize(
    ("blocks", "is_done", "exits"),
    [
        (True, True, False),
        (False, False, False),
        (False, True, False),
        (False, False, True),
        (False, True, True),
    ],
)
def test_a_call_of_cuda_that_blocks_holds_up_no_other_thread(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch, blocks: bool, is_done: bool, exits: bool
) -> None:
    """At the exit of Python, which starts no thread, it is made by the caller."""
    stream = Stream(is_done)
    if not blocks:
        stream.free.set()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: stream)
    monkeypatch.setattr(module, "_DRAIN_S", 0.2)
    if exits:

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", start)
    failures = Failures(store, rank=1, size=2)
    failures._device = GPU
    try:
        assert failures._is_stuck() is (blocks or not is_done)
    finally:
        stream.free.set()


def test_the_device_may_wait_on_another_stream(
    world: World, store: dist.HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in warm-up, where the thread that looks does not see it; an error that is told is enough.

    The thread that trains gets no exception: it may write a checkpoint.
    """
    monkeypatch.setattr(failures, "_is_stuck", lambda: False)
    store.set("failed", "rank 0: ValueError: no more cheese")
    assert world.aborted.wait(LIMIT_S)
    assert world.thrown == []


def test_main_raises_the_reason_when_its_wait_ends(
    world: World, store: dist.HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its next collective, which would wait for the abort, as that waits for the graphs."""
    monkeypatch.setattr(module, "throw", THROW)
    went_on = False

    def wait_on_the_device() -> None:
        nonlocal went_on
        store.set("failed", "rank 0: ValueError: no more cheese")
        world.aborted.wait(LIMIT_S)
        went_on = True

    with pytest.raises(PeerError, match="rank 1 ends with it: rank 0: ValueError: no more") as error:
        wait_on_the_device()
    assert not went_on
    assert world.aborted.is_set()
    assert traceback.format_exception_only(error.value)[0].startswith("lightning_cudagraph.errors.Peer")
    failures.tell(error.value, leave=lambda: None)


def test_main_raises_once(world: World, store: dist.HashStore, failures: Failures) -> None:
    store.set("failed", "rank 0: ValueError: no more cheese")
    with pytest.raises(PeerError, match="no more cheese"):
        failures.look()
    assert world.aborted.wait(LIMIT_S)
    assert world.thrown == []


def test_who_comes_to_his_end_in_time_aborts_nothing(
    world: World, store: dist.HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ABORT_AFTER_S", LIMIT_S)
    store.set("failed", "rank 0: ValueError: no more cheese")
    while not store.check(["read/1"]):
        threading.Event().wait(0.01)
    failures.close()
    assert not world.aborted.is_set()


def test_python_does_not_end_before_what_ends_the_waits(
    world: World, store: dist.HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that comes back later would end the process with a signal."""
    monkeypatch.setattr(module, "_ABORT_TIMEOUT_S", LIMIT_S)
    store.set("failed", "rank 0: ValueError: no more cheese")
    assert world.aborted.wait(LIMIT_S)
    threading.Timer(0.1, world.stuck.set).start()
    failures.close()
    assert failures._aborting is not None
    assert not failures._aborting.is_alive()


def test_python_does_not_wait_for_ever_for_what_ends_the_waits(
    world: World, store: dist.HashStore, failures: Failures
) -> None:
    """A call that does not return is left to NCCL's watchdog and to the launcher."""
    store.set("failed", "rank 0: ValueError: no more cheese")
    assert world.aborted.wait(LIMIT_S)
    failures.close()
    assert failures._aborting is not None
    assert failures._aborting.is_alive()


def test_who_fails_is_not_told_that_another_has(
    world: World, store: dist.HashStore, failures: Failures, capfd: pytest.CaptureFixture[str]
) -> None:
    left: list[str] = []
    failures.tell(ValueError("no more cheese"), lambda: left.append("left"))
    assert left == ["left"]
    assert store.get("failed") == b"rank 1: ValueError: no more cheese"
    assert failures._watch is not None
    failures._watch.join(LIMIT_S)  # which finds the same
    assert world.aborted.wait(LIMIT_S)
    assert world.aborts == 1  # and not one for each who wants it
    assert "another process" not in capfd.readouterr().err


def test_who_fails_behind_another_says_why(
    store: dist.HashStore, failures: Failures, capfd: pytest.CaptureFixture[str]
) -> None:
    store.set("failed", "rank 0: ValueError: no more cheese")
    failures.tell(RuntimeError("connection closed"), lambda: None)
    assert store.get("failed") == b"rank 0: ValueError: no more cheese"
    assert "has failed: rank 0: ValueError: no more cheese" in capfd.readouterr().err


def test_an_error_that_cannot_be_written(store: dist.HashStore, failures: Failures) -> None:
    failures.tell(ValueError("\udcff"), lambda: None)
    assert store.get("failed") == b"rank 1: ValueError: \\udcff"


class GoneStore:
    """What is left of a store with the process that had it."""

    def check(self, *_: object) -> bool:
        raise RuntimeError("Connection was closed")

    get = set = compare_set = check


def test_a_store_that_is_gone(
    world: World,
    failures: Failures,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(failures, "_store", GoneStore())
    left: list[str] = []
    failures.tell(ValueError("no more cheese"), lambda: left.append("left"))
    assert left == ["left"]
    assert world.aborted.wait(LIMIT_S)


def test_a_process_that_waits_while_the_store_ends(
    world: World, failures: Failures, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "_store", GoneStore())
    assert world.aborted.wait(LIMIT_S)
    assert "the process with the store has ended" in capfd.readouterr().err


class Page:
    """The page that processes share, as far as it is asked who is gone."""

    def gone(self) -> list[int]:
        return [0]


def test_a_store_that_has_come_to_its_end(
    world: World,
    store: dist.HashStore,
    failures: Failures,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its process is through with the run, and this one is not yet."""
    Failures(store, rank=0, size=2).end()  # which comes back when the other one knows
    monkeypatch.setattr(failures, "_store", GoneStore())
    assert failures._watch is not None
    failures._watch.join(LIMIT_S)
    assert not failures._watch.is_alive()
    assert not world.aborted.is_set()
    assert "has failed" not in capfd.readouterr().err


class Asked:
    """A store that notes what has been there when somebody waits for it."""

    def __init__(self, store: dist.HashStore) -> None:
        self.store = store
        self.asks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        found = self.store.check(keys)
        if keys == ["read/2"] and not found:
            self.asks += 1
            if self.asks == 3:
                self.store.set("read/2", "")
        return found


@pytest.mark.parametrize("how", ["word", "own", "all", "end"])
def test_the_store_is_there_until_all_have_read_what_is_in_it(how: str, store: dist.HashStore) -> None:
    """However its process ends: by another's word, by its own, by what all come to, or well."""
    if how == "word":
        store.set("failed", "rank 1: ValueError: no more cheese")
    asked = Asked(store)
    first = Failures(asked, rank=0, size=3)
    store.set("read/1", "")
    if how == "end":
        first.end()
    elif how == "word":
        with pytest.raises(PeerError) as raised:
            first.look()
        first.tell(raised.value, lambda: None)
    else:
        error = ValueError("no more cheese") if how == "own" else PeerError("the last batch of some")
        first.tell(error, lambda: None)
    assert asked.asks == 3


def test_the_store_is_not_there_for_ever(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_TIMEOUT_S", 0.1)
    Failures(store, rank=0, size=2).end()
    assert store.check(["ended"])


def test_who_is_gone_ends_what_others_wait_for(
    world: World,
    failures: Failures,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(failures, "page", Page())
    assert world.aborted.wait(LIMIT_S)
    assert "The process with rank 0 is gone without a word" in capfd.readouterr().err


@pytest.mark.parametrize("gone", ["process", "store"])
def test_who_waits_for_nobody_goes_on_without_those_that_are_gone(
    world: World, failures: Failures, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """They may have done all of their part, as one has that ends by `os._exit(0)`."""
    looks = threading.Semaphore(0)

    def is_stuck() -> bool:
        looks.release()
        return False

    monkeypatch.setattr(failures, "_is_stuck", is_stuck)
    if gone == "process":
        monkeypatch.setattr(failures, "page", Page())
    else:
        monkeypatch.setattr(failures, "_store", GoneStore())
    for _ in range(3):
        assert looks.acquire(timeout=LIMIT_S)
    assert not world.aborted.is_set()
    monkeypatch.setattr(failures, "_is_stuck", lambda: True)
    assert world.aborted.wait(LIMIT_S)


def test_where_no_thread_can_start_there_is_no_abort(
    world: World, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Python ends, from 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    failures._store.set("failed", "rank 0: ValueError: no more cheese")
    assert failures._watch is not None
    failures._watch.join(LIMIT_S)
    assert not failures._watch.is_alive()
    assert not world.aborted.is_set()


def test_nobody_reads_what_is_said(
    world: World, store: dist.HashStore, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    store.set("failed", "rank 0: ValueError: no more cheese")
    assert world.aborted.wait(LIMIT_S)


def test_nothing_waits_where_there_is_no_group() -> None:
    assert not dist.is_initialized()
    module._abort()
