"""Guard on classes and their methods.

A captured step has called the methods that its objects had then. Assignments can later give an object
another class or a method of its own, and a class another method.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch.optim import lr_scheduler

from lightning_cudagraph.checks.walk.host_objects import dict_behind
from lightning_cudagraph.checks.walk.versions import Versions
from lightning_cudagraph.compat.method_patches import MethodPatch

# Py_TPFLAGS_HEAPTYPE and Py_TPFLAGS_IMMUTABLETYPE: only mutable heap types can be given other methods.
_IS_HEAP_TYPE, _IS_IMMUTABLE = 1 << 9, 1 << 8

# A C function that `map` calls: the method resolution order of a class, another tuple for other bases.
_order = type.__dict__["__mro__"].__get__

# By an owner, in words and by its id, and a name.
_Functions = dict[tuple[str, int, str], Any]


def _is_patch(function: Any) -> bool:
    """True for patches of this package, and for the wrapper that torch's schedulers put around `step`.

    They call what was there before.
    """
    is_of_schedulers = getattr(function, "__globals__", {}).get("__name__") == lr_scheduler.__name__
    return is_of_schedulers or type(function) is MethodPatch


class Classes:
    """The classes of some objects, with the functions in all of their bases, to compare later."""

    def __init__(self, objects: Iterable[object], owners: Iterable[object] = ()) -> None:
        self._owners = [*owners]
        self._objects = [*objects]
        self._types = [*map(type, self._objects)]
        self._kinds = [*dict.fromkeys(self._types)]
        self._orders = [*map(_order, self._kinds)]
        bases = dict.fromkeys(base for order in self._orders for base in order)
        self._bases = [
            base
            for base in bases
            if base.__flags__ & _IS_HEAP_TYPE and not base.__flags__ & _IS_IMMUTABLE
        ]
        self._functions = self._functions_now()
        self._dicts = Versions(dict_behind(vars(each)) for each in (*self._bases, *self._owners))

    def _functions_now(self) -> _Functions:
        found: _Functions = {
            (f"the class `{base.__qualname__}`", id(base), name): value
            for base in self._bases
            for name, value in vars(base).items()
            if callable(value) or hasattr(type(value), "__get__")
        }
        for owner in self._owners:
            kind = type(owner)
            for name, value in vars(owner).items():
                if callable(value) and hasattr(kind, name) and not _is_patch(value):
                    found[f"the `{kind.__qualname__}`", id(owner), name] = value
        return found

    def changed(self) -> bool:
        """True if an object has another class, or another function, of its own or of a class."""
        if not all(map(operator.is_, map(type, self._objects), self._types)):
            return True
        if [*map(_order, self._kinds)] != self._orders:
            return True
        if written := self._dicts.changed():
            if self.in_words():
                return True
            # No function changed; reads of other attributes are guarded by themselves.
            self._dicts.remember(written)
        return False

    def in_words(self) -> str:
        """The first function that was replaced, or class with other bases, in words; empty if none."""
        for kind, order in zip(self._kinds, self._orders, strict=True):
            if _order(kind) != order:
                return f"the bases of the class `{kind.__qualname__}` changed"
        now = self._functions_now()
        for key in {**self._functions, **now}:
            if self._functions.get(key) is not now.get(key):
                owner, _, name = key
                return f"`{name}` of {owner} was replaced"
        return ""
