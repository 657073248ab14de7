"""Values that are others inside a `with` block, or in each thread; and a function that does nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# The attributes of a tensor that hold its hooks.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_UNSET = object()


def do_nothing(*args: Any) -> None:
    """Do nothing, in place of another function."""


class OfThread(threading.local, Generic[T]):
    """A value that each thread has for itself, `value` at first."""

    def __init__(self, value: T) -> None:
        self.value = value


@contextmanager
def setting(owner: object, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the `with` block."""
    before = {name: getattr(owner, name, _UNSET) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _UNSET:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def bound(values: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Bind attributes inside the `with` block: the `__dict__` that holds it, name and value of each."""
    values = [*values]
    before = [(own, name, own.get(name, _UNSET)) for own, name, _ in values]
    for own, name, value in values:
        own[name] = value
    try:
        yield
    finally:
        for own, name, value in before:
            if value is _UNSET:
                own.pop(name, None)
            else:
                own[name] = value
