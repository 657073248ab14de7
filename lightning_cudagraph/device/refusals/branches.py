"""The kinds of branches: what a line does with what it asks for."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from lightning_cudagraph.device.refusals.consumers import BRANCH, LOGS, consuming_nodes
from lightning_cudagraph.device.refusals.syntax import (
    Syntax,
    bound_names,
    called_name,
    calls_of,
    function_around,
    is_on,
    syntax_of,
)
from lightning_cudagraph.errors import Location

SKIPS, ASKS_MASK, CHOOSES, STOPS = "returns None", "asks a mask", "chooses", "stops the training"
LACKS, RAISES = "returns None to a caller that goes on", "raises an error"
TELLS = "calls functions alone, and takes no results"
_ASK_ALL = ("all", "any")


def branch(where: Location) -> str:
    """The kind of a branch in a line, or on what it reads; empty if there is none."""
    syntax = syntax_of(where)
    branches = [each for each in syntax if isinstance(each, (ast.If, ast.IfExp))]
    of_line = [each for each in branches if is_on(each.test, where.line)]
    further = (node for by, node in consuming_nodes(where) if by == BRANCH and node in branches)
    found = next(iter(of_line or further), None)
    return "" if found is None else _kind_of(found, syntax)


def _kind_of(node: ast.If | ast.IfExp, syntax: Syntax) -> str:
    """`ASKS_MASK` for a branch that leaves out what it asks about, or does something to it."""
    asked = _names([node.test])
    if isinstance(node, ast.If):
        outcomes: list[ast.AST] = [*node.body, *node.orelse]
        if any(map(_stops_training, outcomes)):
            return STOPS
        if any(isinstance(each, ast.Raise) for each in outcomes):
            return RAISES
        skips = _returns_none(outcomes)
        if skips and (kind := _kind_of_function(function_around(node, syntax), syntax)):
            return kind
        bound = [each for each in outcomes if isinstance(each, ast.Assign) and _is_none(each.value)]
        lacks, leaves_out = bool(bound), any(asked & _names(each.targets) for each in bound)
    else:
        outcomes = [node.body, node.orelse]
        lacks = leaves_out = any(map(_is_none, outcomes))
        skips = leaves_out and isinstance(syntax[node], ast.Return)
    inside = [*ast.walk(node.test)]
    if any(called_name(each) in _ASK_ALL or isinstance(each, (ast.In, ast.NotIn)) for each in inside):
        # A mask of padding is not compared by size, and not written at.
        is_mask = not any(map(_compares_values, inside)) and not asked & _names(_indices(outcomes))
        return ASKS_MASK if skips or lacks or (is_mask and asked & _names(outcomes)) else CHOOSES
    if isinstance(node, ast.If) and all(map(_tells, outcomes)):
        return TELLS
    return SKIPS if skips else ASKS_MASK if leaves_out else CHOOSES


def _kind_of_function(function: ast.AST, syntax: Syntax) -> str:
    """The kind of a branch by which a function returns None; empty if its callers are not known."""
    if getattr(function, "name", "") == "training_step":
        return SKIPS
    return "" if all(_passes_on_none(each, syntax) for each in calls_of(function, syntax)) else LACKS


def _passes_on_none(call: ast.AST, syntax: Syntax) -> bool:
    """True for a call whose caller returns None where the call does."""
    above = syntax[call]
    bound = bound_names(above.targets) if isinstance(above, ast.Assign) else frozenset()
    branches = [each for each in ast.walk(function_around(call, syntax)) if isinstance(each, ast.If)]
    behind = (each.body for each in branches if bound & _names([each.test]))
    return isinstance(above, ast.Return) or any(map(_returns_none, behind))


def _returns_none(statements: Iterable[ast.AST]) -> bool:
    return any(isinstance(each, ast.Return) and _is_none(each.value) for each in statements)


def _tells(node: ast.AST) -> bool:
    """True for a call without a use of its result, which changes nothing of the step's.

    So not for one that writes into a tensor as `mul_` does, or for a method of the module's own.
    """
    if isinstance(node, ast.If):
        return all(map(_tells, (*node.body, *node.orelse)))
    called = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(called, ast.Call) or not called.args or called_name(called).endswith("_"):
        return False
    is_own = isinstance(called.func, ast.Attribute) and ast.unparse(called.func.value) == "self"
    return not is_own or called_name(called) in {*LOGS, "print"}


def _stops_training(node: ast.AST) -> bool:
    """True for an assignment to `should_stop`, by which Lightning ends a fit."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(each, ast.Attribute) and each.attr == "should_stop" for each in targets)


def _indices(nodes: Iterable[ast.AST]) -> list[ast.AST]:
    inside = (each for node in nodes for each in ast.walk(node))
    return [each.slice for each in inside if isinstance(each, ast.Subscript)]


def _compares_values(node: ast.AST) -> bool:
    """True for a comparison by size, or with a variable."""
    if not isinstance(node, ast.Compare) or isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return False
    is_equality = isinstance(node.ops[0], (ast.Eq, ast.NotEq, ast.Is, ast.IsNot))
    return not is_equality or not isinstance(node.comparators[0], ast.Constant)


def _is_none(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of variables and attributes."""
    found = (getattr(each, "id", getattr(each, "attr", "")) for node in nodes for each in ast.walk(node))
    return {*found} - {"", "self", "torch", *_ASK_ALL}
