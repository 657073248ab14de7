"""A copy of a module whose hooks refer to the copy, as far as they are functions of the user's."""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.lines.user_lines import is_users

_DISPATCH = "_deepcopy_dispatch"


def copy_of(module: pl.LightningModule) -> pl.LightningModule:
    """Copy a module, with the user's functions in it and their closure variables.

    `deepcopy` by itself takes functions as they are: a hook that is a `lambda` with `self` in it would
    go on with the module that was copied.
    """
    copiers = {**getattr(copy, _DISPATCH, {}), FunctionType: _function}
    with setting(copy, **{_DISPATCH: copiers}):
        return copy.deepcopy(module)


def _function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    code, closure = function.__code__, function.__closure__
    if not (closure or function.__defaults__ or function.__kwdefaults__):
        return function
    if not is_users(code, function.__globals__):
        return function
    cells = closure and tuple(_cell(cell, memo) for cell in closure)
    made = FunctionType(code, function.__globals__, function.__name__, None, cells)
    memo[id(function)] = made  # before the contents, which can refer to the function
    for cell, copied in zip(closure or (), cells or (), strict=True):
        if _is_filled(cell) and not _is_filled(copied):
            copied.cell_contents = _value(cell.cell_contents, memo)
    made.__defaults__ = _value(function.__defaults__, memo)
    made.__kwdefaults__ = _value(function.__kwdefaults__, memo)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__annotations__, made.__doc__ = function.__annotations__, function.__doc__
    vars(made).update(_value(vars(function), memo))
    return made


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """The copy of a cell, which functions can share; it is empty at first."""
    made: CellType = memo.setdefault(id(cell), CellType())
    return made


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _value(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a function refers to; or the value itself, if there is none, as of a lock."""
    known = {*memo}
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # of classes of the user
        for begun in memo.keys() - known:
            del memo[begun]
        return value
