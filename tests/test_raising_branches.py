"""Branches of Python that go on or raise are found in its bytecode, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import branches

FILE = Path(branches.__file__)


@pytest.mark.parametrize(
    "case", [*branches.CHECKS, *branches.OTHERS], ids=lambda case: str(case.__name__)
)
def test_found(case: branches.Case) -> None:
    assert not branches.wrong(case)


def test_the_cases_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ignores handlers takes what is caught for a check."""
    monkeypatch.setattr(branches._module._Search, "_leaves", lambda self, index: True)
    assert branches.wrong(branches.caught) == branches.wrong(branches.in_a_loud_context) == "found"
    assert not branches.wrong(branches.asserts)


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_in_other_versions(version: str) -> None:
    """Other bytecode; of the interpreters that this machine has."""
    if sys.version.startswith(version):
        pytest.skip("this version runs the other tests")
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"there is no Python {version}")
    run = subprocess.run([found[-1], FILE], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)
