"""Runs of the suite on other versions of torch and Python, each in an environment of its own.

    python -m tests.versions --list
    python -m tests.versions --torch 2.15.0 --python 3.12
    python -m tests.versions --all

The result of a run is a row of the table in docs/versions.md. Environments are made one after the other,
because torch's wheels bring up to 5 GB of CUDA libraries, and are removed after their run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["Row", "newest_of", "rows_in", "with_newest", "with_row"]

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "versions.md"
TESTED = ROOT / "lightning_cudagraph" / "compat" / "tested_versions.py"
# What `--all` runs: each Python that is allowed, on the oldest torch, the newest, and two between.
RUNS = (("2.10.0", "3.10"), ("2.13.0", "3.11"), ("2.14.1", "3.12"), ("2.15.0", "3.13"))
_HEAD = "| torch | lightning | Python | passed | failed | skipped | where | when |"
_RULE = "|---|---|---|---|---|---|---|---|"
_VERSIONS = (
    "import json, platform, lightning, torch;"
    "print(json.dumps([torch.__version__, lightning.__version__, platform.python_version()]))"
)


@dataclass(frozen=True)
class Row:
    """A run of the suite, as a row of the table."""

    torch: str
    lightning: str
    python: str
    passed: int
    failed: int
    skipped: int
    where: str
    when: str

    @property
    def key(self) -> tuple[str, ...]:
        """The key of a row: a later run with the same key replaces it."""
        return self.torch, self.lightning, self.python, self.where

    @property
    def order(self) -> tuple[list[int], ...]:
        """Sort key in the table: by versions, the oldest first."""
        return tuple(_numbers(version) for version in (self.torch, self.python, self.lightning))

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, astuple(self)))} |"


def rows_in(text: str) -> list[Row]:
    """The rows of the table in a page.

    Args:
        text: the page.
    """
    table = text.partition(f"{_RULE}\n")[2]
    found = []
    for line in table.splitlines():
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = [int(cell) for cell in cells[3:6]]
        found.append(Row(*cells[:3], *numbers, *cells[6:]))  # type: ignore[arg-type, misc]
    return found


def with_row(text: str, row: Row) -> str:
    """Add a row to the table of a page; it replaces one of the same versions on the same machine."""
    before, _, after = text.partition(f"{_RULE}\n")
    rest = after.splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        del rest[0]
    rows = sorted([*(old for old in rows_in(text) if old.key != row.key), row], key=lambda r: r.order)
    return f"{before}{_RULE}\n{''.join(f'{each}{chr(10)}' for each in rows)}{''.join(rest)}"


def newest_of(rows: Sequence[Row]) -> dict[str, str]:
    """The newest version of each package in rows without failures.

    Args:
        rows: of the table.
    """
    clean = [row for row in rows if not row.failed]
    versions = {
        "torch": [row.torch.partition("+")[0] for row in clean],
        "lightning": [row.lightning for row in clean],
        "Python": [".".join(row.python.split(".")[:2]) for row in clean],
    }
    return {name: max(found, key=_numbers) for name, found in versions.items() if found}


def with_newest(text: str, rows: Sequence[Row]) -> str:
    """`tested_versions.py`, naming the newest versions of a table.

    Args:
        text: the module.
        rows: of the table.
    """
    if not (newest := newest_of(rows)):
        return text
    return re.sub(r"(?m)^(NEWEST: .* = ).*$", lambda found: found[1] + json.dumps(newest), text)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".") if part.isdigit()]


def counted(report: Path) -> tuple[int, int, int]:
    """Numbers of tests that passed, failed and were skipped, from pytest's JUnit report."""
    suites = [*ElementTree.parse(report).getroot().iter("testsuite")]
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def _interpreters(version: str) -> Iterator[str]:
    """Possible paths of a version of Python: on `PATH`, or by pyenv."""
    if found := shutil.which(f"python{version}"):
        yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True))


def _interpreter(version: str) -> str:
    ask = "import platform; print(platform.python_version())"
    for path in _interpreters(version):
        answer = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if answer.stdout.startswith(f"{version}."):
            return path
    raise SystemExit(f"There is no Python {version} on PATH, nor among pyenv's.")


def _make(folder: Path, torch: str, python: str) -> str:
    """Make an environment; returns its Python."""
    if python == ".".join(map(str, sys.version_info[:2])):
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([_interpreter(python), "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    wanted = [f"torch=={torch}", "-e", f"{ROOT}[test]"]
    # Without limits from outside: which version of torch is tested is said here.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    subprocess.run([own, "-m", "pip", "install", "-q", *wanted], check=True, env=environment)
    return own


def run(own: str, arguments: Sequence[str]) -> Row:
    """Run the suite.

    Args:
        own: the Python of an environment.
        arguments: further ones for pytest.

    Returns:
        The row.
    """
    answer = subprocess.run([own, "-c", _VERSIONS], check=True, capture_output=True, text=True)
    torch, lightning, python = json.loads(answer.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [own, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code not in (0, 1):  # not run to its end
            raise SystemExit(code)
        counts = counted(report)
    where = _gpu(own) or f"{platform.machine()} CPU"
    return Row(torch, lightning, python, *counts, where, date.today().isoformat())


def _gpu(own: str) -> str:
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    answer = subprocess.run([own, "-c", ask], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


def _record(row: Row) -> None:
    print(row, flush=True)
    TABLE.write_text(page := with_row(TABLE.read_text(), row))
    TESTED.write_text(with_newest(TESTED.read_text(), rows_in(page)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the runs of `--all`")
    parser.add_argument("--all", action="store_true", help="run all of them")
    parser.add_argument("--torch", action="append", default=[], help="a version; may be repeated")
    parser.add_argument("--python", action="append", default=[], help="a version; may be repeated")
    parser.add_argument("--here", action="store_true", help="run in this environment, and make none")
    parser.add_argument("--environments", type=Path, help="make them in this folder, and keep them")
    parser.add_argument("pytest", nargs="*", help="behind `--`: arguments for pytest")
    asked = parser.parse_args()
    if asked.pytest and not asked.list:
        print("With arguments for pytest, it is not the whole suite: nothing is recorded.")
    runs = RUNS if asked.all else [(t, p) for t in asked.torch for p in asked.python or ["3.11"]]
    if asked.list:
        for torch, python in RUNS:
            print(f"--torch {torch} --python {python}")
    elif asked.here:
        _done(run(sys.executable, asked.pytest), asked.pytest)
    elif not runs:
        parser.error("say which: --torch and --python, --all, --here, or --list")
    for torch, python in () if asked.list or asked.here else runs:
        folder = asked.environments or Path(tempfile.mkdtemp())
        environment = folder / f"torch-{torch}-python-{python}"
        try:
            own = str(environment / "bin" / "python")
            if not os.path.exists(own):
                own = _make(environment, torch, python)
            _done(run(own, asked.pytest), asked.pytest)
        finally:
            if asked.environments is None:
                shutil.rmtree(folder)


def _done(row: Row, arguments: Sequence[str]) -> None:
    if arguments:
        print(row, flush=True)
    else:
        _record(row)


if __name__ == "__main__":
    main()
