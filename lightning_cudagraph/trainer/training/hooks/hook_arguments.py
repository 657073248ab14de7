"""Detection of hooks that ignore an argument, by their bytecode.

A copy of the outputs, or a batch of its own, is of use only to a hook that reads it. Most hooks do not:
those that count, draw progress bars or average weights.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_cudagraph.compat.attributes import do_nothing

# Names by which code can reach its own variables without naming them.
_READS_ALL = frozenset(
    {
        *("locals", "vars", "dir", "eval", "exec", "breakpoint", "set_trace"),
        *("_getframe", "currentframe", "stack", "inspect", "f_locals"),
    }
)


# Decorated, to find the modules of decorators that pass all arguments on.
_decorated: tuple[Any, ...] = (torch.no_grad()(do_nothing), rank_zero_only(do_nothing))
_PASSING_ON = frozenset(function.__globals__["__name__"] for function in _decorated)

# By the address of the code, which is kept, because the hash of code reads all of it.
_found: dict[tuple[int, int], tuple[CodeType, bool]] = {}


def ignores(hook: Callable[..., Any], position: int) -> bool:
    """True if a hook does not read a positional argument, counted from 0 without `self`."""
    if isinstance(hook, MethodType):
        hook, position = hook.__func__, position + 1
    while isinstance(hook, FunctionType) and hook.__globals__.get("__name__") in _PASSING_ON:
        hook = getattr(hook, "__wrapped__", None)  # type: ignore[assignment]
    if not isinstance(hook, FunctionType):
        return False
    code = hook.__code__
    found = _found.get((id(code), position))
    if found is None:
        found = _found[id(code), position] = code, _is_ignored(code, position)
    return found[1]


def _is_ignored(code: CodeType, position: int) -> bool:
    names = code.co_varnames
    if position < code.co_argcount:
        name = names[position]
    elif code.co_flags & inspect.CO_VARARGS:
        name = names[code.co_argcount + code.co_kwonlyargcount]
    else:
        return False  # the call will fail
    if not _READS_ALL.isdisjoint(code.co_names):
        return False
    # A variable of an inner function is named by the instruction that makes its cell. An instruction
    # with two variables names them in a tuple.
    return all(
        name != named and not (isinstance(named, tuple) and name in named)
        for named in (instruction.argval for instruction in dis.get_instructions(code))
    )
