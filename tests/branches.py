"""Branches in plain Python that go on or raise, and others.

Any version of Python runs this file: it needs no package.
"""
# ruff: noqa: C417, PERF203, PT018, SIM105, SIM300

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "lightning_cudagraph" / "device" / "lines" / "raising_branches.py"
_spec = importlib.util.spec_from_file_location("raising_branches", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["raising_branches"] = _module  # for its dataclasses
_spec.loader.exec_module(_module)

LIMIT = 10
Case = Callable[[Any], Any]


class Value:
    """A number, as a tensor holds one, of which the first read finds the branch that takes it."""

    found: Any = None
    n_reads = 0

    def __init__(self, number: float) -> None:
        self.number = number

    def _read(self) -> float:
        Value.n_reads += 1
        frame = sys._getframe(2)
        branch = _module.raising_branch(
            frame, True, lambda frame: frame.f_code.co_name == "run", lambda frame: False
        )
        if Value.n_reads == 1:
            Value.found = branch
        return self.number

    def __bool__(self) -> bool:
        return bool(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def item(self) -> float:
        return self._read()

    def __gt__(self, other: float) -> Value:
        return Value(self.number > other)

    def __eq__(self, other: object) -> Any:
        return Value(self.number == other)

    __hash__ = object.__hash__


class Quiet:
    """A context whose exit ends no exception."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return
        self.left = True


class Bounds:
    """Numbers of an object and of its class, and one that code computes."""

    least = 0.5

    def __init__(self) -> None:
        self.most = 0.5

    @property
    def computed(self) -> float:
        return self.most


class Loud:
    """A context whose exit ends each exception."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool:
        return True


def run(case: Case, number: float) -> tuple[Any, bool]:
    """The branch of the first read; and True if the case raises."""
    Value.found, Value.n_reads = None, 0
    try:
        case(Value(number))
    except Exception:
        return Value.found, True
    return Value.found, False


# Each raises for 0, and not for 1.
def asserts(x: Any) -> None:
    assert x, f"not {x}"


def asserts_a_number(x: Any) -> None:
    assert x.item()


def raises(x: Any) -> int:
    if not x:
        raise ValueError("a" if LIMIT > 1 else "b")
    return 1


def raises_at_the_end(x: Any) -> int:
    if x:
        return 1
    raise ValueError


def compares(x: Any) -> None:
    if x.item() < 0.5:
        raise ValueError


def compares_the_other_way(x: Any) -> None:
    if 0.5 > x.item():
        raise ValueError


def compares_for_equality(x: Any) -> None:
    assert x.item() == 1


def compares_with_a_local(x: Any) -> None:
    least = 1
    if x.item() < least:
        raise ValueError


def compares_with_a_global(x: Any) -> None:
    if x.item() * 1 != 0 or LIMIT < 0:
        return
    raise ValueError


def compares_with_an_attribute(x: Any) -> None:
    bounds = Bounds()
    if x.item() < bounds.most:
        raise ValueError


def compares_with_an_attribute_first(x: Any) -> None:
    bounds = Bounds()
    if bounds.least > float(x):
        raise ValueError


def compares_with_a_property(x: Any) -> None:
    bounds = Bounds()
    if x.item() < bounds.computed:
        raise ValueError


def compares_on_the_device(x: Any) -> None:
    if not x > 0.5:
        raise ValueError


def converts(x: Any) -> None:
    if not bool(x):
        raise ValueError


def converts_to_float(x: Any) -> None:
    if float(x) < LIMIT - 9.5:
        raise ValueError


def converts_twice(x: Any) -> None:
    if not int(float(x)):
        raise ValueError


def asks_math(x: Any) -> None:
    if math.floor(x.item()) == 0:
        raise ValueError


def asks_math_itself(x: Any) -> None:
    if not math.ceil(float(x)):
        raise ValueError


def has_an_and(x: Any) -> None:
    assert x and LIMIT > 0


def has_an_or(x: Any) -> None:
    if LIMIT < 0 or not x or LIMIT < 1:
        raise ValueError


def has_a_host_condition(x: Any) -> None:
    if LIMIT > 0 and not x:
        raise ValueError


def in_a_loop(x: Any) -> None:
    for each in (x, x):
        assert each


def in_a_quiet_context(x: Any) -> None:
    with Quiet():
        assert x


def in_a_context_behind(x: Any) -> None:
    with Loud():
        pass
    assert x


def with_a_cleanup(x: Any) -> None:
    try:
        assert x
    finally:
        x.number += 1


def with_an_except_that_raises(x: Any) -> None:
    try:
        assert x
    except AssertionError as error:
        raise ValueError from error


def called(x: Any) -> None:
    asserts(x)


def called_deep(x: Any) -> None:
    with Quiet():
        [asserts(each) for each in (x,)]


# Each is no branch that goes on or raises alone, or may be caught.
def keeps(x: Any) -> Any:
    is_right = x.item()
    if not is_right:
        raise ValueError
    return is_right


def keeps_a_copy(x: Any) -> Any:
    if not (is_right := x.item()):
        raise ValueError
    return is_right


def keeps_a_bool(x: Any) -> Any:
    is_wrong = not x
    assert not is_wrong
    return is_wrong


def returns(x: Any) -> Any:
    return bool(x)


def returns_one(x: Any) -> Any:
    return x and x


def chooses(x: Any) -> int:
    return 1 if x else 2


def skips(x: Any) -> Any:
    if not x:
        return None
    return 1


def calls_what_raises(x: Any) -> None:
    if not x:
        asserts(x)


def may_raise(x: Any) -> int:
    if not x:
        for _ in range(LIMIT):
            return 2
        raise ValueError
    return 1


def loops(x: Any) -> None:
    while x.item() > 0:
        x.number -= 1


def tries_again(x: Any) -> None:
    for _ in range(3):
        if x:
            break
        x.number += 1
    else:
        raise ValueError


def raises_anyway(x: Any) -> None:
    if x:
        raise ValueError
    raise TypeError


def needs_both(x: Any) -> None:
    if not x and not x.item():
        raise ValueError


def asks_all(x: Any) -> None:
    assert all([x, x])


def asks_a_list(x: Any) -> None:
    assert x in [0, 1]


def compares_lists(x: Any) -> None:
    assert [x] == [1]


def caught(x: Any) -> None:
    try:
        assert x
    except AssertionError:
        x.number = 1


def caught_by_a_caller(x: Any) -> None:
    try:
        raises(x)
    except ValueError:
        pass


def caught_in_the_end(x: Any) -> int:
    try:
        assert x
    finally:
        return 1  # noqa: B012


def caught_in_a_loop(x: Any) -> None:
    while True:
        try:
            assert x
            return
        except AssertionError:
            x.number = 1


def suppressed(x: Any) -> None:
    with contextlib.suppress(AssertionError):
        assert x


def in_a_loud_context(x: Any) -> None:
    with Loud():
        assert x


def in_an_unknown_context(x: Any) -> None:
    context = Quiet()
    with context:
        assert x


def in_two_contexts(x: Any) -> None:
    with Loud(), Quiet():
        assert x


def in_a_generator(x: Any) -> None:
    def each() -> Iterator[int]:
        assert x
        yield 1

    list(each())


def in_a_property(x: Any) -> None:
    class Owner:
        @property
        def checked(self) -> int:
            assert x
            return 1

    Owner().checked  # noqa: B018


def taken_by_c(x: Any) -> None:
    class Owner:
        def __getattr__(self, name: str) -> int:
            if not x:
                raise AttributeError
            return 1

    hasattr(Owner(), "a")


def taken_for_the_end(x: Any) -> None:
    def each() -> int:
        if not x:
            raise StopIteration
        return 1

    next(map(lambda _: each(), [1]), None)


class End(StopIteration):
    """An end of one's own."""


def taken_by_another_name(x: Any) -> None:
    end = End()

    def each() -> int:
        if not x:
            raise end
        return 1

    next(map(lambda _: each(), [1]), None)


CHECKS = [
    *(asserts, asserts_a_number, raises, raises_at_the_end, compares, compares_the_other_way),
    *(compares_for_equality, compares_with_a_local, compares_on_the_device, converts),
    *(compares_with_an_attribute, compares_with_an_attribute_first),
    *(converts_twice, asks_math, asks_math_itself, has_an_and, has_an_or, has_a_host_condition),
    *(in_a_loop, in_a_quiet_context, in_a_context_behind, with_a_cleanup, with_an_except_that_raises),
    *(called, called_deep),
]
OTHERS = [
    *(keeps, keeps_a_copy, keeps_a_bool, returns, returns_one, chooses, skips, calls_what_raises),
    *(may_raise, loops, tries_again, raises_anyway, needs_both, asks_all, asks_a_list, compares_lists),
    *(compares_with_a_global, compares_with_a_property, converts_to_float),
    *(caught, caught_by_a_caller, caught_in_the_end, caught_in_a_loop, suppressed, in_a_loud_context),
    *(in_an_unknown_context, in_two_contexts, in_a_generator, in_a_property, taken_by_c),
    *(taken_for_the_end, taken_by_another_name),
]


def wrong(case: Case) -> str:
    """The difference from the expected branch of a case, in words; empty if there is none."""
    branch, is_raised = run(case, 0)
    others, is_raised_for_1 = run(case, 1)
    if case in OTHERS:
        return "" if branch is others is None else "found"
    if not is_raised or is_raised_for_1:
        return "the case itself"
    if branch is None or others is None:
        return "not found"
    for each in (branch, others):
        passing = each.passing(float)
        if not each.raises(0) or each.raises(1) or passing is None or each.raises(passing):
            return "the other way"
    return ""


if __name__ == "__main__":
    for each in (*CHECKS, *OTHERS):
        if text := wrong(each):
            print(f"{each.__name__}: {text}")
