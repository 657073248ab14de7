"""Roots for what torch calls by itself: hooks, modes that are entered, and hooks on saved tensors.

No object that the step knows need hold what they read. They read what code names that ran in the step,
without methods of modules: what these reach has roots of its own. So a callback with a method that is a
hook may count under a name that the module has too. And hooks may collect what they see in evaluation
mode, so a check tells if it matters that an item, a tensor or an object behind them is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.guards.structure import hooks_of, name_of_hook
from lightning_cudagraph.checks.guards.switches import entered_modes, hooks_on_saved_tensors
from lightning_cudagraph.checks.walk.host_objects import (
    VALUES,
    attributes_of,
    is_users_class,
    is_users_module,
    lineage,
    namespace_of,
)
from lightning_cudagraph.checks.walk.scope import Root


class HookRoots:
    """The roots behind hooks and modes, for one walk.

    Attributes:
        names: what is read behind a hook.
        functions: the ids of hooks that are functions.
        only_in_hooks: what code of hooks alone names, and no other code of the step.
    """

    def __init__(
        self,
        mentioned: MentionedNames,
        modules: Iterable[nn.Module],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        modules, codes = [*modules], mentioned.users_code
        self._called = [("hook", hook) for hook in hooks_of(modules, parameters)]
        self._called += [("mode", mode) for mode in entered_modes()]
        self._called += [("hook", hook) for hook in hooks_on_saved_tensors() or ()]
        kinds = dict.fromkeys(base for module in modules for base in lineage(type(module)))
        methods = {id(code) for kind in kinds if is_users_class(kind) for code in _codes_of(kind)}
        self.names = mentioned.in_code(code for code in codes if id(code) not in methods)
        functions = [each for _, called in self._called for each in _functions_of(called)]
        self.functions = frozenset(map(id, functions))
        own = {id(function.__code__) for function in functions}
        others = mentioned.in_code(code for code in codes if id(code) not in own)
        self.only_in_hooks = mentioned.in_code(code for code in codes if id(code) in own) - others

    def __iter__(self) -> Iterator[Root]:
        for kind, called in self._called:
            owner = _owner(called)
            is_users = is_users_class(type(owner))
            if type(owner) is FunctionType:
                is_users = is_users_module(owner.__module__)
            # A library's own code reads the options of its hook; what that collects is not read.
            options = {k for k, v in [*(attributes_of(owner) or {}).items()] if type(v) in VALUES}
            names = self.names if is_users else self.names | options
            path = called.__name__ if type(called) is FunctionType else ""
            of = f"the {kind} `{name_of_hook(called)}`"
            yield Root(called, path, of, by_name=not is_users, behind=names)


def roots_of_comm_hooks(hooks: Iterable[tuple[Any, Any]]) -> Iterator[Root]:
    """Roots for communication hooks, and for the state that each is given."""
    for hook, state in hooks:
        of = f"the communication hook `{name_of_hook(hook)}`"
        yield Root(unwrap(hook), getattr(hook, "__name__", ""), of)
        if state is not None:
            yield Root(state, "state", of)


def _owner(called: Any) -> Any:
    while isinstance(called, partial):
        called = called.func
    return getattr(called, "__self__", called)


def _functions_of(called: Any) -> Iterator[FunctionType]:
    """The function that torch calls: the hook itself, that of a method, or `__call__` of an object."""
    while isinstance(called, partial):
        called = called.func
    for function in (
        called.__func__ if type(called) is MethodType else called,
        getattr(type(called), "__call__", None),  # noqa: B004
    ):
        if type(function) is FunctionType:
            yield function


def _codes_of(kind: type) -> Iterator[CodeType]:
    """The code of the methods and properties of a class itself."""
    for value in namespace_of(kind).values():
        function = value.fget if type(value) is property else value
        if type(function) is FunctionType:
            yield function.__code__
