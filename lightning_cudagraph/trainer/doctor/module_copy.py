"""A copy of a module whose hooks refer to the copy, as far as they are functions of the user's."""

from __future__ import annotations

import copy
from traceback import walk_tb
from types import CellType, FunctionType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_cudagraph.compat.attributes import TENSOR_HOOKS, setting
from lightning_cudagraph.device.lines.user_lines import is_users

_DISPATCH = "_deepcopy_dispatch"


def copy_of(module: pl.LightningModule) -> tuple[pl.LightningModule, list[Any]]:
    """Copy a module, with the user's functions in it and their closure variables.

    `deepcopy` by itself takes functions as they are: a hook that is a `lambda` with `self` in it would
    go on with the module that was copied. It leaves out the hooks of tensors, and ends at a tensor with
    an autograd graph, and at a value that has no copy, as a lock: the copy shares that.

    Returns:
        The copy, and what it shares.
    """
    copiers = {**getattr(copy, _DISPATCH, {}), FunctionType: _function, Tensor: _tensor}
    shared: dict[int, Any] = {}
    while True:
        memo: dict[int, Any] = {**shared}
        try:
            with setting(copy, **{_DISPATCH: copiers}):
                made = copy.deepcopy(module, memo)
                _copy_hooks_of_tensors(memo)
            return made, [*shared.values()]
        except Exception as error:  # of classes of the user, too
            value = _not_copied(error)
            if id(value) in shared or value is module:
                raise
            shared[id(value)] = value


def _not_copied(error: Exception) -> Any:
    """The innermost value whose copy has raised an error."""
    raised_in = [frame for frame, _ in walk_tb(error.__traceback__)]
    copies = [frame for frame in raised_in if frame.f_code is copy.deepcopy.__code__]
    return copies[-1].f_locals["x"] if copies else None


def _copy_hooks_of_tensors(memo: dict[int, Any]) -> None:
    for value in memo.get(id(memo), ()):  # where `deepcopy` keeps what it has copied
        for name in TENSOR_HOOKS if isinstance(value, Tensor) else ():
            if hooks := getattr(value, name):
                setattr(memo[id(value)], name, copy.deepcopy(hooks, memo))


def _tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    return tensor.__deepcopy__(memo) if tensor.is_leaf else tensor.detach().clone()


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
            copied.cell_contents = copy.deepcopy(cell.cell_contents, memo)
    made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__annotations__, made.__doc__ = function.__annotations__, function.__doc__
    vars(made).update(copy.deepcopy(vars(function), memo))
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
