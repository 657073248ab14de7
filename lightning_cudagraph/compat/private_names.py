"""Private names of other packages: where each lives, how its shape is tested, and what is built on it.

A name is looked up when it is asked for, never when this package is imported. What is needed and is not
as it was is refused before the first step; what can be done without is left off, and said.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from lightning_cudagraph.compat.features import Feature
from lightning_cudagraph.errors import CUDAGraphError

__all__ = ["PrivateName", "accepts", "found", "found_or_stand_in", "members", "named", "trouble_with"]


@dataclass(frozen=True)
class PrivateName:
    """A private name, or a public one in a private place.

    Attributes:
        where: its place, as one would write it: a module, and attributes from there on.
        features: what is built on it. Where there is none, code asks for the name at its place of use,
            and does the right thing with and without: only some versions have it.
        probe: given what is found there; raises, or returns something false, if it is not what it was.
        fields: attributes that are set on its instances, tested for in the code of the class.
        if_imported: the module without which nothing of it is used, and which takes long to import.
    """

    where: str
    features: tuple[Feature, ...] = ()
    probe: Callable[[Any], object] | None = None
    fields: tuple[str, ...] = ()
    if_imported: str = ""

    def trouble(self) -> str:
        """What is wrong with it, in words; nothing if it is as it was."""
        if self.if_imported and self.if_imported not in sys.modules:
            return ""
        package = self.where.partition(".")[0]
        try:
            value = found(self.where)
        except (AttributeError, ImportError):
            return f"`{self.where}` is gone from {_version_of(package)}"
        for field in self.fields:
            if not _has_field(value, field):
                return f"`{self.where}.{field}` is gone from {_version_of(package)}"
        if self.probe is None:
            return ""
        try:
            is_known = bool(self.probe(value))
        except Exception:  # whatever another shape makes of the example
            is_known = False
        return "" if is_known else f"`{self.where}` of {_version_of(package)} is not what it was"


def named(place: str, names: str, *features: Feature, **kwargs: Any) -> Iterator[PrivateName]:
    """Several names in one place.

    Args:
        place: a module or a class.
        names: of it, with spaces between them.
        features: what is built on them.
        kwargs: further attributes of each.
    """
    for name in names.split():
        yield PrivateName(f"{place}.{name}", features, **kwargs)


def members(place: str, names: str, *features: Feature) -> PrivateName:
    """Attributes of the instances of a class.

    Args:
        place: the class.
        names: of the attributes, with spaces between them.
        features: what is built on them.
    """
    return PrivateName(place, features, fields=tuple(names.split()))


def accepts(*args: str, **kwargs: object) -> Callable[[Any], object]:
    """A probe: a function can be called like this; for one written in C, it can be called."""

    def probe(function: Any) -> bool:
        try:
            signature = inspect.signature(function)
        except ValueError:
            return callable(function)
        signature.bind(*args, **kwargs)
        return True

    return probe


def found(where: str) -> Any:
    """What is at a place.

    Raises:
        AttributeError: if there is nothing.
        ImportError: if there is no such module.
    """
    root, *path = where.split(".")
    value: Any = import_module(root)
    for name in path:
        if isinstance(value, ModuleType) and not hasattr(value, name):
            try:
                value = import_module(f"{value.__name__}.{name}")
            except ImportError as error:
                raise AttributeError(f"`{where}` is gone") from error
        else:
            value = getattr(value, name)
    return value


def found_or_stand_in(where: str) -> Any:
    """What is at a place; else a class that can be derived from, and that raises if it is used.

    So that a module which needs the name can be imported: what is built on it is refused, or off.
    """
    try:
        return found(where)
    except (AttributeError, ImportError):
        return _Gone(where.rpartition(".")[2], (), {"where": where})


class _Gone(type):
    """The class of what stands in for something that is gone."""

    where: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise CUDAGraphError(f"`{cls.where}` is gone from {_version_of(cls.where.partition('.')[0])}.")


def trouble_with(table: tuple[PrivateName, ...], feature: Feature) -> str:
    """What is wrong with the names that a feature is built on, in words; empty if nothing is."""
    for name in table:
        if feature in name.features and (trouble := name.trouble()):
            return trouble
    return ""


def _has_field(owner: Any, name: str) -> bool:
    """Whether a class, or one that it is derived from, has an attribute or sets it on its instances."""
    if hasattr(owner, name):
        return True
    for base in getattr(owner, "__mro__", ()):
        if name in vars(base).get("__annotations__", ()):
            return True
        functions = (inspect.unwrap(f) for f in vars(base).values() if isinstance(f, FunctionType))
        if any(name in function.__code__.co_names for function in functions):
            return True
    return False


def _version_of(package: str) -> str:
    if package in sys.stdlib_module_names:
        return f"Python {platform.python_version()}"
    return f"{package} {getattr(import_module(package), '__version__', '')}".rstrip()
