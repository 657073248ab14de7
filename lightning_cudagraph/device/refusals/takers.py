"""The functions, slices and loops that take a value which a line reads, found in its source."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import cache, lru_cache

import torch

from lightning_cudagraph.compat.names.torch_names import OpOverloadPacket
from lightning_cudagraph.errors import Location

# Marks beside the names of functions.
START, STOP, LOOP = "[start:]", "[:stop]", "for"

_READ = ("int", "item", "tolist", "unique", "unique_consecutive")
# Functions of Python with results that are the value again, or made of it.
_PASS_ON = (
    *("int", "float", "max", "min", "abs", "round", "sum"),
    *("enumerate", "zip", "sorted", "reversed", "list", "tuple", "set"),
)
_Parents = dict[ast.AST, ast.AST]


def takers(where: Location) -> frozenset[str]:
    """Names of the functions that take a value which a line reads; also `START`, `STOP` and `LOOP`.

    If the line binds it to a local variable, those that take the variable further down, too.
    """
    parents = _parents("".join(linecache.getlines(where.path)))
    found: set[str] = set()
    for node in parents:
        if _is_on(node, where.line) and _reads(node, parents):
            taker, bound = _taker(node, parents)
            found.add(taker)
            if bound:
                loads = (n for n in _function_around(node, parents) if _is_load(n, bound, where.line))
                found |= {_taker(load, parents)[0] for load in loads}
    return frozenset(found - {""})


@cache
def takes_a_size(name: str) -> bool:
    """True for a function of torch with an argument that sizes are passed as."""
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    schemas = [str(getattr(packet, each)._schema) for each in names]
    return name == "arange" or any("SymInt" in schema for schema in schemas)


@lru_cache(maxsize=8)
def _parents(text: str) -> _Parents:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell of a notebook, with commands of its own
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _is_on(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def _reads(node: ast.AST, parents: _Parents) -> bool:
    """True for a call that reads a tensor, and for an argument of `range`."""
    above = parents[node]
    return _name(node) in _READ or (_name(above) == "range" and node in getattr(above, "args", ()))


def _name(node: ast.AST) -> str:
    """The name of a called function, without its owner; empty for all but calls."""
    called = node.func if isinstance(node, ast.Call) else node
    name = getattr(called, "attr", getattr(called, "id", ""))
    return str(name) if isinstance(node, ast.Call) else ""


def _taker(node: ast.AST, parents: _Parents) -> tuple[str, str]:
    """The taker of the value of an expression; or the local variable that it is bound to."""
    while (above := parents.get(node)) is not None:
        if isinstance(above, ast.Call) and node is not above.func and _name(above) not in _PASS_ON:
            return _name(above), ""
        if isinstance(above, ast.Slice):
            return (START if node is above.lower else STOP), ""
        if isinstance(above, (ast.For, ast.comprehension)):
            return (LOOP if node is above.iter else ""), ""
        if isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Name):
            return "", above.targets[0].id
        if isinstance(above, ast.stmt):
            return "", ""
        node = above
    return "", ""


def _function_around(node: ast.AST, parents: _Parents) -> Iterator[ast.AST]:
    """All nodes of the function that a node is in."""
    while node in parents and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = parents[node]
    return ast.walk(node)


def _is_load(node: ast.AST, name: str, line: int) -> bool:
    return isinstance(node, ast.Name) and node.id == name and node.lineno > line
