"""Host values of a batch: strings, numbers and paths, which count only if the step reads them.

A capture freezes what the step's Python reads. So a host value that is read is part of the batch
signature, and one that is not, such as a file name, may differ in each batch. In a capture, the batch
holds a `HostValue` for each of them, which notes reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_cudagraph.errors import Location

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HostReads", "HostValue", "held", "hold", "is_host_value", "value_of"]

_NUMBERS = (int, float, complex, np.generic)
_KINDS = (*_NUMBERS, str, bytes, PurePath)
# Compared by identity (`is True`, `is Color.RED`), which nothing notices.
_BY_IDENTITY = (bool, np.bool_, Enum)

# Of the object itself, and not of its value.
_OWN = frozenset(
    {
        *("__class__", "__doc__", "__new__", "__init__", "__init_subclass__", "__subclasshook__"),
        *("__getattribute__", "__setattr__", "__delattr__", "__sizeof__"),
    }
)


class HostValue:
    """A host value that calls a function when it is read, and otherwise behaves as the value does.

    It has the type of its value for `isinstance`, and its operations alone. It is no subclass of that
    type: C code would read a string or a number without a call. C code that insists on the type itself
    raises a `TypeError`.

    Args:
        value: the value.
        on_read: called before each use of the value.
    """

    def __new__(cls, value: Any, *args: Any) -> Self:
        of_kind: Any = _with_operations
        made: Self = object.__new__(of_kind(cls, type(value)))
        return made

    def __init__(self, value: Any, on_read: Callable[[], None]) -> None:
        self._value = value
        self._on_read = on_read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(value_of(self), name)

    def __copy__(self) -> HostValue:
        return self

    def __deepcopy__(self, memo: Any) -> HostValue:
        return self


def is_host_value(leaf: Any) -> bool:
    """True for a leaf with a value that may count only if it is read."""
    return isinstance(leaf, _KINDS) and not isinstance(leaf, _BY_IDENTITY)


def value_of(value: Any) -> Any:
    """Read a value: that of a `HostValue`, which notes it, or any other as it is."""
    if not isinstance(value, HostValue):
        return value
    value._on_read()
    return value._value


def held(value: Any) -> Any:
    """The value of a `HostValue`, without a read by the step; any other as it is."""
    return value._value if isinstance(value, HostValue) else value


def hold(own: HostValue, value: Any) -> None:
    """Replace the value by another one of its type. No method, which would hide one of the value."""
    own._value = value


@cache
def _with_operations(cls: Any, kind: Any) -> Any:
    """The subclass with the operations of a type, each of which reads the value."""

    def reading(name: str) -> Callable[..., Any]:
        operators = vars(operator)
        operate, reflected = operators.get(name), operators.get(f"__{name[3:]}")

        def read(self: HostValue, *args: Any, **kwargs: Any) -> Any:
            value, others = value_of(self), [*map(value_of, args)]
            # The operator, since the method may leave the work to the other operand, such as a tensor.
            if operate is not None and len(others) < 2:
                return operate(value, *others)
            if reflected is not None and name.startswith("__r") and len(others) == 1:
                return reflected(others[0], value)
            return getattr(value, name)(*others, **kwargs)

        read.__name__ = name
        return read

    operations: dict[str, Any] = {
        name: reading(name)
        for name in dir(kind)
        if name.startswith("__")
        and name not in _OWN
        and name not in vars(cls)
        and callable(getattr(kind, name))
    }
    if "__getitem__" in operations and "__iter__" not in operations:
        operations["__iter__"] = None  # `__getitem__` alone would make numbers of NumPy iterable
    return type(cls.__name__, (cls,), operations)


class HostReads:
    """The host values that captured steps read, by their paths in the batch.

    Args:
        located: returns the line of the user's code that is running.

    Attributes:
        kinds: the types that count as read: a capture failed without the values themselves.
        why: its error.
    """

    def __init__(self, located: Callable[[], Location | None]) -> None:
        self._located = located
        self._lines: dict[str, Location | None] = {}
        self._is_noting = False
        self.kinds: tuple[type, ...] = ()
        self.why = ""

    @property
    def version(self) -> tuple[int, int]:
        """A value that changes with what counts."""
        return len(self.kinds), len(self._lines)

    def counts(self, path: str, kind: type) -> bool:
        """True if the value at a path, of a type, is part of the signature."""
        return path in self._lines or self.is_needed(kind)

    def is_needed(self, kind: type) -> bool:
        """True if captured steps get values of a type themselves, and no `HostValue`."""
        return issubclass(kind, self.kinds)

    def widen(self, why: str) -> None:
        """Let numbers count, which torch's C code takes more often than strings; then all kinds."""
        self.kinds = _KINDS if self.kinds else _NUMBERS
        self.why = why

    @property
    def note(self) -> str:
        """A note for the report: which values count unread, and why; empty if none do."""
        if not self.kinds:
            return ""
        what = "numbers" if self.kinds == _NUMBERS else "strings and numbers"
        return f"all {what} of a batch are part of its signature: without one of them, {self.why}"

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of a capture: reads count there. Others are those of hooks with a static batch."""
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def noting(self, path: str, value: Any) -> HostValue:
        """A `HostValue` that notes a read here."""

        def note() -> None:
            if self._is_noting and path not in self._lines:
                self._lines[path] = self._located()

        return HostValue(value, note)

    def described(self, path: str) -> str:
        """The line that reads a value, in words; empty if that is unknown."""
        where = self._lines.get(path)
        return f", which the step reads at {where}," if where else ""
