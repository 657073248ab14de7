"""The consumers of a value that a line reads: functions, slices, loops and branches of its source.

A value is followed through local variables, and into and out of functions of the same file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_cudagraph.device.refusals.syntax import (
    Syntax,
    below,
    bound_names,
    called_name,
    calls_of,
    function_around,
    function_of,
    is_on,
    loads,
    syntax_of,
)
from lightning_cudagraph.errors import Location

# Marks beside the names of functions: a slice of a fixed length, the ends of others; an index, to read
# an item or to write one.
WINDOW, START, STOP = "[start:start + n]", "[start:]", "[:stop]"
KEY, PLACE = "[key]", "[place] ="
LOOP, BRANCH = "for", "if"
LOGS = frozenset({"log", "log_dict"})
_READ = ("int", "float", "bool", "item", "tolist", "unique", "unique_consecutive")
# Functions of Python with results that are the value again, or made of it.
_PASS_ON = (
    *("int", "float", "max", "min", "abs", "round", "sum"),
    *("sqrt", "ceil", "floor"),
    *("enumerate", "zip", "sorted", "reversed", "list", "tuple", "set"),
)
# Functions of torch, and methods of tensors.
_DRAWS = {"rand", "randn", "randint", "randperm", "bernoulli", "uniform_", "normal_", "random_"}
# What takes numbers alone: these also of arithmetic with a variable, which may be a tensor.
_OF_NUMBERS = {WINDOW, START, STOP, "range"}


def consumers(where: Location, name: str = "") -> frozenset[str]:
    """The consumers of a value that a line reads: names of functions; also `START`, `STOP` and others.

    If the line binds it to a local variable, those of the variable further down, too.

    Args:
        name: of a number of this name, or what the function or generator of this name returns, instead
            of what is read of a tensor.
    """
    return frozenset(by for by, _ in consuming_nodes(where, name)) - {""}


def consumers_of_attribute(where: Location, name: str) -> frozenset[str]:
    """The consumers of an attribute in the function that a line is in."""
    syntax = syntax_of(where)
    function = function_of(where, syntax)
    inside = () if function is None else ast.walk(function)
    named = [each for each in inside if isinstance(each, ast.Attribute) and each.attr == name]
    found = (by for each in named for by, _ in _all_consumers(each, syntax, True, set()))
    return frozenset(found) - {""}


def flows_on(where: Location) -> bool:
    """True for a line that binds what is read further on in its function."""
    syntax = syntax_of(where)
    assigned = (each for each in syntax if isinstance(each, ast.Assign) and is_on(each, where.line))
    return any(True for each in assigned for _ in _uses_of(each, syntax))


def has_window(where: Location) -> bool:
    """True for a line with a slice of a fixed length, `start : start + n`."""
    syntax = syntax_of(where)
    slices = [each for each in syntax if isinstance(each, ast.Slice) and is_on(each, where.line)]
    return any(_is_window(each, syntax) for each in slices)


def reads_host_draw(where: Location) -> bool:
    """True for a line that reads, or branches on, what torch draws without a `device`."""
    syntax = syntax_of(where)
    on_line = [each for each in syntax if is_on(each, where.line)]
    read = [each for each in on_line if called_name(each) in _READ]
    tests = (each.test for each in on_line if isinstance(each, (ast.If, ast.IfExp)))
    inside = [node for each in (*read, *tests) if is_on(each, where.line) for node in ast.walk(each)]
    used = {each.id for each in inside if isinstance(each, ast.Name)}
    for each in ast.walk(function_around(inside[0], syntax)) if inside else ():
        if isinstance(each, ast.Assign) and used & bound_names(each.targets):
            inside += ast.walk(each.value)
    has_device = any(isinstance(each, ast.keyword) and each.arg == "device" for each in inside)
    return not has_device and any(called_name(each) in _DRAWS for each in inside)


def is_called(where: Location) -> bool:
    """True for a line of a function that code of its file calls, such as a helper of a step."""
    return where.function in syntax_of(where).calls


def recurs(where: Location) -> bool:
    """True for a line of a function that calls itself."""
    syntax = syntax_of(where)
    function = function_of(where, syntax)
    if function is None:
        return False
    itself = f"self.{function.name}" if isinstance(syntax[function], ast.ClassDef) else function.name
    calls = (each for each in ast.walk(function) if isinstance(each, ast.Call))
    return any(ast.unparse(each.func) == itself for each in calls)


def consuming_nodes(where: Location, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The consumers, each with its node."""
    syntax = syntax_of(where)
    known: set[ast.AST] = set()
    for node in syntax:
        named = (getattr(node, "attr", ""), getattr(node, "id", ""))
        if is_on(node, where.line) and (name in named if name else _reads(node, syntax)):
            yield from _all_consumers(node, syntax, bool(name), known)


def _all_consumers(
    node: ast.AST, syntax: Syntax, of_number: bool, known: set[ast.AST], only_numbers: bool = False
) -> Iterator[tuple[str, ast.AST]]:
    """The consumers of an expression, and of the local variables that it is bound to."""
    consumed = _consumer(node, syntax, of_number)
    only_numbers |= consumed.is_mixed
    if not only_numbers or consumed.by in _OF_NUMBERS:
        yield consumed.by, consumed.node
    for use in consumed.uses:
        if use not in known:
            known.add(use)
            yield from _all_consumers(use, syntax, of_number, known, only_numbers)


def _uses_of(assigned: ast.Assign, syntax: Syntax) -> Iterator[ast.AST]:
    """All nodes behind an assignment that read what it binds, local variables and attributes."""
    nodes = [each for target in assigned.targets for each in ast.walk(target)]
    bound = {ast.unparse(each) for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)}
    for each in below(assigned, syntax):
        if isinstance(getattr(each, "ctx", None), ast.Load) and ast.unparse(each) in bound:
            yield each


def _reads(node: ast.AST, syntax: Syntax) -> bool:
    """True for a call that reads a tensor, and for an argument of `range`."""
    above = syntax[node]
    return called_name(node) in _READ or (
        called_name(above) == "range" and node in getattr(above, "args", ())
    )


@dataclass(frozen=True)
class _Consumed:
    """The consumer of a value, and the expressions further on that have it.

    Attributes:
        is_mixed: they have it after arithmetic with another variable.
    """

    by: str
    node: ast.AST
    uses: tuple[ast.AST, ...]
    is_mixed: bool


def _consumer(node: ast.AST, syntax: Syntax, of_number: bool) -> _Consumed:
    """The consumer of the value of an expression.

    Args:
        of_number: behind arithmetic with a variable, which may be a tensor, numbers alone count.
    """
    is_mixed = False
    inside: tuple[ast.AST, ...] = ()  # the functions of this file that it is handed to

    def by(consumer: str, uses: Iterable[ast.AST] = ()) -> _Consumed:
        return _Consumed(consumer, above or node, (*inside, *uses), is_mixed)

    while (above := syntax.get(node)) is not None:
        if isinstance(above, ast.Call) and node is not above.func and called_name(above) not in _PASS_ON:
            functions = syntax.functions.get(called_name(above))
            if not functions:
                return by(called_name(above))
            inside += tuple(each for one in functions for each in _arguments(one, above, node))
        elif isinstance(above, ast.Slice):
            mark = STOP if node is above.upper else WINDOW if _is_window(above, syntax) else START
            return by(mark)
        elif isinstance(above, ast.Subscript) and node is above.slice:
            return by(KEY if isinstance(above.ctx, ast.Load) else PLACE)
        elif isinstance(above, (ast.For, ast.comprehension)) and node is above.iter:
            within = above if isinstance(above, ast.For) else syntax[above]
            return by(LOOP, loads(bound_names([above.target]), ast.walk(within)))
        elif isinstance(above, (ast.comprehension, ast.If, ast.IfExp, ast.While)):
            if isinstance(above, ast.comprehension) or node is above.test:
                return by(BRANCH)
        elif isinstance(above, ast.Tuple) and isinstance(assigned := syntax[above], ast.Assign):
            return by("", loads(bound_names(_targets_of(node, assigned)), below(assigned, syntax)))
        elif isinstance(above, ast.Assign):
            return by("", loads(bound_names(above.targets[:1]), below(above, syntax)))
        elif isinstance(above, ast.Return):
            return by("", calls_of(function_around(above, syntax), syntax))
        elif isinstance(above, ast.stmt):
            break
        elif of_number and isinstance(above, ast.BinOp):
            others = {above.left, above.right} - {node}
            is_mixed |= any(isinstance(each, (ast.Name, ast.Call)) for each in others)
        node = above
    return by("")


def _arguments(function: ast.FunctionDef, call: ast.Call, given: ast.AST) -> Iterator[ast.Name]:
    """The uses of an argument of a call in the function that is called."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
        del names[0]
    if given in call.args:
        names = names[(at := call.args.index(given)) : at + 1]
    else:
        names = [each.arg for each in call.keywords if each is given and each.arg is not None]
    return loads(frozenset(names), ast.walk(function))


def _is_window(found: ast.Slice, syntax: Syntax) -> bool:
    """True for a slice with an end that is its start and a number, `start + n`."""
    end = found.upper
    if isinstance(end, ast.Name):
        around = function_around(end, syntax)
        bound = [each for each in ast.walk(around) if isinstance(each, ast.Assign)]
        values = [each.value for each in bound if end.id in bound_names(each.targets)]
        end = values[0] if len(values) == 1 else end
    if found.lower is None or not (isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add)):
        return False
    return ast.dump(found.lower) in (ast.dump(end.left), ast.dump(end.right))


def _targets_of(node: ast.AST, assigned: ast.Assign) -> list[ast.expr]:
    """The target of one of several values: `b` of `a, b = x, y`, for `y`."""
    first, value = assigned.targets[0], assigned.value
    if isinstance(first, ast.Tuple) and isinstance(value, ast.Tuple) and node in value.elts:
        return first.elts[(at := value.elts.index(node)) : at + 1]
    return [first]
