"""Guard on classes and their methods.

A captured step has called the methods that its objects had then. Assignments can later give an object
another class or a method of its own, and a class another method.
"""

from __future__ import annotations

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


def _is_patch(function: Any) -> bool:
    """True for patches of this package, and for the wrapper that torch's schedulers put around `step`.

    They call what was there before.
    """
    is_of_schedulers = getattr(function, "__globals__", {}).get("__name__") == lr_scheduler.__name__
    return is_of_schedulers or type(function) is MethodPatch


def _functions_of(base: type) -> dict[str, Any]:
    """The functions and other descriptors of a class itself, by name."""
    return {
        name: value
        for name, value in [*vars(base).items()]
        if callable(value) or hasattr(type(value), "__get__")
    }


def _replaced(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first name with another function than before; None if there is none."""
    return next((n for n in {**before, **now} if before.get(n) is not now.get(n)), None)


class _Own(Versions):
    """The methods that objects have of their own, in place of those of their classes."""

    def __init__(self, owners: list[object]) -> None:
        self._methods = [*map(_methods_of, map(type, owners))]
        super().__init__(map(vars, owners))

    def _content(self, index: int) -> tuple[list[Any], list[Any]]:
        held, names = self.dicts[index], self._methods[index]
        # In C, because some of these dictionaries are written to in every step.
        if names.isdisjoint(held):
            return [], []
        own = {name: held[name] for name in sorted(names.intersection(held))}
        own = {name: value for name, value in own.items() if callable(value) and not _is_patch(value)}
        return [*own], [*own.values()]

    def in_words(self, index: int, owner: object) -> str:
        was, now = (
            dict(zip(*each, strict=True)) for each in (self._contents[index], self._content(index))
        )
        return f"`{_replaced(was, now)}` of the `{type(owner).__qualname__}` was replaced"


def _methods_of(kind: type) -> frozenset[str]:
    return frozenset(name for base in _order(kind) for name in _functions_of(base))


class Classes:
    """The classes of some objects, with the functions in all of their bases, to compare later.

    Args:
        owners: those whose own methods are compared too.

    Attributes:
        versions: the dictionaries of the classes.
        own: the methods that the owners have of their own.
    """

    def __init__(self, objects: Iterable[object], owners: Iterable[object]) -> None:
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
        self.versions = Versions(dict_behind(vars(base)) for base in self._bases)
        self._functions = [*map(_functions_of, self._bases)]
        self.own = _Own(self._owners)

    def are_others(self) -> bool:
        """True if an object has another class, or a class other bases."""
        return [*map(type, self._objects)] != self._types or [*map(_order, self._kinds)] != self._orders

    def changed(self) -> bool:
        """True if a function was replaced, an object's own or that of a class."""
        if written := self.versions.changed():
            if any(self._replaced_in(index) is not None for index in written):
                return True
            # No function changed; reads of other attributes are guarded by themselves.
            self.versions.remember(written)
        return bool(self.own.changed())

    def _replaced_in(self, index: int) -> str | None:
        return _replaced(self._functions[index], _functions_of(self._bases[index]))

    def in_words(self) -> str:
        """The first function that was replaced, or class with other bases, in words; empty if none."""
        for each, kind in zip(self._objects, self._types, strict=True):
            if type(each) is not kind:
                return f"the class of a `{kind.__qualname__}` is now `{type(each).__qualname__}`"
        for kind, order in zip(self._kinds, self._orders, strict=True):
            if _order(kind) != order:
                return f"the bases of the class `{kind.__qualname__}` changed"
        for index, base in enumerate(self._bases):
            if (name := self._replaced_in(index)) is not None:
                return f"`{name}` of the class `{base.__qualname__}` was replaced"
        for index in self.own.changed():
            return self.own.in_words(index, self._owners[index])
        return ""
