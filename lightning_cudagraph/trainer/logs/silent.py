"""Methods and objects that do nothing, and that the audit of a capture takes for such as write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any


def silent_method(name: str) -> Callable[..., Any]:
    """Make a method that does nothing, with the name by which the audit knows it."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    return FunctionType(method.__code__.replace(co_name=name), globals(), name)


class Silent:
    """An object with any attribute, of which each can be called: `experiment.config.update(...)`."""

    path: str

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return silent(f"{self.path}.{name}")

    def __getitem__(self, key: object) -> Silent:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, key: object) -> bool:
        return False

    def __setitem__(self, key: object, value: object) -> None: ...


def silent(path: str) -> Silent:
    """Make a silent object, which errors call by this path."""
    owner, _, name = path.rpartition(".")
    methods = {"__qualname__": owner, "path": path, "__call__": silent_method(name)}
    made: Silent = type(name, (Silent,), methods)()
    return made
