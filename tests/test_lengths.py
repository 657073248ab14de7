"""The cases that the default run takes stand for all: each value of each parameter is among them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests import lengths
from tests.lengths import representatives

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    "sizes", [(5,), (2, 2), (3, 2), (2, 3), (4, 2, 2), (3, 3, 3), (2, 2, 2), (7, 4, 3)], ids=str
)
def test_each_value_of_each_parameter_appears(sizes: tuple[int, ...]) -> None:
    names = "abc"[: len(sizes)]
    product = itertools.product(*map(range, sizes))
    cases = [dict(zip(names, values, strict=True)) for values in product]
    kept = [cases[position] for position in representatives(cases)]
    assert len(kept) == max(sizes)
    for name, size in zip(names, sizes, strict=True):
        assert {case[name] for case in kept} == set(range(size))


def test_parameters_that_are_given_together_are_one() -> None:
    cases = [{"a": a, "b": a, "c": c} for a, c in itertools.product(range(3), range(2))]
    assert representatives(cases) == representatives([{"a": x["a"], "c": x["c"]} for x in cases])


def test_two_halves_are_the_whole() -> None:
    cases = [{"a": index} for index in range(7)]
    assert sorted(representatives(cases, 2, 0) + representatives(cases, 2, 1)) == [*range(7)]


CASES = """
import pytest

def test_short(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.spread
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", [0, 1])
def test_product(a, b): pass

@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.long)])
def test_table(a): pass
"""
MARKS = "[pytest]\nmarkers =\n    long: x\n    spread: x\n"
HOOKS = "from tests.conftest import pytest_addoption, pytest_collection_modifyitems"


@pytest.mark.parametrize(("arguments", "taken"), [((), 3), (("--long",), 10)], ids=str)
def test_what_the_runs_take(pytester: pytest.Pytester, arguments: tuple[str, ...], taken: int) -> None:
    pytester.makeconftest(HOOKS)
    pytester.makeini(MARKS)
    pytester.makepyfile(CASES)
    done = pytester.runpytest_inprocess(*arguments, "-p", "no:cacheprovider", "-p", "no:xdist")
    assert done.parseoutcomes()["passed"] == taken


def test_on_a_gpu_none_is_left_out(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> None:
    pytester.makeini(MARKS)
    items = pytester.getitems(CASES)
    assert len(lengths.long_ones(items)) == 7
    monkeypatch.setattr(lengths, "GPU", pytester.path)
    assert not lengths.long_ones(items)


@pytest.mark.parametrize(
    ("arguments", "available", "lacks"),
    [
        (["tests"], False, True),
        (["tests/gpu"], False, False),
        (["tests/gpu/test_views.py::test_a"], False, False),
        (["tests"], True, False),
    ],
)
def test_what_needs_a_gpu_is_left_out_without_one_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], available: bool, lacks: bool
) -> None:
    monkeypatch.chdir(lengths.GPU.parents[1])
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    config: Any = SimpleNamespace(args=arguments)
    assert lengths.lacks_gpu(config, lengths.GPU) == lacks
    assert not lengths.lacks_gpu(config, lengths.GPU.parent)


@pytest.mark.parametrize(
    ("argument", "named"), [("tests/test_a.py::test_b", True), ("tests/test_a.py", False)]
)
def test_a_test_that_is_named_has_all_of_its_cases(argument: str, named: bool) -> None:
    config: Any = SimpleNamespace(args=[argument], getoption=lambda name: False)
    assert lengths.takes_all(config) == named
