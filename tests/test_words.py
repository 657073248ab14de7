"""The style of docstrings and comments: noun phrases or imperative verbs, in the field's words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.sources import FILES, ROOT, tree

# First words of a docstring that describes a thing by a clause or a verb, where it could name it.
OPENINGS = {
    *("What", "Who", "Whose", "Whether", "Which", "Where", "How", "When", "Why", "Those", "Its"),
    *("For", "At", "In", "Before", "After", "Raised", "Called"),
    *("Takes", "Makes", "Finds", "Selects", "Decides", "Replaces", "Trains", "Puts", "Looks"),
}
# Words that hide who does something, or that have a plainer one.
WORDS = re.compile(r"\b(somebody|nobody|whoever|anew|in the place of)\b", re.IGNORECASE)
# Words in names that are not the field's.
NAMES = {
    "apart",
    "company",
    "entitle",
    "excuse",
    "habits",
    "innards",
    "lend",
    "loan",
    "misfit",
    "nap",
    "spotter",
}


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree(path)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_docstrings_name_things() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        for line, text in _docstrings(path)
        if text.split()[0] in OPENINGS
    ] == []


def test_words_are_plain() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {found[0]}"
        for path in FILES
        for line, text in (*_docstrings(path), *_comments(path))
        if (found := WORDS.search(text))
    ] == []


def test_names_are_the_fields() -> None:
    named = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.name)
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    assert len(named) > 2000
    assert [
        found
        for found in named
        if NAMES & {*re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", found[1]).lower())}
    ] == []
