"""The package's source files, each parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import lightning_cudagraph

ROOT = Path(lightning_cudagraph.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
