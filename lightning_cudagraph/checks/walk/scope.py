"""The roots of a walk, and its limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


class Namespace:
    """A dictionary of names, such as a module's globals, of which only mentioned names are compared."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names


@dataclass(slots=True, eq=False)
class Root:
    """An object at which a walk starts or continues.

    Attributes:
        path: its path; empty if the names of its attributes stand alone.
        left_out: names of attributes, or keys of a dictionary, that are not compared.
        is_entered: enter it even if objects of its class are not entered.
        reads: names that the step mentions for its attributes; None for those of the scope.
        by_name: here and below, compare only attributes that the step can have read.
        is_fixed: its holder cannot be given another object instead of it.
        behind: here and below, the names that code behind a hook mentions; None elsewhere.
    """

    value: Any
    path: str
    of: str
    left_out: frozenset[str] = frozenset()
    is_entered: bool = False
    reads: frozenset[str] | None = None
    is_read: bool = True
    by_name: bool = False
    is_fixed: bool = False
    behind: frozenset[str] | None = None


@dataclass(frozen=True)
class Scope:
    """The limits of a walk.

    Attributes:
        stops: more classes whose objects are entered only by name.
        ignored: parts that are not compared, as pairs of a path's start (in words) and the path; with
            `items_of` a path, all items of a container.
        modules: the roots for a module that is found outside of the model.
        omitted: the keys that are left out of a dictionary that is compared by name.
        in_capture: the walk watches a captured step. It enters containers and objects of the user's
            classes, but no library objects, which fill caches; draws from host generators count as
            changes; and until `release` iterators are replaced by ones that refuse draws.
        by_identity: names of tables of a module that are compared by identity, and not entered.
        enters: classes whose objects are entered, although walks stop at them by default.
        closed: objects that are not entered.
        is_foreign: True for an optimizer that is not one of the step's own: it is entered by name.
    """

    stops: tuple[type, ...] = ()
    ignored: Collection[tuple[str, str]] = ()
    reads: frozenset[str] = frozenset()
    modules: Callable[[nn.Module, str, str], Iterable[Root]] = lambda module, path, of: ()
    omitted: Callable[[dict[Any, Any]], frozenset[str]] = lambda value: frozenset()
    in_capture: bool = False
    harmless: frozenset[str] = frozenset()
    enters: tuple[type, ...] = ()
    by_identity: frozenset[str] = frozenset()
    closed: tuple[object, ...] = ()
    is_foreign: Callable[[Any], bool] = lambda optimizer: False
