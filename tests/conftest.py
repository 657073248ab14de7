"""Fixtures shared by the tests on the emulator and those on CUDA."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_cudagraph import CUDAGraphCallback, GraphedStep
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.timing.sinks import dashboard
from tests import lengths
from tests.declared import captures_looked_at

# A test leaves a trainer or two in cycles; to look for garbage after every 700 objects takes a tenth of
# the time of all.
gc.set_threshold(50_000)

# Tiny tensors gain nothing from threads, and several processes on few cores lose a lot by them.
torch.set_num_threads(1)


def _freeze() -> None:
    """Exclude live objects from later garbage collections, and from searches for referrers.

    Everything imported and collected lives until the end: half a million objects, which captures would
    search several times, in a tenth of a second and more.
    """
    gc.collect()
    gc.freeze()


_freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--streams`, `--declared` and `--long`.

    `--streams 4`: all captures of the tests are on four streams, unless a test sets the number.

    `--declared`: for each op that the tests capture on the emulator, compare declared with actual
    writes, which takes up to as long again. Tests with the mark always do.

    `--long`: include the long tests, which the default run leaves out (`lengths.py`).
    """
    parser.addoption("--streams", default="auto")
    parser.addoption("--declared", action="store_true")
    parser.addoption("--long", action="store_true")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a GPU, do not collect tests that need one, half of all, unless they are named."""
    return lengths.lacks_gpu(config, collection_path) or None


def pytest_report_header(config: pytest.Config) -> str | None:
    return "tests/gpu is left out: no CUDA GPU" if lengths.lacks_gpu(config, lengths.GPU) else None


def pytest_configure(config: pytest.Config) -> None:
    streams = config.getoption("--streams")
    if streams != "auto":
        for owner in (CUDAGraphCallback, GraphedStep):
            owner.__init__.__kwdefaults__["streams"] = int(streams)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, and the whole matrix, which takes most of an hour: `-m matrix` runs it."""
    left_out = [] if lengths.takes_all(config) else lengths.long_ones(items)
    if "matrix" not in config.getoption("-m"):
        left_out += [item for item in items if item.get_closest_marker("matrix")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        rest = set(items).difference(left_out)
        items[:] = [item for item in items if item in rest]


def pytest_collection_finish(session: pytest.Session) -> None:
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_a_module_leaves_is_not_looked_through() -> Iterator[None]:
    yield
    _freeze()


@pytest.fixture(autouse=True)
def _messages_of_lightning_are_on_again() -> Iterator[None]:
    """Tests of benchmarks and of many small runs silence them."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _ops_write_what_they_are_said_to_write(request: pytest.FixtureRequest) -> Iterator[None]:
    if not (request.config.getoption("--declared") or request.node.get_closest_marker("declared")):
        yield
        return
    with captures_looked_at() as lies:
        yield
        assert not lies()


@pytest.fixture(autouse=True)
def _pictures_are_drawn_where_they_are_looked_at(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw no pictures in other tests of the default run: they take longer than a short fit."""
    draws = request.node.get_closest_marker("pictures")
    if not (draws or lengths.takes_all(request.config) or lengths.GPU in request.path.parents):
        for picture in ("layer_bars", "step_timeline"):
            monkeypatch.setattr(dashboard, picture, lambda *args: None)


@pytest.fixture(autouse=True)
def _no_time_for_later_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off checks within the time budget, which depend on the speed of the machine."""
    monkeypatch.setattr(Verifier, "_is_affordable", lambda self: False)


@pytest.fixture
def only_numbers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks compare numbers only: no op tape, and no walks over objects."""
    monkeypatch.setattr(Walk, "quick_changes", lambda *args, **kwargs: [])
    monkeypatch.setattr(OpTape, "difference", None)


@pytest.fixture
def hypothesis_leaves_no_clock() -> Iterator[None]:
    """Remove Hypothesis's callback, which reads a clock in each garbage collection."""
    before = list(gc.callbacks)
    yield
    gc.callbacks[:] = before


@pytest.fixture
def accelerator() -> str:
    """The accelerator of runs; `tests/gpu` overrides it."""
    return "cpu"
