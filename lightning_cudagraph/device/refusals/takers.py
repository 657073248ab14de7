"""The functions, slices, loops and branches that take a value of a line, found in its source."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from lightning_cudagraph.compat.names.torch_names import OpOverloadPacket
from lightning_cudagraph.errors import Location, see

# Marks beside the names of functions.
START, STOP, LOOP, BRANCH = "[start:]", "[:stop]", "for", "if"
# The kinds of branches.
SKIPS, ASKS_MASK, CHOOSES, STOPS = "returns None", "asks a mask", "chooses", "stops the training"

LOGS = frozenset({"log", "log_dict"})
_READ = ("int", "item", "tolist", "unique", "unique_consecutive")
# Functions of Python with results that are the value again, or made of it.
_PASS_ON = (
    *("int", "float", "max", "min", "abs", "round", "sum"),
    *("sqrt", "ceil", "floor"),
    *("enumerate", "zip", "sorted", "reversed", "list", "tuple", "set"),
)
_ASK_ALL = ("all", "any")
# What takes numbers alone: these also of arithmetic with a variable, which may be a tensor.
_OF_NUMBERS = {START, STOP, "range"}
_Parents = dict[ast.AST, ast.AST]

# By what takes a tensor, or a number that changes, where a graph needs a fixed number.
_INSTEAD = {
    START: "Index with a tensor of places: `places = (pointer + torch.arange(n, device=pointer.device))"
    " % len(queue)`, and `queue[places] = ...`." + see("indices_and_lengths"),
    "roll": "Roll by an index, with `size = x.size(1)` and the shift as a tensor:"
    " `x.index_select(1, (torch.arange(size, device=x.device) - shift) % size)`."
    + see("indices_and_lengths"),
    "range": "Loop as often as is needed at most, and leave out what is beyond,"
    " `x = torch.where(i < n, new, x)`." + see("early_exit"),
    STOP: "Keep the full length, and leave the rest out by a mask,"
    " `torch.arange(len(x), device=x.device) < length`." + see("indices_and_lengths"),
}
_SIZE = (
    "Use a size that is the same in every step, the largest one, and leave the rest out by a mask,"
    " `torch.arange(size, device=x.device) < length`. Or count it in the collate function, and pass"
    " it with the batch as a whole number: each has a graph." + see("indices_and_lengths")
)


def instead_of(takers: Iterable[str]) -> str:
    """The remedy where these take a tensor, or a number that changes; empty for others."""
    takers = [*takers]
    named = (remedy for taker, remedy in _INSTEAD.items() if taker in takers)
    return next(named, _SIZE if any(map(_takes_a_size, takers)) else "")


def instead_of_draw(takers: Collection[str]) -> str:
    """The remedy for a random number of the host that these take."""
    if BRANCH in takers:
        return (
            "Choose on the device: `x = torch.where(torch.rand((), device=x.device) < p, f(x), x)`."
            " Or draw in `on_train_batch_start` into a registered buffer, and choose by that; or in"
            " the collate function, and pass a whole number of few values with the batch: each has a"
            " graph."
        )
    if START in takers or STOP in takers:
        return (
            "Draw in `on_train_batch_start`, and keep what the slice selects as a mask in a registered"
            " buffer, `self.mask.zero_()` and `self.mask[start:stop] = True`; in the step,"
            " `torch.where(self.mask, new, x)`."
        )
    return ""


def takers(where: Location, name: str = "") -> frozenset[str]:
    """Names of the functions that take a value which a line reads; also `START`, `STOP` and others.

    If the line binds it to a local variable, those that take the variable further down, too.

    Args:
        name: of a number of this name, or what the function or generator of this name returns, instead
            of what is read of a tensor.
    """
    parents = _parents_in(where)
    found: set[str] = set()
    known: set[ast.AST] = set()
    for node in parents:
        named = (getattr(node, "attr", ""), getattr(node, "id", ""))
        if _is_on(node, where.line) and (name in named if name else _reads(node, parents)):
            found |= _all_takers(node, parents, bool(name), known)
    return frozenset(found - {""})


def _all_takers(node: ast.AST, parents: _Parents, of_number: bool, known: set[ast.AST]) -> set[str]:
    """The takers of an expression, and of the local variables that it is bound to."""
    taken = _taker(node, parents, of_number)
    found = {taken.by}
    for load in _loads(taken):
        if load not in known:
            known.add(load)
            found |= _all_takers(load, parents, of_number, known)
    return found & _OF_NUMBERS if taken.is_mixed else found


def branch(where: Location) -> str:
    """The kind of a branch in a line, `SKIPS` or another one; empty if there is none."""
    parents = _parents_in(where)
    for node in parents:
        if isinstance(node, (ast.If, ast.IfExp)) and _is_on(node.test, where.line):
            return _kind_of(node, parents)
    return ""


def _kind_of(node: ast.If | ast.IfExp, parents: _Parents) -> str:
    """`ASKS_MASK` for a branch that leaves out what it asks about, or does something to it."""
    asked = _names([node.test])
    if isinstance(node, ast.If):
        outcomes: list[ast.AST] = [*node.body, *node.orelse]
        if any(map(_stops_training, outcomes)):
            return STOPS
        skips = any(isinstance(each, ast.Return) and _is_none(each.value) for each in outcomes)
        bound = [each for each in outcomes if isinstance(each, ast.Assign) and _is_none(each.value)]
        leaves_out = any(asked & _names(each.targets) for each in bound)
    else:
        outcomes = [node.body, node.orelse]
        leaves_out = any(map(_is_none, outcomes))
        skips = leaves_out and isinstance(parents[node], ast.Return)
    inside = [*ast.walk(node.test)]
    if any(_name(each) in _ASK_ALL or isinstance(each, (ast.In, ast.NotIn)) for each in inside):
        # A mask of padding is not compared by size, and not written at.
        is_mask = not any(map(_compares_values, inside)) and not asked & _names(_indices(outcomes))
        return ASKS_MASK if skips or leaves_out or (is_mask and asked & _names(outcomes)) else CHOOSES
    return SKIPS if skips else ASKS_MASK if leaves_out else CHOOSES


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


@cache
def _takes_a_size(name: str) -> bool:
    """True for a function of torch with an argument that sizes are passed as."""
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    schemas = [str(getattr(packet, each)._schema) for each in names]
    return name == "arange" or any("SymInt" in schema for schema in schemas)


def _parents_in(where: Location) -> _Parents:
    return _parents("".join(linecache.getlines(where.path)))


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


@dataclass(frozen=True)
class _Taken:
    """The taker of a value, and the local variables that it is bound to.

    Attributes:
        names: the variables, which are looked for in `within`.
        within: the code behind the assignment, or of the loop.
        is_mixed: it is bound after arithmetic with another variable.
    """

    by: str = ""
    names: frozenset[str] = frozenset()
    within: Iterable[ast.AST] = ()
    is_mixed: bool = False


def _taker(node: ast.AST, parents: _Parents, of_number: bool) -> _Taken:
    """The taker of the value of an expression.

    Args:
        of_number: behind arithmetic with a variable, which may be a tensor, numbers alone count.
    """
    is_mixed = False

    def by(taker: str) -> _Taken:
        return _Taken(taker if not is_mixed or taker in _OF_NUMBERS else "")

    while (above := parents.get(node)) is not None:
        if isinstance(above, ast.Call) and node is not above.func and _name(above) not in _PASS_ON:
            return by(_name(above))
        if isinstance(above, ast.Slice):
            return by(START if node is above.lower else STOP)
        if isinstance(above, (ast.For, ast.comprehension)) and node is above.iter:
            within = above if isinstance(above, ast.For) else parents[above]
            return _Taken(by(LOOP).by, _bound([above.target]), ast.walk(within), is_mixed)
        if isinstance(above, ast.comprehension):
            return by(BRANCH)
        if isinstance(above, (ast.If, ast.IfExp, ast.While)) and node is above.test:
            return by(BRANCH)
        if isinstance(above, ast.Tuple) and isinstance(assigned := parents[above], ast.Assign):
            return _Taken("", _bound(_targets_of(node, assigned)), _below(assigned, parents), is_mixed)
        if isinstance(above, ast.Assign):
            return _Taken("", _bound(above.targets[:1]), _below(above, parents), is_mixed)
        if isinstance(above, ast.stmt):
            return _Taken()
        if of_number and isinstance(above, ast.BinOp):
            others = {above.left, above.right} - {node}
            is_mixed |= any(isinstance(each, (ast.Name, ast.Call)) for each in others)
        node = above
    return _Taken()


def _targets_of(node: ast.AST, assigned: ast.Assign) -> list[ast.expr]:
    """The target of one of several values: `b` of `a, b = x, y`, for `y`."""
    first, value = assigned.targets[0], assigned.value
    if isinstance(first, ast.Tuple) and isinstance(value, ast.Tuple) and node in value.elts:
        return first.elts[(at := value.elts.index(node)) : at + 1]
    return [first]


def _bound(targets: Iterable[ast.expr]) -> frozenset[str]:
    """The local variables among targets."""
    found: list[ast.expr] = []
    for target in targets:
        found += target.elts if isinstance(target, ast.Tuple) else [target]
    return frozenset(each.id for each in found if isinstance(each, ast.Name))


def _below(assigned: ast.Assign, parents: _Parents) -> Iterator[ast.AST]:
    """All nodes behind an assignment in its function."""
    around: ast.AST = assigned
    while around in parents and not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
        around = parents[around]
    end = assigned.end_lineno or 0, assigned.end_col_offset or 0
    for node in ast.walk(around):
        if isinstance(node, ast.expr) and (node.lineno, node.col_offset) >= end:
            yield node


def _loads(taken: _Taken) -> Iterator[ast.Name]:
    """The uses of the variables that a value is bound to."""
    for node in taken.within:
        if isinstance(node, ast.Name) and node.id in taken.names and isinstance(node.ctx, ast.Load):
            yield node
