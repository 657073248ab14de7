"""Containers that another thread writes to while a walk reads them."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from lightning_cudagraph.checks.walk.scope import Namespace, Root
from lightning_cudagraph.checks.walk.walker import Walk
from tests.harness import Net, assert_same, make, train

SIZE = 300


@contextmanager
def _written(write: Callable[[int], object]) -> Iterator[None]:
    """Let another thread write, with numbers that count up, as often as the interpreter switches."""
    ended, begun = Event(), Event()

    def keep_writing() -> None:
        for number in count():
            write(number)
            begun.set()
            if ended.is_set():
                return

    thread = Thread(target=keep_writing)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def _turn(held: Any, number: int) -> None:
    """Add a member of a dictionary or a set, or remove one."""
    member = number // 2 % SIZE + 1000
    if number % 2:
        held.pop(member) if isinstance(held, dict) else held.discard(member)
    elif isinstance(held, dict):
        held[member] = 0
    else:
        held.add(member)


def _rotate(held: deque[int], number: int) -> None:
    held.popleft()
    held.append(number)


class _Members(dict[int, int]):
    """A dictionary whose own iteration fails."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("iterated")


def _set_attribute(held: Any, number: int) -> None:
    name = f"other{number // 2 % SIZE}"
    delattr(held, name) if number % 2 else setattr(held, name, 0)


HELD: dict[str, tuple[Any, Callable[[Any, int], object]]] = {
    "dict": (dict.fromkeys(range(SIZE), 0), _turn),
    "OrderedDict": (OrderedDict.fromkeys(range(SIZE), 0), _turn),
    "defaultdict": (defaultdict(int, dict.fromkeys(range(SIZE), 0)), _turn),
    "subclass of dict": (_Members(dict.fromkeys(range(SIZE), 0)), _turn),
    "set": ({*range(SIZE)}, _turn),
    "deque": (deque(range(SIZE)), _rotate),
    "attributes": (SimpleNamespace(**{f"n{i}": i for i in range(SIZE)}), _set_attribute),
    "class": (type("Held", (), {f"n{i}": i for i in range(SIZE)}), _set_attribute),
}


@pytest.mark.spread
@pytest.mark.parametrize("name", HELD)
def test_another_thread_writes_while_a_walk_reads(name: str) -> None:
    held, write = HELD[name]
    names = {"other0", *(f"n{number}" for number in range(SIZE))}
    space = {} if not hasattr(held, "__dict__") else vars(held)
    with _written(lambda number: write(held, number)):
        for _ in range(200):
            walk = Walk(
                [
                    Root(held, "held", ""),
                    Root(Namespace(space), "", "a module", reads=frozenset(names)),
                ]
            )
            walk.be_quick()
            walk.changes()
            walk.quick_changes()


class _Key:
    """A key whose `__hash__` does something else too."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.is_on = False

    def __hash__(self) -> int:
        if self.is_on:
            self.act()
        return 1


def _restless() -> tuple[OrderedDict[Any, int], _Key]:
    held: OrderedDict[Any, int] = OrderedDict()
    numbers = count()
    key = _Key(lambda: held.update({f"n{next(numbers)}": 0}))
    held[key] = 0
    return held, key


def test_what_changes_at_each_look_is_always_another() -> None:
    held, key = _restless()
    walk = Walk([Root(held, "held", "")])
    walk.be_quick()
    assert walk.quick_changes() == walk.changes() == []
    key.is_on = True
    assert "held" in {moved.path for moved in walk.quick_changes()}
    walk.record_again()
    assert "held" in {moved.path for moved in walk.changes()}
    walk.put_back()  # it cannot be
    key.is_on = False
    walk.record_again()
    assert walk.changes() == []


class Restless(Net):
    """Reads a dictionary that changes at each look."""

    def __init__(self) -> None:
        super().__init__()
        self.held, key = _restless()
        key.is_on = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.held
        return super().training_step(batch, batch_idx)


def test_what_changes_at_each_look_is_named(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="`held` of the `Restless` changes while it is looked at"):
        train(make(Restless), tmp_path / "raises", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(Restless), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    assert_same(plain, train(make(Restless), tmp_path / "eager", callback, accelerator=accelerator))


class Reads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = dict.fromkeys(range(SIZE), 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.held
        return super().training_step(batch, batch_idx)


def test_a_fit_goes_on_while_another_thread_writes(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Reads), tmp_path / "plain", accelerator=accelerator)
    module = make(Reads)
    callback = CUDAGraphCallback(timings=None, harmless=["held"])
    with _written(lambda number: _turn(module.held, number)):
        graph = train(module, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed > 0
