"""Branches of Python that decide between going on and raising alone, found in bytecode.

A value that the host reads goes straight, through conversions, `not` and comparisons with numbers, into
one conditional jump. All code on one of its two ways comes to a `raise`, and no frame of the step may
catch what is raised there. Whatever is not known for sure is no such branch.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_CONVERSIONS = (bool, int, float, abs)
_COMPARES = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne},
}
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NOT_CODE = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME")
_LEAVES = ("RETURN_", "YIELD_", "SEND", "INTERPRETER_EXIT")
_ENTERS = ("BEFORE_WITH", "SETUP_WITH")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_COMPILED = ("__compiled_fn", "__resume_at")  # names in the code that Dynamo makes
# C code around a call may take these for an answer: `hasattr`, `next`, iteration by `__getitem__`.
_TAKEN_BY_C = (AttributeError, LookupError, StopIteration)
_EXACT = 2**53  # whole numbers up to here are exact in float64
_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class RaisingBranch:
    """A branch on a value that the host reads, one way of which raises an exception.

    Attributes:
        steps: the functions that the value passes on its way to the jump.
        numbers: those that it is compared with.
        raises_if: the truth at the jump with which the exception is raised.
    """

    steps: tuple[Callable[[Any], Any], ...]
    numbers: tuple[Any, ...]
    raises_if: bool

    def raises(self, value: Any) -> bool:
        """True if the plain step raises an exception for this value."""
        try:
            for step in self.steps:
                value = step(value)
        except (ArithmeticError, ValueError):  # as `math.log(0)`
            return True
        return bool(value) is self.raises_if

    def passing(self, kind: type) -> Any:
        """A value of this type with which the step goes on; None if there is none to be found."""
        around = [number + more for number in (0, *self.numbers) for more in (0, 1, -1)]
        others = ("inf", "-inf", "nan") if kind is float else ()
        candidates = (kind(each) for each in (*around, *others))
        try:
            return next((each for each in candidates if not self.raises(each)), None)
        except TypeError:  # the function takes more than a number
            return None


def raising_branch(
    frame: FrameType,
    is_comparison: bool,
    is_outside: Callable[[FrameType], bool],
    is_trusted: Callable[[FrameType], bool],
) -> RaisingBranch | None:
    """The branch that takes what a frame reads of a tensor, if it goes on or raises; else None.

    Args:
        is_comparison: the tensor comes from `<`, `<=`, `>` or `>=`, called last.
        is_outside: True for the frame around the step, where the search for handlers ends.
        is_trusted: True for frames in which no `with` suppresses an exception of the step.
    """
    found = _Search(frame, is_trusted(frame)).branch(is_comparison)
    return found if found is not None and leaves_step(frame.f_back, is_outside, is_trusted) else None


def leaves_step(
    frame: FrameType | None,
    is_outside: Callable[[FrameType], bool],
    is_trusted: Callable[[FrameType], bool],
) -> bool:
    """True if what is raised in the call that a frame is in leaves the step: no frame catches it."""
    # Without `frames` of compat: this file is tested in other Pythons, alone.
    while frame is not None and not is_outside(frame):
        if not _Search(frame, is_trusted(frame)).passes_on():
            return False
        frame = frame.f_back
    return True


def passes_on(frame: FrameType) -> bool:
    """True if a frame, in which a `with` may suppress exceptions, will not catch that of its call."""
    return _Search(frame, is_trusted=False).passes_on()


class _Code:
    """The instructions of a code object, and the ways between them, by index."""

    def __init__(self, code: CodeType) -> None:
        self.all = [each for each in dis.get_instructions(code) if each.opname not in _NOT_CODE]
        self._code = code

    def at(self, offset: int) -> int:
        """The index of the instruction at an offset, or of the last one before it."""
        return max((index for index, each in enumerate(self.all) if each.offset <= offset), default=0)

    def target(self, index: int) -> int:
        goal = self.all[index].argval
        return next(n for n, each in enumerate(self.all) if each.offset >= goal)

    def following(self, index: int) -> list[int]:
        """The instructions that may come after one, if it raises nothing."""
        name = self.all[index].opname
        if name.startswith((*_LEAVES, "RAISE_VARARGS", "RERAISE")):
            return []
        jumps = self.all[index].opcode in _JUMPS and "SETUP" not in name
        is_sure = jumps and name.startswith("JUMP") and "_IF_" not in name
        return [*([] if is_sure else [index + 1]), *([self.target(index)] if jumps else [])]

    @cached_property
    def _handled(self) -> list[tuple[int, int, int]]:
        """The first offset, the one behind the last, and the handler of each stretch of code."""
        entries = getattr(dis.Bytecode(self._code), "exception_entries", None)
        if entries is not None:
            return [(each.start, each.end, each.target) for each in entries]
        setups = (each for each in self.all if each.opname.startswith("SETUP_"))  # Python 3.10
        return [(each.offset + 2, each.argval, each.argval) for each in setups]

    def handler(self, index: int) -> int | None:
        """The handler of what an instruction raises; None if that leaves the frame."""
        offset = self.all[index].offset
        around = [each for each in self._handled if each[0] <= offset < each[1]]
        return self.at(max(around)[2]) if around else None

    def entered_at(self, handler: int) -> int | None:
        """The instruction that enters the `with` block of a handler."""
        offset = self.all[handler].offset
        starts = [start for start, _, target in self._handled if target == offset]
        index = self.at(min(starts)) - 1 if starts else -1
        return index if index >= 0 and self.all[index].opname in _ENTERS else None

    def start(self, end: int) -> int | None:
        """The first of the straight instructions of the expression that ends with one."""
        pushed = 0
        for index in range(end, -1, -1):
            each = self.all[index]
            if each.opcode in _JUMPS or each.is_jump_target:
                return None
            pushed += dis.stack_effect(each.opcode, each.arg)
            if each.opname == "CALL" and "PRECALL" in dis.opmap:  # left out, with its effect
                pushed -= each.arg or 0
            if pushed == 1:
                return index
        return None


_code = lru_cache(maxsize=256)(_Code)


class _Search:
    """A frame of a step at the instruction that it is at."""

    def __init__(self, frame: FrameType, is_trusted: bool) -> None:
        self._frame, self._is_trusted = frame, is_trusted
        self._code = _code(frame.f_code)
        self._all = self._code.all
        self._now = self._code.at(frame.f_lasti)

    def branch(self, is_comparison: bool) -> RaisingBranch | None:
        """The branch that takes what the frame reads of a tensor, by an operator or a call."""
        index, steps = self._now, list[Callable[[Any], Any]]()
        now, before = self._all[index], self._all[index - 1]
        if self._is_odd():
            return None
        if _is_jump(now) or now.opname == "TO_BOOL":
            index -= _is_jump(now)
            steps.append(bool)
        elif now.opname == "UNARY_NOT":
            steps.append(operator.not_)
        elif now.opname == "COMPARE_OP":  # which asks for the truth of its result, from Python 3.13 on
            if not is_comparison or _symbol(now) not in ("<", "<=", ">", ">="):
                return None
            steps.append(bool)
        elif (function := self._function(index)) is not None:
            steps.append(function)
        elif not (_calls(now) and not now.arg and _loads_method(before) and before.argval == "item"):
            return None
        return self._taken(index, steps)

    def _taken(self, index: int, steps: list[Callable[[Any], Any]]) -> RaisingBranch | None:
        """Follow the value behind an instruction to its jump."""
        numbers: list[Any] = []
        began = self._code.start(index)  # of the expression with the value
        while not _is_jump(now := self._all[index := index + 1]):
            if now.opname == "UNARY_NOT":
                steps.append(operator.not_)
            elif now.opname == "COMPARE_OP":  # number < value
                number = None if began is None else self._number_before(began)
                if number is None or (compare := _COMPARES.get(_symbol(now))) is None:
                    return None
                numbers.append(number)
                steps.append(_comparison(compare, number, is_first=True))
            elif _calls(now):
                if (function := self._function(index)) is None:
                    return None
                steps.append(function)
            elif (loaded := self._number(index))[0] is not None:  # value < number
                number, index = loaded
                now = self._all[index]
                if now.opname != "COMPARE_OP" or (compare := _COMPARES.get(_symbol(now))) is None:
                    return None
                numbers.append(number)
                steps.append(_comparison(compare, number, is_first=False))
            elif now.opname != "TO_BOOL":
                return None
            began = None  # what comes before has been taken
        ways = index + 1, self._code.target(index)
        raising = [self._raises(way) for way in ways]
        if raising[0] == raising[1] or not all(abs(each) < _EXACT for each in numbers):
            return None
        jumps_if = "IF_TRUE" in self._all[index].opname
        return RaisingBranch(tuple(steps), tuple(numbers), raising[1] is jumps_if)

    def passes_on(self) -> bool:
        """True if the frame is in a call that raises, and will not catch it."""
        is_call = _calls(self._all[self._now])
        return is_call and not self._is_odd() and self._leaves(self._now)

    def _is_odd(self) -> bool:
        code = self._frame.f_code
        is_compiled = any(name.startswith(_COMPILED) for name in code.co_names)
        return bool(code.co_flags & _GENERATORS) or is_compiled

    def _raises(self, way: int) -> bool:
        """True if all that can follow comes to a `raise`, without a handler that goes on."""
        seen = {self._now}
        todo, is_raised = [way], False
        while todo:
            index = todo.pop()
            if index == self._now or index >= len(self._all):
                return False
            if index in seen:
                continue
            seen.add(index)
            now = self._all[index]
            is_raised |= now.opname == "RAISE_VARARGS"
            if now.opname.startswith(_LEAVES) or self._is_taken(now) or not self._leaves(index):
                return False
            todo += self._code.following(index)
        return is_raised

    def _is_taken(self, load: dis.Instruction) -> bool:
        """True for a load of an exception, by any name, that C code around may take for an answer."""
        if not load.opname.startswith("LOAD_") or load.opname == "LOAD_CONST":
            return False
        spaces = (self._frame.f_locals, self._frame.f_globals, self._frame.f_builtins)
        found = next((space[load.argval] for space in spaces if load.argval in space), None)
        return issubclass(found if isinstance(found, type) else type(found), _TAKEN_BY_C)

    def _leaves(self, raising: int) -> bool:
        """True if what an instruction raises leaves the frame, whatever handlers do before."""
        seen: set[int] = set()
        todo = [self._code.handler(raising)]
        entered = None
        while todo:
            index = todo.pop()
            if index is None or index in seen:
                continue
            seen.add(index)
            now = self._all[index]
            if now.opname.startswith(_LEAVES) or index == raising:
                return False
            todo.append(self._code.handler(index))
            if now.opname == "WITH_EXCEPT_START":
                # `PUSH_EXC_INFO` comes before it, from Python 3.11 on.
                entered = next(filter(None, map(self._code.entered_at, (index, index - 1))), None)
                if not (self._is_trusted or self._returns_nothing(entered)):
                    return False
                jump = next(n for n in range(index, len(self._all)) if _is_jump(self._all[n]))
                todo.append(jump + 1 if "IF_TRUE" in self._all[jump].opname else self._code.target(jump))
            else:
                todo += self._code.following(index)
        return True

    def _returns_nothing(self, entered: int | None) -> bool:
        """True if a `with` block is of a class whose `__exit__` never says that it handles an error."""
        call = -1 if entered is None else entered - 1
        if call < 0 or not _calls(self._all[call]) or (began := self._code.start(call)) is None:
            return False
        kind, end = self._loaded(began)
        if any(map(_calls, self._all[end:call])) or not isinstance(kind, type):
            return False
        leaves = getattr(kind, "__exit__", None)
        return isinstance(leaves, FunctionType) and all(_returned(_code(leaves.__code__)))

    def _function(self, call: int) -> Callable[[Any], Any] | None:
        """The function of Python or of `math` that a call with one argument calls; else None."""
        instruction = self._all[call]
        if not _calls(instruction) or instruction.arg != 1:
            return None
        if (argument := self._code.start(call - 1)) is None:
            return None
        for back in (1, 2, 3):
            found, end = self._loaded(argument - back) if argument >= back else (None, 0)
            found = inspect.unwrap(found) if callable(found) else None
            is_known = any(found is each for each in _CONVERSIONS)
            is_known |= isinstance(found, BuiltinFunctionType) and found.__module__ == "math"
            if end == argument and is_known:
                return found
        return None

    def _loaded(self, index: int) -> tuple[Any, int]:
        """A global, or what is in a module, that instructions load; and the index behind them."""
        if self._all[index].opname == "PUSH_NULL":
            index += 1
        first = self._all[index]
        if first.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            return None, index
        inside = self._frame.f_builtins.get(first.argval, vars(builtins).get(first.argval))
        found = self._frame.f_globals.get(first.argval, inside)
        index += 1
        while _loads_method(self._all[index]) and isinstance(found, ModuleType):
            found = vars(found).get(self._all[index].argval)
            index += 1
        return found, index + (self._all[index].opname == "PUSH_NULL")

    def _number_before(self, end: int) -> Any:
        """The number that the instructions before one load; None for anything else."""
        begin = end - 1
        while begin > 0 and _loads_method(self._all[begin]):
            begin -= 1
        number, behind = self._number(begin) if begin >= 0 else (None, end)
        return number if behind == end else None

    def _number(self, index: int) -> tuple[Any, int]:
        """The number that instructions load, or None for anything else; and the index behind them."""
        now, found, end = self._all[index], None, index + 1
        if now.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            found = now.argval
        elif now.opname in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"):
            found = self._frame.f_locals.get(now.argval)
        elif now.opname == "LOAD_GLOBAL":
            found, end = self._loaded(index)
        while end < len(self._all) and _loads_method(self._all[end]):
            found, end = _attribute(found, self._all[end].argval), end + 1
        return (found if type(found) in _NUMBERS else None), end


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that no code computes; None for any other."""
    lookup: Any = type(owner).__getattribute__
    return inspect.getattr_static(owner, name, None) if lookup is object.__getattribute__ else None


def _comparison(compare: Callable[..., Any], number: Any, is_first: bool) -> Callable[[Any], Any]:
    return lambda value: compare(number, value) if is_first else compare(value, number)


def _calls(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("CALL") and "INTRINSIC" not in instruction.opname


def _loads_method(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _is_jump(instruction: dis.Instruction) -> bool:
    """True for a jump by the truth of a value, which it takes."""
    name = instruction.opname
    return name.startswith("POP_JUMP_") and name.endswith(("IF_TRUE", "IF_FALSE"))


def _symbol(comparison: dis.Instruction) -> str:
    """The operator of a comparison: `<` also where Python 3.13 shows `bool(<)`."""
    return str(comparison.argval).removeprefix("bool(").removesuffix(")")


def _returned(code: _Code) -> Iterator[bool]:
    """One flag for each `return` of a function: True if it returns None or False."""
    for index, now in enumerate(code.all):
        if now.opname.startswith(_LEAVES):
            constant = code.all[index - 1] if now.opname == "RETURN_VALUE" else now
            is_constant = constant.opname in ("LOAD_CONST", "RETURN_CONST")
            yield is_constant and (constant.argval is None or constant.argval is False)
