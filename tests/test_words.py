"""The style of docstrings and comments: noun phrases or imperative verbs, in the field's words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_cudagraph

ROOT = Path(lightning_cudagraph.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Words with which a docstring describes a thing by a relative clause, where it could name it.
OPENINGS = ("What", "Who", "Whose", "Whether", "Which", "Where", "How", "When")
# Words that hide who does something, or that have a plainer one.
WORDS = re.compile(r"\b(somebody|nobody|whoever|anew|in the place of)\b", re.IGNORECASE)


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_docstrings_name_things(path: Path) -> None:
    firsts = [(line, text.split("\n")[0]) for line, text in _docstrings(path)]
    assert [(line, first) for line, first in firsts if first.startswith(OPENINGS)] == []


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_words_are_plain(path: Path) -> None:
    texts = [*_docstrings(path), *_comments(path)]
    assert [(line, found[0]) for line, text in texts if (found := WORDS.search(text))] == []
