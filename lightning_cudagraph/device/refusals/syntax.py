"""Syntax trees of the files of users, to find what a line is part of."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache

from lightning_cudagraph.errors import Location


class Syntax(dict[ast.AST, ast.AST]):
    """The parent of each node of a file, and its functions and calls by name."""

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef]]:
        found: dict[str, list[ast.FunctionDef]] = {}
        for node in self:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def calls(self) -> dict[str, list[ast.AST]]:
        found: dict[str, list[ast.AST]] = {}
        for node in self:
            if name := called_name(node):
                found.setdefault(name, []).append(node)
        return found


def syntax_of(where: Location) -> Syntax:
    """The tree of the file that a line is in; empty if it is no Python."""
    return _parsed("".join(linecache.getlines(where.path)))


@lru_cache(maxsize=8)
def _parsed(text: str) -> Syntax:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell of a notebook, with commands of its own
        return Syntax()
    return Syntax((child, node) for node in ast.walk(tree) for child in ast.iter_child_nodes(node))


def is_on(node: ast.AST, line: int) -> bool:
    """True for a node with a part in a line."""
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def called_name(node: ast.AST) -> str:
    """The name of a called function, without its owner; empty for all but calls."""
    called = node.func if isinstance(node, ast.Call) else node
    name = getattr(called, "attr", getattr(called, "id", ""))
    return str(name) if isinstance(node, ast.Call) else ""


def function_of(where: Location, syntax: Syntax) -> ast.FunctionDef | None:
    """The innermost function that a line is in."""
    around = (each for each in syntax if isinstance(each, ast.FunctionDef) and is_on(each, where.line))
    return max(around, key=lambda each: each.lineno, default=None)


def function_around(node: ast.AST, syntax: Syntax) -> ast.AST:
    """The innermost function that a node is in, or the module."""
    while node in syntax and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = syntax[node]
    return node


def calls_of(function: ast.AST, syntax: Syntax) -> list[ast.AST]:
    """The calls of a function, but for those of one that it overrides."""
    name = getattr(function, "name", "")
    calls = syntax.calls.get(name, ())
    return [each for each in calls if getattr(function_around(each, syntax), "name", "") != name]


def bound_names(targets: Iterable[ast.expr]) -> frozenset[str]:
    """The local variables among targets."""
    found: list[ast.expr] = []
    for target in targets:
        found += target.elts if isinstance(target, ast.Tuple) else [target]
    return frozenset(each.id for each in found if isinstance(each, ast.Name))


def below(assigned: ast.Assign, syntax: Syntax) -> Iterator[ast.AST]:
    """All nodes behind an assignment in its function, and all in the loops around it."""
    end = assigned.end_lineno or 0, assigned.end_col_offset or 0
    around: ast.AST = assigned
    while not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        around = syntax[around]
        if isinstance(around, (ast.For, ast.While)):
            yield from ast.walk(around)
    for node in ast.walk(around):
        if isinstance(node, ast.expr) and (node.lineno, node.col_offset) >= end:
            yield node


def loads(names: frozenset[str], within: Iterable[ast.AST]) -> Iterator[ast.Name]:
    """The uses of local variables."""
    for node in within:
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
            yield node
