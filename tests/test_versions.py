"""What is said of versions: of packages that do not fit, of newer ones, and in the table of the runs."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.compat import installed, tested_versions
from lightning_cudagraph.compat.installed import gpu_without_cuda, minor_of
from lightning_cudagraph.compat.tested_versions import NEWEST, newer_than_tested
from tests.harness import Net, make, train
from tests.versions import RUNS, TABLE, TESTED, Row, counted, newest_of, rows_in, with_newest, with_row


def _imported_beside(folder: Path, files: dict[str, str], before: str = "") -> str:
    """The last line of the error of `import lightning_cudagraph` beside other packages."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{before}\nimport lightning_cudagraph"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    return run.stderr.strip().splitlines()[-1]


def test_an_older_torch(tmp_path: Path) -> None:
    said = _imported_beside(tmp_path, {"torch/__init__.py": "__version__ = '2.9.1+cu126'\n"})
    assert said == (
        "ImportError: `lightning_cudagraph` needs torch 2.10 or newer, and 2.9.1+cu126 is installed."
        " Install it with `pip install 'torch>=2.10'`."
    )


def test_no_lightning(tmp_path: Path) -> None:
    # As where it is not installed: found by nobody.
    hidden = (
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *a: None if name == 'lightning' else find(name, *a)\n"
    )
    said = _imported_beside(tmp_path, {}, hidden)
    assert said == (
        "ImportError: `lightning_cudagraph` needs the package `lightning` (2.6 or newer). `pip install"
        " lightning`, and import `Trainer` with `from lightning.pytorch import Trainer`."
    )


def test_a_torch_without_cuda_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(installed, "_GPUS", tmp_path / "nowhere")
    assert gpu_without_cuda(None, None) == ""
    monkeypatch.setattr(installed, "_GPUS", tmp_path)
    assert gpu_without_cuda("13.0", None) == ""
    assert gpu_without_cuda(None, None) == ""
    (tmp_path / "0000:01:00.0").mkdir()
    assert gpu_without_cuda(None, "7.0") == ""
    said = gpu_without_cuda(None, None)
    assert f"torch {torch.__version__} was built without CUDA" in said
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _said_at_the_start(tmp_path, caplog).count(f"lightning_cudagraph: {said}") == 1


def _said_at_the_start(path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO):
        train(make(Net), path, CUDAGraphCallback(), watched=False, checkpoint_every=0, max_steps=1)
    return caplog.messages


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        ({}, []),
        ({"torch": "2.8.1"}, ["torch"]),
        ({"torch": "2.8.1", "lightning": "2.5.9"}, ["torch", "lightning"]),
        ({"torch": "2.8.1", "lightning": "1.9.0", "Python": "3.9"}, ["torch", "lightning", "Python"]),
    ],
)
def test_newer_than_tested(
    newest: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {"torch": "99.1.0", "lightning": "99.0.0", "Python": "4.0"}
    monkeypatch.setattr(tested_versions, "NEWEST", {**later, **newest})
    line = newer_than_tested()
    assert [word for word in ("torch", "lightning", "Python") if f"{word} " in line] == said
    assert bool(line) is bool(said)


def test_newer_than_tested_is_one_line_when_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tested_versions, "NEWEST", {**NEWEST, "torch": "2.8.0"})
    lines = _said_at_the_start(tmp_path, caplog)
    assert sum("is newer than 2.8.0" in line for line in lines) == 1


_PAGE = TABLE.read_text()
_TESTED = TESTED.read_text()


def _row(torch: str, python: str, passed: int = 1, **kwargs: Any) -> Row:
    where = kwargs.get("where", "CPU")
    return Row(torch, "2.6.6", python, passed, kwargs.get("failed", 0), 2, where, "2026-01-01")


def test_rows_are_written_in_order_and_replaced() -> None:
    page = "text\n\n| torch |\n|---|---|---|---|---|---|---|---|\n\nmore\n"
    rows = [_row("2.15.0", "3.11.7"), _row("2.9.0", "3.11.7"), _row("2.15.0", "3.10.1")]
    for row in rows:
        page = with_row(page, row)
    assert rows_in(page) == [rows[1], rows[2], rows[0]]
    page = with_row(page, again := _row("2.9.0", "3.11.7", passed=3))
    assert rows_in(page) == [again, rows[2], rows[0]]
    page = with_row(page, _row("2.9.0", "3.11.7", where="a GPU"))
    assert len(rows_in(page)) == 4
    assert page.startswith("text\n\n| torch |\n")
    assert page.endswith("|\n\nmore\n")


def test_what_is_said_to_be_tested_is_the_newest_in_the_table() -> None:
    """`python -m tests.versions` writes both."""
    rows = rows_in(_PAGE)
    if not rows:
        pytest.skip("no run has been recorded yet")
    assert with_row(_PAGE, rows[-1]) == _PAGE
    assert newest_of(rows) == NEWEST
    assert with_newest(_TESTED, rows) == _TESTED


def test_newest() -> None:
    rows = [_row("2.9.0+cpu", "3.12.1"), _row("2.10.1+cpu", "3.9.8"), _row("2.15.0", "3.13.0", failed=1)]
    assert newest_of(rows) == {"torch": "2.10.1", "lightning": "2.6.6", "Python": "3.12"}
    assert '{"torch": "2.10.1", "lightning": "2.6.6", "Python": "3.12"}' in with_newest(_TESTED, rows)
    assert len({*RUNS}) == len(RUNS)


def test_reports_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
    )
    assert counted(report) == (4, 3, 3)


@pytest.mark.parametrize(
    ("version", "minor"), [("2.15.0+cu132", (2, 15)), ("2.7dev", (2, 7)), ("2.9.0a0+git1", (2, 9))]
)
def test_versions_with_more_behind_them(version: str, minor: tuple[int, int]) -> None:
    assert minor_of(version) == minor
