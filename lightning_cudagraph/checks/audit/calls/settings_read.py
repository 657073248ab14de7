"""Getters of settings: functions without arguments that a step calls, such as `torch.get_num_threads()`.

A setting lies where no walk over objects comes: in the process, in a thread, in a library written in C.
So its getter is called again before every replay.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dis import opname
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

from lightning_cudagraph.checks.walk.host_objects import VALUES

# Nothing tells of other functions that a call changes nothing. `isenabled` is a getter, `issue` is none.
_ASKS = re.compile(r"(get|is(?!su|ol)|are_|has_)(?!attr|item)")
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD")


def asked_in_c(frame: FrameType, function: Any) -> Callable[[], Any] | None:
    """The function in C that a frame is calling, if it is a getter without arguments."""
    is_of_module = type(function) is BuiltinFunctionType and isinstance(function.__self__, ModuleType)
    if not is_of_module or _ASKS.match(function.__name__) is None:
        return None
    code, at = frame.f_code.co_code, frame.f_lasti
    return _read(function) if opname[code[at]] in _CALLS and code[at + 1] == 0 else None


def asked_in_python(frame: FrameType) -> Callable[[], Any] | None:
    """The function of a library that a frame begins to run, if it is a getter without arguments."""
    code = frame.f_code
    if code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or _ASKS.match(code.co_name) is None:
        return None
    function = frame.f_globals.get(code.co_name)
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return None
    defaults = function.__defaults__ or ()
    by_name = dict(zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False))
    by_name |= function.__kwdefaults__ or {}
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_asked = all(name in by_name and frame.f_locals.get(name) is by_name[name] for name in given)
    return _read(function) if is_asked else None


def _read(function: Any) -> Callable[[], Any]:
    def read() -> Any:
        """The result of the call, with None for each part that is no value."""
        return _values_in(function())

    return read


def _values_in(value: Any) -> Any:
    if type(value) in VALUES:
        return value
    if type(value) is dict:
        return {key: _values_in(part) for key, part in [*value.items()] if type(key) in VALUES}
    return tuple(map(_values_in, value)) if type(value) in (tuple, list) else None
