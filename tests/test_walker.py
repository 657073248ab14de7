"""What objects hold, of whatever class; what steps change in them; and which op came to another number.

`tests/matrix` has the places and moments; here are the parts by themselves.
"""

from __future__ import annotations

import array
import contextvars
import csv
import functools
import hashlib
import queue
import random
import re
import sqlite3
import struct
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, CUDAGraphCallback, GraphedStep
from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.audit.host_lines import line_that_sets, nearest_line
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.checks.walk import versions
from lightning_cudagraph.checks.walk.kinds import hides_state
from lightning_cudagraph.checks.walk.scope import Root, Scope
from lightning_cudagraph.checks.walk.versions import OwnWrites, Versions
from lightning_cudagraph.checks.walk.walker import Walk
from tests.harness import Net, assert_same, differences, make, train


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def _numbers() -> Iterator[float]:
    number = 1.0
    while True:
        yield number
        number += 1.0


def _changed(holder: Any, change: Callable[[], object]) -> list[str]:
    walk = Walk([Root(holder, "", "the holder")])
    walk.be_quick()
    assert walk.quick_changes(everything=True) == walk.changes() == []
    change()
    found = [moved.words for moved in walk.quick_changes(everything=True)]
    assert found == [moved.words for moved in walk.changes()]
    return found


@pytest.mark.parametrize(
    ("part", "change", "path"),
    [
        (types.SimpleNamespace(n=1.0), lambda part: setattr(part, "n", 2.0), "part.n"),
        ([1.0, [2.0]], lambda part: part[1].__setitem__(0, 3.0), "part[1][0]"),
        ({"a": {"b": 1}}, lambda part: part["a"].update(b=2), "part['a']['b']"),
        (deque([1.0]), lambda part: part.__setitem__(0, 2.0), "part[0]"),
        (({"n": 1},), lambda part: part[0].update(n=2), "part[0]['n']"),
        ([*range(5000)], lambda part: part.__setitem__(4999, 0), "part[4999]"),
        (np.array([{"n": 1}, None]), lambda part: part[0].update(n=2), "part[0]['n']"),
        (bytearray(100_000), lambda part: part.__setitem__(99_999, 1), "part"),
    ],
    ids=[
        "namespace",
        "list",
        "dict",
        "deque",
        "tuple",
        "large list",
        "array of objects",
        "large buffer",
    ],
)
def test_a_change_has_a_path(part: Any, change: Callable[[Any], object], path: str) -> None:
    words = _changed(Holder(part=part), lambda: change(part))
    assert words
    assert words[0].startswith(f"`{path}` of the holder changed")


def test_an_equal_number_is_no_change_and_an_integer_for_a_float_is_one() -> None:
    holder = Holder(n=1e9)
    assert _changed(holder, lambda: setattr(holder, "n", float("1e9"))) == []
    assert _changed(holder, lambda: setattr(holder, "n", 1000000000)) != []
    nan = Holder(n=float("nan"))
    assert _changed(nan, lambda: setattr(nan, "n", float("nan"))) == []


def test_zeros_of_two_signs_differ() -> None:
    holder = {"scale": 0.0}
    walk = Walk([Root(holder, "holder", "")])
    holder["scale"] = -0.0
    assert [moved.path for moved in walk.changes()] == ["holder['scale']"]


def test_another_order_is_a_change() -> None:
    holder = Holder(items=OrderedDict(a=1, b=2))
    assert _changed(holder, lambda: holder.items.move_to_end("a")) != []


def test_code_of_the_objects_does_not_run() -> None:
    class Trap:
        def __init__(self) -> None:
            self.n = 1

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    trap = Trap()
    assert _changed(Holder(trap=trap), lambda: object.__setattr__(trap, "n", 2)) == [
        "`trap.n` of the holder changed from 1 to 2"
    ]


def test_what_is_ignored_is_not_compared() -> None:
    holder = Holder(n=1, m=1)
    walk = Walk([Root(holder, "", "the holder")], Scope(ignored={("the holder", "n")}))
    walk.be_quick()
    holder.n = 2
    assert walk.quick_changes() == walk.changes() == []
    holder.m = 2
    assert [moved.path for moved in walk.quick_changes()] == ["m"]


def test_generators_and_iterators_are_seen_to_move() -> None:
    numbers, items = _numbers(), iter([1, 2, 3])
    next(numbers)
    holder = Holder(numbers=numbers, items=items)
    assert _changed(holder, lambda: next(numbers)) != []
    assert _changed(holder, lambda: next(items)) != []


def test_by_which_locks_threads_wait_is_not_put_back() -> None:
    waiting, others = threading.Condition(), [1]
    waiting._waiters.append(threading.Lock())  # type: ignore[attr-defined]  # as `wait` does
    walk = Walk([Root((waiting, others), "held", "")])
    now = threading.Lock()
    waiting._waiters[0] = now  # type: ignore[attr-defined]
    others.append(2)
    assert any(moved.is_lasting for moved in walk.changes())
    walk.put_back()
    assert list(waiting._waiters) == [now]  # type: ignore[attr-defined]
    assert others == [1]


@pytest.mark.parametrize("make", [lambda: iter(range(9)), lambda: reversed(range(9)), lambda: range(9)])
def test_ranges_are_compared_by_value(make: Callable[[], Any]) -> None:
    """An iterator makes another range each time that it is asked for its position."""
    holder = Holder(numbers=make())
    assert _changed(holder, lambda: None) == []
    if not isinstance(holder.numbers, range):
        assert _changed(holder, lambda: next(holder.numbers)) != []


def test_references_that_are_dead_say_nothing() -> None:
    class Kept:
        pass

    kept = Kept()
    holder = Holder(views=[weakref.ref(kept)])
    assert _changed(holder, lambda: holder.views.append(weakref.ref(Kept()))) == []
    assert _changed(holder, lambda: holder.views.append(weakref.ref(kept))) != []


def test_a_weak_proxy_whose_object_is_gone() -> None:
    kept, gone = Holder(number=1.0), Holder()
    holder = Holder(there=weakref.proxy(kept), gone=weakref.proxy(gone))
    del gone
    assert "there.number" in str(_changed(holder, lambda: setattr(kept, "number", 2.0)))


def test_modules_of_two_objects_have_one_path() -> None:
    """As those of two models do, the closures of which a function has in common."""
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    walk = Walk([Root(Holder(module=model), "", "the holder") for model in models])
    assert {*map(id, walk.hidden.values())} == {*map(id, models)}


@pytest.mark.parametrize(
    "value",
    [sqlite3.connect(":memory:"), hashlib.sha256(), csv.writer(StringIO())],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_hide_their_state(value: Any) -> None:
    assert hides_state(value)


@pytest.mark.parametrize(
    "value",
    [
        *({}, {}.keys(), iter([]), np.zeros(1), array.array("d"), memoryview(b"")),
        *(np.random.default_rng(), random.Random(), re.compile("x"), StringIO(), threading.RLock()),
        *(torch.zeros(1), torch.Generator(), nn.Linear(1, 1), nn.Linear.forward, torch, int, len),
        *(struct.Struct("f"), queue.SimpleQueue()),  # no state, or one that the collector shows
        *(weakref.ref(Holder), contextvars.ContextVar("x"), _numbers(), functools.cache(_numbers)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_a_walk_sees(value: Any) -> None:
    assert not hides_state(value)


class CountsInADatabase(Net):
    """A counter where no walk looks, in the step or in a hook that runs on the host."""

    in_step = True

    def __init__(self) -> None:
        super().__init__()
        self.base = sqlite3.connect(":memory:")
        # Python 3.13 warns of connections that are left open.
        weakref.finalize(self, self.base.close)
        self.base.execute("create table seen (number integer)")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.in_step:
            self.base.execute("insert into seen values (1)")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.base.execute("insert into seen values (2)")

    def counted(self) -> Any:
        return self.base.execute("select number, count(*) from seen group by number").fetchall()


def test_a_use_that_no_walk_sees_is_refused_before_it_happens(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"a use of `Connection.execute`") as error:
        train(make(CountsInADatabase), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert error.value.location is not None
    assert "insert into seen values (1)" in error.value.location.source
    plain = train(make(CountsInADatabase), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(CountsInADatabase), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert plain.module.counted() == eager.module.counted()  # type: ignore[union-attr, operator]


class Hashes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = hashlib.sha256()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.update(b"step")
        return super().training_step(batch, batch_idx)


def test_a_method_with_the_name_of_a_lists(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"a use of `HASH.update`"):
        train(make(Hashes), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


@pytest.mark.long
def test_a_use_in_a_hook_on_the_host(tmp_path: Path, accelerator: str) -> None:
    def build() -> CountsInADatabase:
        module = CountsInADatabase()
        module.in_step = False
        return module

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed > 10
    assert plain.module.counted() == graph.module.counted()  # type: ignore[union-attr, operator]


def test_a_buffer_can_grow_while_it_is_watched() -> None:
    holder = Holder(data=bytearray(b"a"), numbers=array.array("d", [1.0]))
    assert _changed(holder, lambda: holder.data.extend(b"bc")) == ["`data` of the holder changed"]
    assert _changed(holder, lambda: holder.numbers.append(2.0)) == ["`numbers` of the holder changed"]


def test_everything_is_put_back() -> None:
    class Slotted:
        __slots__ = ("first", "second")

    def calls() -> int:
        return count

    count = 1
    slotted = Slotted()
    slotted.first = 1
    holder = Holder(
        numbers=[1, 2],
        items={"a": 1, "b": 2},
        members={1, 2},
        slotted=slotted,
        data=bytearray(b"abc"),
        grown=bytearray(b"abc"),
        shrunk=array.array("d", [1.0, 2.0]),
        calls=calls,
    )
    walk = Walk([Root(holder, "", "the holder")])
    holder.numbers.insert(0, 3)
    holder.grown.extend(b"de")
    holder.shrunk.pop()
    holder.items["c"] = holder.items.pop("a")
    holder.members.add(3)
    slotted.first, slotted.second = 2, 3
    holder.data[0] = 0
    holder.new = 1
    count = 2
    assert len({change.path.partition("[")[0] for change in walk.changes()}) >= 8
    walk.put_back()
    assert walk.changes() == []
    assert (holder.numbers, [*holder.items.items()]) == ([1, 2], [("a", 1), ("b", 2)])
    assert (holder.members, holder.data, calls()) == ({1, 2}, b"abc", 1)
    assert (holder.grown, [*holder.shrunk]) == (b"abc", [1.0, 2.0])
    assert (slotted.first, hasattr(slotted, "second"), hasattr(holder, "new")) == (1, False, False)


@pytest.mark.parametrize("numbers_of_dicts", [True, False])
def test_dictionaries_that_were_written_to(
    numbers_of_dicts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not numbers_of_dicts:  # a torch without them
        monkeypatch.setattr(versions, "_version", None)
    held = [{"n": object()}, {"n": 1.5}, {}]
    watched = Versions(held)
    assert watched.changed() == []
    held[0]["n"] = held[0]["n"]
    assert watched.changed() == []
    held[1]["n"] = 2.5
    held[2]["n"] = 0
    assert watched.changed() == watched.changed() == [1, 2]
    watched.remember([1, 2])
    assert watched.changed() == []
    del held[2]["n"]
    assert watched.changed() == [2]


@pytest.mark.parametrize("numbers_of_dicts", [True, False])
def test_own_writes_hide_no_others(numbers_of_dicts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numbers_of_dicts:
        monkeypatch.setattr(versions, "_version", None)
    held: dict[str, Any] = {"key": None, "n": 1}
    writes = OwnWrites(held, "key")
    at_first = versions.numbers_of([held])
    writes.begin("a")
    assert held["key"] == "a"
    writes.write(None)
    assert held["key"] is None
    assert ([writes.before] == at_first) == numbers_of_dicts
    assert ([writes.after] == versions.numbers_of([held])) == numbers_of_dicts
    for other in ("n", "key"):
        before = versions.numbers_of([held])
        writes.begin("a")
        held[other] = 2
        writes.write("b")
        writes.write(None)
        assert [writes.before] != before


def test_of_some_dictionaries_only_names_are_compared() -> None:
    held = {"n": 1.5, "other": 1}
    watched = Versions([held], [("n", "m")])
    held["other"] = 2
    assert watched.changed() == []
    del held["other"]
    held["m"] = 1  # the length is as before
    assert watched.changed() == watched.changed() == [0]
    watched.remember([0])
    held["m"] = 2
    assert watched.changed() == [0]


def test_a_name_that_the_step_mentions_comes_for_one_that_it_does_not() -> None:
    holder = Holder(n=1, other=1)
    walk = Walk([Root(holder, "", "the holder", by_name=True)], Scope(reads=frozenset({"n", "m"})))
    walk.be_quick()
    holder.other = 2
    assert walk.quick_changes() == []
    del holder.other
    holder.m = 1
    assert [moved.path for moved in walk.quick_changes()] == ["m"]


def test_the_users_line_is_named_and_not_that_of_a_package() -> None:
    source = compile("def fill(frame):\n    frame.cache = 1", "/lib/site-packages/frames.py", "exec")
    fill = next(part for part in source.co_consts if isinstance(part, types.CodeType))

    def step(holder: Holder) -> object:
        return holder.frame  # THE LINE

    holder = Holder(frame=types.SimpleNamespace())
    walk = Walk([Root(holder, "", "the holder")])
    holder.frame.cache = 1
    (change,) = walk.changes()
    assert line_that_sets(change, [fill, step.__code__]) is None
    where = nearest_line(change, [fill, step.__code__])
    assert where is not None
    assert "# THE LINE" in where.source
    assert line_that_sets(change, [fill]) is not None  # where there is no other


def test_the_line_that_counts_is_named_before_the_one_that_starts_anew() -> None:
    holder = Holder(wait=1)

    def step(is_better: bool) -> None:
        if is_better:
            holder.wait = 0
        else:
            holder.wait += 1

    walk = Walk([Root(holder, "", "the holder")])
    step(False)
    (change,) = walk.changes()
    where = line_that_sets(change, [step.__code__])
    assert where is not None
    assert where.source == "holder.wait += 1"


def test_the_line_of_an_item_has_its_key() -> None:
    holder = Holder(history={"d": [], "g": {"n": 0}, "x": [], "y": []})

    def step(key: str) -> None:
        holder.history["d"].append(1)
        entries = holder.history["g"]
        entries["n"] += 1
        holder.history[key].append(1)  # THE LINE OF x

    walk = Walk([Root(holder, "", "the holder")])
    step("x")
    lines = {change.path: line_that_sets(change, [step.__code__]) for change in walk.changes()}
    found = {path: line and line.source for path, line in lines.items()}
    assert found == {
        "history['d'][0]": 'holder.history["d"].append(1)',
        "history['g']['n']": 'entries["n"] += 1',
        "history['x'][0]": "holder.history[key].append(1)  # THE LINE OF x",
    }

    def other() -> None:
        holder.history["d"].append(1)

    (change,) = (change for change in walk.changes() if "'x'" in change.path)
    assert line_that_sets(change, [other.__code__]) is None


# ---- tapes


def _tape_of(first: Callable[[], object], second: Callable[[], object]) -> OpTape:
    tape = OpTape()
    for step in (first, second):
        with tape.compared({}):
            step()
    return tape


def test_the_first_other_number_is_named_with_its_line() -> None:
    x = torch.ones(3)
    scale = 2.0

    def step() -> Tensor:
        return (x + 1.0) * scale  # HERE

    def later() -> Tensor:
        nonlocal scale
        scale = 3.0
        return step()

    difference = _tape_of(step, later).difference
    assert difference is not None
    assert "`aten.mul.Tensor` had 2.0 in the captured step, has 3.0 now" in str(difference)
    assert f"{__file__}:" in str(difference)
    assert "# HERE" in str(difference)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (lambda: torch.ones(2).exp(), lambda: torch.ones(2).log(), "comes to `aten.exp`.*`aten.log`"),
        (lambda: torch.ones(2), lambda: torch.ones(3), "aten.ones.* had 2 .* has 3 "),
        (lambda: torch.ones(2).exp(), lambda: torch.ones(2), "comes to `aten.exp`, the step now to its"),
        (lambda: torch.tensor(1.5), lambda: torch.tensor(2.5), "value 1.5 .* with 2.5"),
        (lambda: torch.full((2,), float("nan")), lambda: torch.full((2,), 1.0), "had nan"),
    ],
    ids=["op", "shape", "end", "constant", "nan"],
)
def test_what_differs(first: Any, second: Any, text: str) -> None:
    import re

    difference = _tape_of(first, second).difference
    assert difference is not None
    assert re.search(text, str(difference)), str(difference)


def test_the_same_ops_differ_in_nothing() -> None:
    def step() -> Tensor:
        return torch.full((2,), float("nan")).add(1).softmax(0)

    assert _tape_of(step, step).difference is None


# ---- in a run


class PerEpoch(Net):
    """A weight of the loss in an object of Python's own, another one in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(weight=1.0)

    def on_train_epoch_start(self) -> None:
        setattr(self.config, "".join(("wei", "ght")), 1.0 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * getattr(self.config, "".join(("wei", "ght")))
        return output


def test_a_change_that_no_name_tells_is_captured_again_with_the_culprit(
    tmp_path: Path, accelerator: str
) -> None:
    plain = train(make(PerEpoch), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    graph = train(make(PerEpoch), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 3
    assert all("`config.weight` of the `PerEpoch`" in reason for reason in graph.counts.recaptures)


@pytest.mark.long
def test_without_walks_and_checks_it_trains_wrong(
    tmp_path: Path, accelerator: str, only_numbers_are_checked: None
) -> None:
    plain = train(make(PerEpoch), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(verify=None)
    graph = train(make(PerEpoch), tmp_path / "graph", callback, accelerator=accelerator)
    assert differences(plain.final["weights"], graph.final["weights"])


def _trained_with_a_bound(**kwargs: Any) -> Tensor:
    """The weights after steps with a bound that is lowered, and that later batches reach alone."""
    torch.manual_seed(0)
    net, config = torch.nn.Linear(4, 1), types.SimpleNamespace(bound=100.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        bound = getattr(config, "".join(("bo", "und")))
        loss = net(x).square().mean() * x.abs().max().clamp(max=bound)
        loss.backward()
        optimizer.step()
        return loss

    with GraphedStep(step, net, optimizer, **kwargs) as graphed:
        for index in range(16):
            if index == 8:
                config.bound = 1.0
            graphed(torch.rand(8, 4) * (2.0 if index >= 12 else 0.5))
    return net.weight.detach().clone()


def test_a_number_that_matters_on_later_batches() -> None:
    plain = _trained_with_a_bound(backend="off")
    assert torch.equal(plain, _trained_with_a_bound())


def test_without_tapes_it_trains_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _trained_with_a_bound(backend="off")
    monkeypatch.setattr(OpTape, "difference", None)
    assert not torch.equal(plain, _trained_with_a_bound())


class CountsApart(Net):
    """Counts its steps in an object of Python's own."""

    def __init__(self) -> None:
        super().__init__()
        self.box = types.SimpleNamespace(calls=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.box.calls += 1
        return super().training_step(batch, batch_idx)


def test_an_effect_is_refused_and_undone(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)`box.calls` of the `Counts.*at .*test_walker.py:\d+"):
        train(make(CountsApart), tmp_path / "raises", CUDAGraphCallback(), accelerator=accelerator)
    plain_module, module = make(CountsApart), make(CountsApart)
    plain = train(plain_module, tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    graph = train(module, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert module.box.calls == plain_module.box.calls > 20


class Settings:
    """An object of another class, with an attribute of the same name as the counter."""

    def __init__(self) -> None:
        self.counted = 0


class CountsInAnArray(Net):
    """Counts its steps in a buffer; other code sets an attribute of that name, before the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = array.array("l", [0])
        self.settings = functools.lru_cache(Settings)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.settings()
        self.counted[0] += 1
        return super().training_step(batch, batch_idx)


def test_an_effect_in_the_capture_is_not_taken_for_that_of_other_code(
    tmp_path: Path, accelerator: str
) -> None:
    with pytest.raises(CaptureError, match="`counted` of the `CountsInAnArray`"):
        train(make(CountsInAnArray), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class CountsFromSomeStepOn(CountsApart):
    """Counts once a hook has said so, under a name that is put together."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 11:
            setattr(self, "".join(("is_", "counting")), True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if getattr(self, "".join(("is_", "counting")), False):
            self.box.calls += 1
        return Net.training_step(self, batch, batch_idx)


def test_an_effect_that_comes_later(tmp_path: Path, accelerator: str) -> None:
    plain_module, module = make(CountsFromSomeStepOn), make(CountsFromSomeStepOn)
    plain = train(plain_module, tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    graph = train(module, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed > 0
    assert module.box.calls == plain_module.box.calls > 10


@pytest.mark.long
def test_without_undoing_it_counts_otherwise(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_module, module = make(CountsFromSomeStepOn), make(CountsFromSomeStepOn)
    train(plain_module, tmp_path / "plain", accelerator=accelerator)
    monkeypatch.setattr(Effects, "begun_later", lambda effects: nullcontext())
    late = "lightning_cudagraph.capture.verification.late_effects"
    monkeypatch.setattr(f"{late}.rehearsals_audited", nullcontext)
    callback = CUDAGraphCallback(on_unsupported="eager")
    train(module, tmp_path / "graph", callback, accelerator=accelerator)
    assert module.box.calls != plain_module.box.calls


class CountsUnderAName(Net):
    """Counts in an attribute with a name that begins as one of Lightning's own does."""

    def __init__(self) -> None:
        super().__init__()
        self.training_box = types.SimpleNamespace(calls=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.training_box.calls += 1
        return super().training_step(batch, batch_idx)


def test_a_name_that_only_begins_like_a_harmless_one(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"`training_box.calls` of the `CountsUnderAName`"):
        train(make(CountsUnderAName), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


@pytest.mark.long
def test_without_that_it_counts_too_few(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Walk, "changes", lambda walk: [])
    monkeypatch.setattr(Walk, "quick_changes", lambda walk, everything: [])
    module = make(CountsApart)
    graph = train(module, tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert graph.counts.replayed > 10
    assert module.box.calls < 20
