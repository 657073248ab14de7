"""The consumers of a value that a line reads: functions, slices, loops and branches of its source.

A value is followed through local variables, and into and out of functions of the same file.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch

from lightning_cudagraph.compat.names.torch_names import OpOverloadPacket
from lightning_cudagraph.errors import AS_NUMBER, Location, see

# Marks beside the names of functions: a slice of a fixed length, the ends of others; an index, to read
# an item or to write one.
WINDOW, START, STOP = "[start:start + n]", "[start:]", "[:stop]"
KEY, PLACE = "[key]", "[place] ="
LOOP, BRANCH = "for", "if"
# The kinds of branches.
SKIPS, ASKS_MASK, CHOOSES, STOPS = "returns None", "asks a mask", "chooses", "stops the training"
LACKS, RAISES = "returns None to a caller that goes on", "raises an error"
TELLS = "calls functions alone, and takes no results"

LOGS = frozenset({"log", "log_dict"})
_READ = ("int", "float", "bool", "item", "tolist", "unique", "unique_consecutive")
# Functions of Python with results that are the value again, or made of it.
_PASS_ON = (
    *("int", "float", "max", "min", "abs", "round", "sum"),
    *("sqrt", "ceil", "floor"),
    *("enumerate", "zip", "sorted", "reversed", "list", "tuple", "set"),
)
_ASK_ALL = ("all", "any")
# Functions of torch, and methods of tensors.
_DRAWS = {"rand", "randn", "randint", "randperm", "bernoulli", "uniform_", "normal_", "random_"}
# What takes numbers alone: these also of arithmetic with a variable, which may be a tensor.
_OF_NUMBERS = {WINDOW, START, STOP, "range"}


class _Parents(dict[ast.AST, ast.AST]):
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
            if name := _name(node):
                found.setdefault(name, []).append(node)
        return found


# By what takes a tensor, or a number that changes, where a graph needs a fixed number.
_INSTEAD = {
    WINDOW: "Index with a tensor of places: `places = (pointer + torch.arange(n, device=pointer.device))"
    " % len(queue)`, and `queue[places] = ...`." + see("indices_and_lengths"),
    "roll": "Roll by an index, with `size = x.size(1)` and the shift as a tensor:"
    " `x.index_select(1, (torch.arange(size, device=x.device) - shift) % size)`."
    + see("indices_and_lengths"),
    "range": "Loop as often as is needed at most, and leave out what is beyond,"
    " `x = torch.where(i < n, new, x)`." + see("loops_that_end"),
    START: "Keep the full length, and choose by a mask: `at = torch.arange(len(x), device=x.device)`,"
    " `inside = (at >= start) & (at < stop)`, and `torch.where(inside, new, x)`, with tensors as `start`"
    " and `stop`; of two dimensions, `rows[:, None] & columns`." + see("indices_and_lengths"),
    STOP: "Keep the full length, and leave the rest out by a mask,"
    " `torch.arange(len(x), device=x.device) < length`; of columns, `x.size(1)` in place of `len(x)`."
    " The length is a tensor: `y.max().clamp(max=9)` for `min(int(y.max()), 9)`."
    + see("indices_and_lengths"),
}
_AUGMENTATION = (
    "Move an augmentation, which needs the batch alone, as it is to `on_after_batch_transfer`, which"
    " runs between two steps, under `if self.trainer.training:`; a number that the step needs of it goes"
    " with the batch, as a tensor on its device."
)
_SIZE = (
    "Use a size that is the same in every step, the largest one, and leave the rest out by a mask,"
    " `torch.arange(size, device=x.device) < length`. Or count it in the collate function, and pass"
    " it with the batch as a whole number: each has a graph." + see("indices_and_lengths")
)
_OF_ITEMS = {
    KEY: 'Make the table a tensor, `self.register_buffer("table", torch.tensor([...]))`, and index it'
    " with the tensor itself, without a loop: `self.table[y]`." + see("loops"),
    PLACE: "Make it a registered buffer, and add at all places at once, without a loop:"
    " `self.counts.index_put_((x, y), self.counts.new_ones(len(x)), accumulate=True)`." + see("loops"),
}


def instead_of(consumers: Iterable[str]) -> str:
    """The remedy where these take a tensor, or a number that changes; empty for others."""
    consumers = [*consumers]
    last = _SIZE if any(map(_takes_a_size, consumers)) else of_item(consumers)
    return next((remedy for consumer, remedy in _INSTEAD.items() if consumer in consumers), last)


def of_item(consumers: Collection[str]) -> str:
    """The remedy where these index one item; empty for others."""
    return next((remedy for consumer, remedy in _OF_ITEMS.items() if consumer in consumers), "")


def of_place(consumers: Collection[str], index: str) -> str:
    """The remedy for a number that the step changes, where it is an index or an end of a slice."""
    if ends := {WINDOW, START, STOP} & {*consumers}:
        return instead_of(ends)
    if {KEY, PLACE} & {*consumers}:
        return (
            f"As an index, give it a dimension: `x[{index}.view(1)] = y`, and `x[{index}.view(1)][0]` to"
            " read." + see("indices_and_lengths")
        )
    return ""


def of_draw(consumers: Collection[str], allowance: str) -> str:
    """The remedy for a random number of the host that these take.

    Args:
        allowance: the end of the remedy for a number that nothing may depend on.
    """
    if BRANCH in consumers:
        return (
            f"{_AUGMENTATION} Else choose on the device: `x = torch.where(torch.rand((),"
            " device=x.device) < p, f(x), x)`. Or draw in `on_train_batch_start` into a registered"
            " buffer, and choose by that."
        )
    if {WINDOW, START, STOP} & {*consumers}:
        return (
            f"{_AUGMENTATION} Else draw in `on_train_batch_start`, and keep what the slice selects in a"
            " registered buffer: places, `self.places.copy_(start + torch.arange(n))`, for"
            " `x[self.places]`; or a mask, `self.mask.zero_()` and `self.mask[start:stop] ="
            " True`, for `torch.where(self.mask, new, x)`."
        )
    return (
        "Draw on the device (`torch.rand(..., device=x.device)`), or in `on_train_batch_start` into a"
        f" registered buffer ({AS_NUMBER}). {_AUGMENTATION}{allowance}"
    )


def consumers(where: Location, name: str = "") -> frozenset[str]:
    """The consumers of a value that a line reads: names of functions; also `START`, `STOP` and others.

    If the line binds it to a local variable, those of the variable further down, too.

    Args:
        name: of a number of this name, or what the function or generator of this name returns, instead
            of what is read of a tensor.
    """
    return frozenset(by for by, _ in _consumers(where, name)) - {""}


def _consumers(where: Location, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The consumers, each with its node."""
    parents = _parents_in(where)
    known: set[ast.AST] = set()
    for node in parents:
        named = (getattr(node, "attr", ""), getattr(node, "id", ""))
        if _is_on(node, where.line) and (name in named if name else _reads(node, parents)):
            yield from _all_consumers(node, parents, bool(name), known)


def _all_consumers(
    node: ast.AST, parents: _Parents, of_number: bool, known: set[ast.AST], only_numbers: bool = False
) -> Iterator[tuple[str, ast.AST]]:
    """The consumers of an expression, and of the local variables that it is bound to."""
    consumed = _consumer(node, parents, of_number)
    only_numbers |= consumed.is_mixed
    if not only_numbers or consumed.by in _OF_NUMBERS:
        yield consumed.by, consumed.node
    for use in consumed.uses:
        if use not in known:
            known.add(use)
            yield from _all_consumers(use, parents, of_number, known, only_numbers)


def consumers_of_attribute(where: Location, name: str) -> frozenset[str]:
    """The consumers of an attribute in the function that a line is in."""
    parents = _parents_in(where)
    function = _function_of(where, parents)
    inside = () if function is None else ast.walk(function)
    named = [each for each in inside if isinstance(each, ast.Attribute) and each.attr == name]
    found = (by for each in named for by, _ in _all_consumers(each, parents, True, set()))
    return frozenset(found) - {""}


def flows_on(where: Location, other: Location | None = None) -> bool:
    """True for a line that binds what is read further on in its function, or on one other line."""
    if other is not None and other.path != where.path:
        return False
    parents = _parents_in(where)
    uses = (
        use
        for each in parents
        if isinstance(each, ast.Assign) and _is_on(each, where.line)
        for use in _uses_of(each, parents)
    )
    return any(other is None or _is_on(use, other.line) for use in uses)


def _uses_of(assigned: ast.Assign, parents: _Parents) -> Iterator[ast.AST]:
    """All nodes behind an assignment that read what it binds, local variables and attributes."""
    nodes = [each for target in assigned.targets for each in ast.walk(target)]
    bound = {ast.unparse(each) for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)}
    for each in _below(assigned, parents):
        if isinstance(getattr(each, "ctx", None), ast.Load) and ast.unparse(each) in bound:
            yield each


def has_window(where: Location) -> bool:
    """True for a line with a slice of a fixed length, `start : start + n`."""
    parents = _parents_in(where)
    slices = [each for each in parents if isinstance(each, ast.Slice) and _is_on(each, where.line)]
    return any(_is_window(each, parents) for each in slices)


def branch(where: Location) -> str:
    """The kind of a branch in a line, or on what it reads; empty if there is none."""
    parents = _parents_in(where)
    branches = [each for each in parents if isinstance(each, (ast.If, ast.IfExp))]
    of_line = [each for each in branches if _is_on(each.test, where.line)]
    further = (node for by, node in _consumers(where) if by == BRANCH and node in branches)
    found = next(iter(of_line or further), None)
    return "" if found is None else _kind_of(found, parents)


def reads_host_draw(where: Location) -> bool:
    """True for a line that reads, or branches on, what torch draws without a `device`."""
    parents = _parents_in(where)
    on_line = [each for each in parents if _is_on(each, where.line)]
    read = [each for each in on_line if _name(each) in _READ]
    tests = (each.test for each in on_line if isinstance(each, (ast.If, ast.IfExp)))
    inside = [node for each in (*read, *tests) if _is_on(each, where.line) for node in ast.walk(each)]
    used = {each.id for each in inside if isinstance(each, ast.Name)}
    for each in ast.walk(_function_around(inside[0], parents)) if inside else ():
        if isinstance(each, ast.Assign) and used & _bound(each.targets):
            inside += ast.walk(each.value)
    has_device = any(isinstance(each, ast.keyword) and each.arg == "device" for each in inside)
    return not has_device and any(_name(each) in _DRAWS for each in inside)


def is_called(where: Location) -> bool:
    """True for a line of a function that code of its file calls, such as a helper of a step."""
    return where.function in _parents_in(where).calls


def recurs(where: Location) -> bool:
    """True for a line of a function that calls itself."""
    parents = _parents_in(where)
    function = _function_of(where, parents)
    if function is None:
        return False
    itself = f"self.{function.name}" if isinstance(parents[function], ast.ClassDef) else function.name
    calls = (each for each in ast.walk(function) if isinstance(each, ast.Call))
    return any(ast.unparse(each.func) == itself for each in calls)


def _function_of(where: Location, parents: _Parents) -> ast.FunctionDef | None:
    """The innermost function that a line is in."""
    around = (each for each in parents if isinstance(each, ast.FunctionDef) and _is_on(each, where.line))
    return max(around, key=lambda each: each.lineno, default=None)


def _kind_of(node: ast.If | ast.IfExp, parents: _Parents) -> str:
    """`ASKS_MASK` for a branch that leaves out what it asks about, or does something to it."""
    asked = _names([node.test])
    if isinstance(node, ast.If):
        outcomes: list[ast.AST] = [*node.body, *node.orelse]
        if any(map(_stops_training, outcomes)):
            return STOPS
        if any(isinstance(each, ast.Raise) for each in outcomes):
            return RAISES
        skips = _returns_none(outcomes)
        if skips and (kind := _kind_of_function(_function_around(node, parents), parents)):
            return kind
        bound = [each for each in outcomes if isinstance(each, ast.Assign) and _is_none(each.value)]
        lacks, leaves_out = bool(bound), any(asked & _names(each.targets) for each in bound)
    else:
        outcomes = [node.body, node.orelse]
        lacks = leaves_out = any(map(_is_none, outcomes))
        skips = leaves_out and isinstance(parents[node], ast.Return)
    inside = [*ast.walk(node.test)]
    if any(_name(each) in _ASK_ALL or isinstance(each, (ast.In, ast.NotIn)) for each in inside):
        # A mask of padding is not compared by size, and not written at.
        is_mask = not any(map(_compares_values, inside)) and not asked & _names(_indices(outcomes))
        return ASKS_MASK if skips or lacks or (is_mask and asked & _names(outcomes)) else CHOOSES
    if isinstance(node, ast.If) and all(map(_tells, outcomes)):
        return TELLS
    return SKIPS if skips else ASKS_MASK if leaves_out else CHOOSES


def _kind_of_function(function: ast.AST, parents: _Parents) -> str:
    """The kind of a branch by which a function returns None; empty if its callers are not known."""
    if getattr(function, "name", "") == "training_step":
        return SKIPS
    return "" if all(_passes_on_none(each, parents) for each in _calls_of(function, parents)) else LACKS


def _passes_on_none(call: ast.AST, parents: _Parents) -> bool:
    """True for a call whose caller returns None where the call does."""
    above = parents[call]
    bound = _bound(above.targets) if isinstance(above, ast.Assign) else frozenset()
    branches = [each for each in ast.walk(_function_around(call, parents)) if isinstance(each, ast.If)]
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
    if not isinstance(called, ast.Call) or not called.args or _name(called).endswith("_"):
        return False
    is_own = isinstance(called.func, ast.Attribute) and ast.unparse(called.func.value) == "self"
    return not is_own or _name(called) in {*LOGS, "print"}


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
        return _Parents()
    return _Parents((child, node) for node in ast.walk(tree) for child in ast.iter_child_nodes(node))


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
class _Consumed:
    """The consumer of a value, and the expressions further on that have it.

    Attributes:
        is_mixed: they have it after arithmetic with another variable.
    """

    by: str
    node: ast.AST
    uses: tuple[ast.AST, ...]
    is_mixed: bool


def _consumer(node: ast.AST, parents: _Parents, of_number: bool) -> _Consumed:
    """The consumer of the value of an expression.

    Args:
        of_number: behind arithmetic with a variable, which may be a tensor, numbers alone count.
    """
    is_mixed = False
    inside: tuple[ast.AST, ...] = ()  # the functions of this file that it is handed to

    def by(consumer: str, uses: Iterable[ast.AST] = ()) -> _Consumed:
        return _Consumed(consumer, above or node, (*inside, *uses), is_mixed)

    while (above := parents.get(node)) is not None:
        if isinstance(above, ast.Call) and node is not above.func and _name(above) not in _PASS_ON:
            functions = parents.functions.get(_name(above))
            if not functions:
                return by(_name(above))
            inside += tuple(each for one in functions for each in _arguments(one, above, node))
        elif isinstance(above, ast.Slice):
            mark = STOP if node is above.upper else WINDOW if _is_window(above, parents) else START
            return by(mark)
        elif isinstance(above, ast.Subscript) and node is above.slice:
            return by(KEY if isinstance(above.ctx, ast.Load) else PLACE)
        elif isinstance(above, (ast.For, ast.comprehension)) and node is above.iter:
            within = above if isinstance(above, ast.For) else parents[above]
            return by(LOOP, _loads(_bound([above.target]), ast.walk(within)))
        elif isinstance(above, (ast.comprehension, ast.If, ast.IfExp, ast.While)):
            if isinstance(above, ast.comprehension) or node is above.test:
                return by(BRANCH)
        elif isinstance(above, ast.Tuple) and isinstance(assigned := parents[above], ast.Assign):
            return by("", _loads(_bound(_targets_of(node, assigned)), _below(assigned, parents)))
        elif isinstance(above, ast.Assign):
            return by("", _loads(_bound(above.targets[:1]), _below(above, parents)))
        elif isinstance(above, ast.Return):
            return by("", _calls_of(_function_around(above, parents), parents))
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
    return _loads(frozenset(names), ast.walk(function))


def _calls_of(function: ast.AST, parents: _Parents) -> list[ast.AST]:
    """The calls of a function, but for those of one that it overrides."""
    name = getattr(function, "name", "")
    calls = parents.calls.get(name, ())
    return [each for each in calls if getattr(_function_around(each, parents), "name", "") != name]


def _function_around(node: ast.AST, parents: _Parents) -> ast.AST:
    while node in parents and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = parents[node]
    return node


def _is_window(found: ast.Slice, parents: _Parents) -> bool:
    """True for a slice with an end that is its start and a number, `start + n`."""
    end = found.upper
    if isinstance(end, ast.Name):
        around = _function_around(end, parents)
        bound = [each for each in ast.walk(around) if isinstance(each, ast.Assign)]
        values = [each.value for each in bound if end.id in _bound(each.targets)]
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


def _bound(targets: Iterable[ast.expr]) -> frozenset[str]:
    """The local variables among targets."""
    found: list[ast.expr] = []
    for target in targets:
        found += target.elts if isinstance(target, ast.Tuple) else [target]
    return frozenset(each.id for each in found if isinstance(each, ast.Name))


def _below(assigned: ast.Assign, parents: _Parents) -> Iterator[ast.AST]:
    """All nodes behind an assignment in its function, and all in the loops around it."""
    end = assigned.end_lineno or 0, assigned.end_col_offset or 0
    around: ast.AST = assigned
    while not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        around = parents[around]
        if isinstance(around, (ast.For, ast.While)):
            yield from ast.walk(around)
    for node in ast.walk(around):
        if isinstance(node, ast.expr) and (node.lineno, node.col_offset) >= end:
            yield node


def _loads(names: frozenset[str], within: Iterable[ast.AST]) -> Iterator[ast.Name]:
    """The uses of local variables."""
    for node in within:
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
            yield node
