"""Random object graphs that hold one number, somewhere."""

from __future__ import annotations

import array
import operator
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.matrix.places import LOW, Place

_SCALE = operator.attrgetter("scale")


def _called(function: Callable[[], Any]) -> Any:
    return function()


class _Box:
    def __init__(self, scale: Any) -> None:
        self.scale = scale


class _Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


class _Delegates:
    __slots__ = ("_target",)

    def __init__(self, scale: Any) -> None:
        self._target = _Box(scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _module(scale: Any) -> types.ModuleType:
    made = types.ModuleType("made")
    vars(made)["scale"] = scale
    return made


def _class(scale: Any) -> type:
    return type("Made", (), {"scale": (scale,)})


def _closure(inner: Any) -> Callable[[], Any]:
    return lambda: inner


def _default(inner: Any) -> Callable[[], Any]:
    def function(kept: Any = inner) -> Any:
        return kept

    return function


def _identity(inner: Any) -> Any:
    return inner


def _objects(inner: Any) -> Any:
    made = np.empty(2, dtype=object)
    made[0] = inner
    return made


_FIRST = operator.itemgetter(0)
_INNER = operator.itemgetter("inner")

# How something is held: `make(inner)` is the holder, and `find(holder)` what it holds.
LINKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda inner: [inner, "other"], _FIRST),
    "tuple": (lambda inner: (inner, "other"), _FIRST),
    "deque": (lambda inner: deque([inner]), _FIRST),
    "UserList": (lambda inner: UserList([inner]), _FIRST),
    "array of objects": (_objects, _FIRST),
    "dict": (lambda inner: {"other": 0, "inner": inner}, _INNER),
    "OrderedDict": (lambda inner: OrderedDict(inner=inner), _INNER),
    "UserDict": (lambda inner: UserDict(inner=inner), _INNER),
    "mappingproxy": (lambda inner: types.MappingProxyType({"inner": inner}), _INNER),
    "ChainMap": (lambda inner: ChainMap({}, {"inner": inner}), _INNER),
    "object": (_Box, _SCALE),
    "slots": (_Slots, _SCALE),
    "SimpleNamespace": (lambda inner: types.SimpleNamespace(scale=inner), _SCALE),
    "module": (_module, _SCALE),
    "class": (_class, lambda made: made.scale[0]),
    "__getattr__": (_Delegates, _SCALE),
    "closure": (_closure, _called),
    "default argument": (_default, _called),
    "partial": (lambda inner: partial(_identity, inner), _called),
}
# What holds the number itself: a holder, and how it is read and written.
LEAVES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any, float], None]]] = {
    "list": (lambda: [LOW], _FIRST, lambda made, n: made.__setitem__(0, n)),
    "dict": (lambda: {"inner": LOW}, _INNER, lambda made, n: made.__setitem__("inner", n)),
    "object": (lambda: _Box(LOW), _SCALE, lambda made, n: setattr(made, "scale", n)),
    "slots": (lambda: _Slots(LOW), _SCALE, lambda made, n: setattr(made, "scale", n)),
    "array": (lambda: array.array("d", [LOW]), _FIRST, lambda made, n: made.__setitem__(0, n)),
    "NumPy array": (lambda: np.ones(5), lambda made: float(made[0]), lambda m, n: m.__setitem__(0, n)),
    "deque": (lambda: deque([LOW]), _FIRST, lambda made, n: made.__setitem__(0, n)),
}


class Grown(Place):
    """A number at the end of a chain of holders, which hold other objects too."""

    def __init__(self, net: Any, links: tuple[str, ...], leaf: str, beside: int) -> None:
        self.links, self.leaf, self.beside = links, leaf, beside
        super().__init__(net)

    def make(self) -> None:
        made, *_ = LEAVES[self.leaf]
        self.root = made()
        for link in reversed(self.links):
            self.root = LINKS[link][0](self.root)
        self.others = [{"number": float(index), "name": str(index)} for index in range(self.beside)]

    def lowest(self) -> Any:
        holder = self.root
        for link in self.links:
            holder = LINKS[link][1](holder)
        return holder

    def read(self) -> float:
        return LEAVES[self.leaf][1](self.lowest())

    def write(self, number: float) -> None:
        LEAVES[self.leaf][2](self.lowest(), number)


GRAPHS = st.builds(
    lambda links, leaf, beside: partial(Grown, links=tuple(links), leaf=leaf, beside=beside),
    st.lists(st.sampled_from(sorted(LINKS)), max_size=12),
    st.sampled_from(sorted(LEAVES)),
    st.sampled_from([0, 3, 2000]),
)
