"""Probes of private names, as the tables in `names/` declare them: path, probe, dependent features.

A name is looked up when it is asked for, never when this package is imported. If a required name is
missing or changed, the feature is refused before the first step; an optional feature is switched off,
and the report says so.
"""

from __future__ import annotations

import dis
import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

from lightning_cudagraph.compat.features import Feature
from lightning_cudagraph.errors import CUDAGraphError


@dataclass(frozen=True)
class PrivateName:
    """A private name, or a public one in a private place.

    Attributes:
        where: dotted path: a module, and attributes from there on.
        features: the features that depend on it. Empty if code looks for the name at the place of use,
            and works without it: only some versions have it, or little is lost.
        probe: called with the value found; raises, or returns something false, if the value has changed.
        fields: attributes that the class sets on its instances; looked for in its code.
        if_imported: a module that is slow to import, and without which the name is unused. The name is
            tested only if the module is imported already.
    """

    where: str
    features: tuple[Feature, ...] = ()
    probe: Callable[[Any], object] | None = None
    fields: tuple[str, ...] = ()
    if_imported: str = ""

    def trouble(self) -> str:
        """Describe what is missing or changed; empty if nothing is."""
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
        except Exception:  # a probe of a changed value may raise anything
            is_known = False
        return "" if is_known else f"`{self.where}` of {_version_of(package)} is not what it was"


def named(place: str, names: str, *features: Feature, **kwargs: Any) -> Iterator[PrivateName]:
    """Yield several names of one module or class, separated by spaces."""
    for name in names.split():
        yield PrivateName(f"{place}.{name}", features, **kwargs)


def members(place: str, names: str, *features: Feature) -> PrivateName:
    """Declare attributes of the instances of a class, separated by spaces."""
    return PrivateName(place, features, fields=tuple(names.split()))


def accepts(*args: str, **kwargs: object) -> Callable[[Any], object]:
    """A probe: the function accepts these arguments; one written in C need only be callable."""

    def probe(function: Any) -> bool:
        try:
            signature = inspect.signature(function)
        except ValueError:
            return callable(function)
        signature.bind(*args, **kwargs)
        return True

    return probe


def found(where: str) -> Any:
    """Return the value at a dotted path."""
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


def imported(table: tuple[PrivateName, ...], name: str) -> Any:
    """Return a value that modules of this package import: the first on the path of a declared name."""
    for declared in table:
        path = declared.where.split(".")
        if name in path:
            return found_or_stand_in(".".join(path[: path.index(name) + 1]))
    raise AttributeError(name)


def found_or_stand_in(where: str) -> Any:
    """Return the value at a dotted path, or a placeholder class that raises when it is called.

    With a placeholder, which can be subclassed, modules that need the name can still be imported: the
    features that depend on it are refused, or off.
    """
    try:
        return found(where)
    except (AttributeError, ImportError):
        return _Gone(where.rpartition(".")[2], (), {"where": where})


class _Gone(type):
    """The metaclass of placeholders for names that are gone."""

    where: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise CUDAGraphError(f"`{cls.where}` is gone from {_version_of(cls.where.partition('.')[0])}.")


def trouble_with(table: tuple[PrivateName, ...], feature: Feature) -> str:
    """Describe which name of a feature is missing or changed; empty if none is."""
    for name in table:
        if feature in name.features and (trouble := name.trouble()):
            return trouble
    return ""


def _has_field(owner: Any, name: str) -> bool:
    """True if a class or one of its bases has an attribute or sets it on its instances."""
    if hasattr(owner, name):
        return True
    for base in getattr(owner, "__mro__", ()):
        if name in vars(base).get("__annotations__", ()):
            return True
        functions = (inspect.unwrap(f) for f in vars(base).values() if isinstance(f, FunctionType))
        if any(_sets(function.__code__, name) for function in functions):
            return True
    return False


@lru_cache(maxsize=4096)
def _sets(code: CodeType, name: str) -> bool:
    """True if a function binds an attribute of that name; a function that reads one does not make it."""
    return name in code.co_names and any(
        made.opname == "STORE_ATTR" and made.argval == name for made in dis.get_instructions(code)
    )


def _version_of(package: str) -> str:
    if package in sys.stdlib_module_names:
        return f"Python {platform.python_version()}"
    return f"{package} {getattr(import_module(package), '__version__', '')}".rstrip()
