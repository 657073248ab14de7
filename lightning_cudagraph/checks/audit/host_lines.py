"""Lines of user code that set an attribute, found in the bytecode."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from types import CodeType
from typing import Any

import numpy as np

from lightning_cudagraph.checks.walk.parts import Moved
from lightning_cudagraph.device.lines.user_lines import has_source, is_installed, location_in
from lightning_cudagraph.errors import Location

# The generator that the functions of `numpy.random` draw from.
NUMPYS_OWN: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
# Methods that change a built-in container.
CHANGES = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"),
        *("pop", "popleft", "popitem", "remove", "discard", "clear", "sort", "reverse", "rotate"),
        *("difference_update", "intersection_update", "symmetric_difference_update", "move_to_end"),
    )
)
# The names by which code has it; the last one is that of Python's own generator too.
RANDOM_OF_NUMPY = ("np.random", "numpy.random", "random")
_ITEM = "[]"
_OF_ITEMS = ("STORE_SUBSCR", "DELETE_SUBSCR")
_UPDATES_ITEM = ("COPY", "DUP_TOP_TWO")  # `x[key] += ...` has the key twice
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# Between the keys of items.
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_OP", "EXTENDED_ARG")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_MENTIONS = 2
_NOWHERE = 3


def line_that_sets(change: Moved, codes: Iterable[CodeType]) -> Location | None:
    """The first line that sets the changed attribute, changes an item of it, or mentions it."""
    codes, keys = [*codes], _keys_in(change)
    lines = (first_line(name, change.draws, codes, keys) for name in _names_of(change))
    return next((line for line in lines if line is not None), None)


def lines_that_draw(change: Moved, codes: Iterable[CodeType]) -> Iterator[Location]:
    """All lines that name a random generator."""
    for code in _own([*codes]):
        for name, line in _names(code):
            if name in _names_of(change)[:2]:
                yield location_in(code, line)


def _keys_in(change: Moved) -> tuple[str, ...]:
    """The texts among the indices behind the last name in the path: `history['g']` has one."""
    return tuple(re.findall(r"\['(.*?)'\]", change.path.rpartition(".")[2]))


def _own(codes: Sequence[CodeType]) -> Sequence[CodeType]:
    """Drop code of installed packages and generated code if there is other code, which has called it."""
    own = [code for code in codes if not is_installed(code.co_filename)]
    return [code for code in own if has_source(code)] or own or codes


def _names_of(change: Moved) -> tuple[str, ...]:
    return RANDOM_OF_NUMPY if change.holder is NUMPYS_OWN else (change.attribute,)


def first_line(
    name: str, draws: bool, codes: Iterable[CodeType], keys: Sequence[str] = ()
) -> Location | None:
    """The first line that sets a name, or else changes an item of it, or else mentions it.

    Of those that set it, one that reads it first (`self.calls += 1`): it changes it in each step.

    Args:
        draws: it names a random generator, which is drawn from and not set.
        keys: texts by which an item of it is found. Lines that write others behind the name are left
            out.
    """
    codes = _own([*codes])
    found = [*_lines(name, draws, codes)]
    if keys:
        written = [(_keys_behind(name, code, line), (rank, code, line)) for rank, code, line in found]
        exact = [line for behind, line in written if any(_agree(keys, each) for each in behind)]
        found = exact or [line for behind, line in written if not any(behind)]
        if all(rank == _MENTIONS for rank, _, _ in found):  # `for group in groups: group["lr"] = ...`
            key = repr(keys[-1])
            found += [(1, code, line) for code in codes for _, line in _lines_of_item(key, code)]

    def order(found: tuple[int, CodeType, int]) -> tuple[int, bool]:
        rank, code, line = found
        return rank, (name, line, False) not in _named(code)

    return location_in(*min(found, key=order)[1:]) if found else None


def is_set_elsewhere(change: Moved, codes: Iterable[CodeType], others: Iterable[CodeType]) -> bool:
    """True if `others` are more likely than `codes` to have set an attribute, by rank of their lines."""
    of = _names_of(change)[-1], change.draws
    here = min((rank for rank, _, _ in _lines(*of, codes)), default=_NOWHERE)
    return min((rank for rank, _, _ in _lines(*of, others)), default=_NOWHERE) < here


def _lines(name: str, draws: bool, codes: Iterable[CodeType]) -> Iterator[tuple[int, CodeType, int]]:
    """The lines that set the name (0), change an item of it (1), or mention it (2), with these ranks."""
    for code in codes:
        sets = set(stores(code))
        for mentioned, line in _names(code):
            if mentioned == name:
                is_set = (name, line) in sets and not draws
                yield 0 if is_set else 1 if (_ITEM, line) in sets else _MENTIONS, code, line


def nearest_line(change: Moved, codes: Sequence[CodeType]) -> Location | None:
    """The first line that mentions a name in the path of a change, the last such name first.

    If no line does, the first line of the step. With the line of a library that makes the change.
    """
    installed = [code for code in codes if is_installed(code.co_filename)]
    codes = _own(codes)
    path = re.sub(r"\[.*?\]", "", change.name).split(".")
    for end in range(len(path) - 1, 0, -1):
        if (line := first_line(path[end - 1], change.draws, codes)) is not None:
            return inside_library(line, _names_of(change), change.draws, installed)
    return location_in(codes[0], codes[0].co_firstlineno) if codes else None


def inside_library(
    where: Location, names: Sequence[str], draws: bool, codes: Sequence[CodeType]
) -> Location:
    """A line with that of a library which it comes to: the first one in its code that has a name."""
    lines = (first_line(name, draws, codes) for name in names)
    called = None if is_installed(where.path) else next((line for line in lines if line), None)
    return where if called is None else replace(where, called=called)


def line_that_changes(paths: Iterable[str], codes: Sequence[CodeType]) -> Location | None:
    """The first line that sets, takes out or deletes an item or a field, by its path in a batch.

    Args:
        paths: such as `batch['x']`. Keys are found where they are written out in the code.
    """
    named = (reversed(re.findall(r"\[(.*?)\]|\.(\w+)", path)) for path in paths)
    for item, attribute in chain.from_iterable(named):
        for code in _own(codes):
            lines = _lines_of_item(item, code) if item else stores(code)
            for name, line in lines:
                if item or name == attribute:
                    return location_in(code, line)
    return None


def _lines_of_item(key: str, code: CodeType) -> Iterator[tuple[str, int]]:
    """The lines that change the item with a key, given as its `repr`: `x[key] = ...`, `x.pop(key)`."""
    parts = [part for part in _instructions(code) if part[0] != "EXTENDED_ARG"]
    for (_, name, _), (op, _, line) in pairwise(parts):
        if op in (*_OF_ITEMS, *_UPDATES_ITEM) and repr(name) == key:
            yield key, line
    for (_, name, _), (op, constant, line) in pairwise(parts):
        if op in _CONSTANTS and repr(constant) == key and name in CHANGES:
            yield key, line


def line_that_returns_none(function: Any) -> Location | None:
    """The line of a function on which it returns None, if there is one such line."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    parts = [*_instructions(code)]
    returning = {line for op, _, line in parts if op == "RETURN_VALUE"}
    lines = {line for op, constant, line in parts if op == "RETURN_CONST" and constant is None}
    for (op, constant, line), (then, _, _) in pairwise(parts):
        # `return None if ... else ...` jumps to its return.
        is_last = then == "RETURN_VALUE" or (then.startswith("JUMP") and line in returning)
        if is_last and op == "LOAD_CONST" and constant is None:
            lines.add(line)
    return location_in(code, lines.pop()) if len(lines) == 1 else None


def _agree(keys: Sequence[str], written: Sequence[str]) -> bool:
    """True if the item of a line has the one with the keys in it, or is in it."""
    return bool(written) and all(one == other for one, other in zip(keys, written, strict=False))


def _keys_behind(name: str, code: CodeType, line: int) -> set[tuple[str, ...]]:
    """The texts written behind a name where it is in a line: `("a", "b")` for `name["a"]["b"]`."""
    found: list[list[str]] = []
    is_open = False
    for op, value, at in _instructions(code):
        if at == line and value == name and not op.startswith("LOAD_CONST"):
            found.append([])
            is_open = True
        elif is_open and op == "LOAD_CONST" and isinstance(value, str):
            found[-1].append(value)
        elif op not in _SUBSCRIPTS:
            is_open = False
    return {tuple(keys) for keys in found}


def stores(code: CodeType) -> Iterator[tuple[str, int]]:
    """The names that code sets or deletes, without local variables, with lines; `[]` for items."""
    return ((name, line) for name, line, is_set in _named(code) if is_set)


def _names(code: CodeType) -> Iterator[tuple[str, int]]:
    return ((name, line) for name, line, _ in _named(code) if name != _ITEM)


# To disassemble the code of a step takes a tenth of a short run, and most of it is the framework's.
@lru_cache(maxsize=4096)
def _named(code: CodeType) -> tuple[tuple[str, int, bool], ...]:
    """The names in code without local variables and constants, with lines; True for those it sets.

    An attribute comes by its name, and by that with the name before it: `random`, `np.random`.
    """
    found: list[tuple[str, int, bool]] = []
    for op, name, line in _instructions(code):
        if op in (*_OF_ITEMS, "STORE_SLICE"):
            found.append((_ITEM, line, True))
        elif isinstance(name, str) and not op.startswith(("STORE_FAST", "DELETE_FAST", "LOAD_CONST")):
            if op in _ATTRIBUTES and found:
                found.append((f"{found[-1][0]}.{name}", line, False))
            found.append((name, line, op.startswith(("STORE_", "DELETE_"))))
    return tuple(found)


def _instructions(code: CodeType) -> Iterator[tuple[str, Any, int]]:
    """The operations of code with their arguments and lines."""
    lines = {at: line for start, end, line in code.co_lines() if line for at in range(start, end)}
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, code.co_firstlineno)
        yield instruction.opname, instruction.argval, line
