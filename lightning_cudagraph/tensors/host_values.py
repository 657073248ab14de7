"""Host values: strings, numbers and paths, which count only if the step reads them.

A capture freezes what the step's Python reads. So a host value that is read is part of the batch
signature, and one that is not, such as a file name, may differ in each batch. In a capture, the step
gets a `HostValue` for each of them, which notes reads. Of an integer, it notes what the step computes
from it: `batch_idx % 4 == 0` has two values, and so two signatures.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lightning_cudagraph.errors import Location, without_addresses
from lightning_cudagraph.tensors.batch import comparable, copied_leaf

if TYPE_CHECKING:
    from typing_extensions import Self

_NUMBERS = (int, float, complex, np.generic)
_KINDS = (*_NUMBERS, str, bytes, PurePath)
# Compared by identity (`is True`, `is Color.RED`), which nothing notices.
_BY_IDENTITY = (bool, np.bool_, Enum)

# What a step may compute from an integer, with plain numbers, before it reads the result.
_ARITHMETIC = {
    **{"__add__": "+", "__sub__": "-", "__mul__": "*", "__floordiv__": "//", "__truediv__": "/"},
    **{"__mod__": "%", "__and__": "&"},
}
_COMPARISONS = {
    "__eq__": "==",
    "__ne__": "!=",
    "__lt__": "<",
    "__le__": "<=",
    "__gt__": ">",
    "__ge__": ">=",
}
# More comparisons of one value count as a read of the value itself.
_MAX_READS = 32

# Of the object itself, and not of its value.
_OWN = frozenset(
    {
        *("__class__", "__doc__", "__new__", "__init__", "__init_subclass__", "__subclasshook__"),
        *("__getattribute__", "__setattr__", "__delattr__", "__sizeof__"),
    }
)


# The classes in texts of errors, such as "must be Number, not _HostNumber".
_CLASSES = re.compile(r"_?Host(Number|Value)\b")


class HostValue:
    """A host value that calls a function when it is read, and otherwise behaves as the value does.

    It has the type of its value for `isinstance`, and its operations alone. It is no subclass of that
    type: C code would read a string or a number without a call. C code that insists on the type itself
    raises a `TypeError`.
    """

    _is_of_batch = False  # a leaf of a static batch, which has the value of each replay
    refuses_reads = False  # each read is refused, with a message of its own

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


@dataclass(frozen=True)
class HostRead:
    """A read of a host value by a step: of the value, or of a number computed from it."""

    path: str
    text: str
    compute: Callable[[Any], Any]

    def of(self, value: Any) -> Any:
        """The result for a value; or the class of its error, to which the step itself may not come."""
        try:
            return self.compute(value)
        except (ArithmeticError, TypeError) as error:
            return type(error)

    def then(self, name: str, others: tuple[Any, ...], operate: Callable[[Any], Any]) -> HostRead:
        """The read of an operation on its result, with another number or with none."""
        text, compute = self.text, self.compute
        if name in _COMPARISONS:
            text = f"{text} {_COMPARISONS[name]} {others[0]!r}"
        elif not others:
            text = f"bool({text})"
        else:
            inner = text if text == self.path else f"({text})"
            sign, other = _ARITHMETIC[_direct(name)], repr(others[0])
            text = f"{inner} {sign} {other}" if name in _ARITHMETIC else f"{other} {sign} {inner}"
        return HostRead(self.path, text, lambda value: operate(compute(value)))


@dataclass(frozen=True, eq=False)
class HostAttribute:
    """An attribute of the user's objects that is part of the signature.

    Attributes:
        before: the form of its value in all signatures that were made before.
        read: returns the form of its present value: its type, and what is compared.
    """

    name: str
    before: tuple[type, Any]
    read: Callable[[], tuple[type, Any]]


class _HostNumber(HostValue):
    """A number of which the step may read a part: a comparison, or what it computes with plain numbers.

    Args:
        make_part: makes what the step gets for another part.
    """

    def __init__(
        self,
        value: Any,
        read: HostRead,
        note: Callable[[HostRead], None],
        make_part: Callable[[HostRead, Any], Any],
    ) -> None:
        super().__init__(value, lambda: note(read))
        self._read = read
        self._note = note
        self._make_part = make_part


def is_host_value(leaf: Any) -> bool:
    """True for a leaf with a value that may count only if it is read."""
    return isinstance(leaf, _KINDS) and not isinstance(leaf, _BY_IDENTITY)


def names_a_class(text: str) -> bool:
    """True for the text of an error that C code raises for the type of a `HostValue`."""
    return _CLASSES.search(text) is not None


def in_words(text: str) -> str:
    """A text of an error, without the names of classes of this package and addresses of memory."""
    return _CLASSES.sub("a number or text that may be another in each step", without_addresses(text))


def value_of(value: Any) -> Any:
    """Read a value: that of a `HostValue`, which notes it, or any other as it is."""
    if not isinstance(value, HostValue):
        return value
    value._on_read()
    return value._value


def held(value: Any) -> Any:
    """The value of a `HostValue`, without a read by the step; any other as it is."""
    return value._value if isinstance(value, HostValue) else value


def as_output(leaf: Any) -> Any:
    """A leaf that a captured step returns: one of the batch as it is, unread; another one is read."""
    return leaf if isinstance(leaf, HostValue) and leaf._is_of_batch else value_of(leaf)


def copied_output(leaf: Any) -> Any:
    """A copy of a leaf of the output of a replay, with the value of its batch."""
    return copied_leaf(held(leaf))


def hold(own: HostValue, value: Any) -> None:
    """Replace the value by another one of its type. No method, which would hide one of the value."""
    own._value = value


def _direct(name: str) -> str:
    """The name of an operation with its operands in the usual order: `__mod__` for `__rmod__`."""
    return f"__{name[3:]}" if name.startswith("__r") else name


def _operation(name: str) -> Callable[..., Any]:
    """The operation of a name, as a function of a value and its other operands.

    That of Python, since the method may leave the work to the other operand, such as a tensor.
    """
    operators = vars(operator)
    operate, reflected = operators.get(name), operators.get(_direct(name))

    def apply(value: Any, *others: Any, **kwargs: Any) -> Any:
        if name == "__bool__":
            return bool(value)
        if operate is not None and len(others) < 2:
            return operate(value, *others)
        if reflected is not None and name.startswith("__r") and len(others) == 1:
            return reflected(others[0], value)
        return getattr(value, name)(*others, **kwargs)

    return apply


def _reading(name: str) -> Callable[..., Any]:
    """The operation of a `HostValue`, which reads the value."""
    apply = _operation(name)

    def read(self: HostValue, *args: Any, **kwargs: Any) -> Any:
        return apply(value_of(self), *map(value_of, args), **kwargs)

    read.__name__ = name
    return read


def _partly(name: str) -> Callable[..., Any]:
    """The operation of a `_HostNumber`, which reads its result alone or nothing."""
    apply, read_all = _operation(name), _reading(name)
    is_arithmetic = _direct(name) in _ARITHMETIC
    if not is_arithmetic and name not in _COMPARISONS and name != "__bool__":
        return read_all

    def read(self: _HostNumber, *args: Any) -> Any:
        if not all(type(other) in (int, float, bool) for other in args):
            return read_all(self, *args)
        part = self._read.then(name, args, lambda value: apply(value, *args))
        if is_arithmetic:
            return self._make_part(part, apply(self._value, *args))
        self._note(part)
        return apply(self._value, *args)

    read.__name__ = name
    return read


def _itself(value: Any) -> Any:
    return value


@cache
def _with_operations(cls: Any, kind: Any) -> Any:
    """The subclass with the operations of a type, each of which reads the value."""
    make = _partly if issubclass(cls, _HostNumber) else _reading
    operations: dict[str, Any] = {
        name: make(name)
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
    """The reads of host values by captured steps.

    Args:
        are_all: all host values count, whether the step reads them or not.

    Attributes:
        attributes: those of the user's objects that are part of the signature, by object and label. An
            object lives as long as its attribute is here.
        kinds: the types that count as read: a capture failed without the values themselves.
        version: changes with what counts.
        captures: those of any run that are under way; a value that is kept beyond them is only a value.
        returned: where in its output the step returns the value that is read; empty for other reads.
        has_given_parts: the capture under way has got a part of a number, which C code may not take.
    """

    captures: ClassVar[int] = 0

    def __init__(self, located: Callable[[], Location | None], are_all: bool = False) -> None:
        self._located = located
        self._lines: dict[str, Location | None] = {}
        self._of: dict[str, dict[str, HostRead]] = {}
        self._is_noting = False
        self.attributes: dict[tuple[int, Any], HostAttribute] = {}
        self.returned = ""
        self.kinds: tuple[type, ...] = _KINDS if are_all else ()
        self.why = ""
        self.version = 0
        self.has_given_parts = False

    def add(self, attribute: HostAttribute, location: Location | None) -> None:
        """Note that an attribute, which the step reads at a line, is part of the signature now."""
        self._lines[attribute.name] = location
        self.version += 1

    def forget(self) -> None:
        """Forget what released graphs have read, if it is much: the step may read other things now."""
        self.version += bool(self.attributes)
        self.attributes.clear()
        if all(len(reads) < _MAX_READS // 4 for reads in self._of.values()):
            return
        self._lines.clear()
        self._of.clear()
        self.version += 1

    def counts(self, path: str, kind: type) -> bool:
        """True if the value at a path, of a type, is part of the signature."""
        return path in self._lines or self.is_needed(kind)

    @property
    def is_any(self) -> bool:
        return bool(self._of or self.attributes)

    def computed(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The results of the reads of the value at a path, with their texts."""
        for read in self._of.get(path, {}).values():
            yield read.text, read.of(value)

    def agree(self, path: str, one: Any, other: Any) -> bool:
        """True if captured steps read the same of two values."""
        return path not in self._of or all(
            comparable(read.of(one)) == comparable(read.of(other)) for read in self._of[path].values()
        )

    def is_needed(self, kind: type) -> bool:
        """True if captured steps get values of a type themselves, and no `HostValue`."""
        return issubclass(kind, self.kinds)

    def widen(self, why: str) -> None:
        """Let numbers count, which torch's C code takes more often than strings; then all kinds."""
        self.kinds = _KINDS if self.kinds else _NUMBERS
        self.why = why
        self.version += 1

    def narrow(self, kinds: tuple[type, ...], why: str) -> None:
        """Let these kinds count again, as before a `widen` that was of no use."""
        self.version += kinds != self.kinds
        self.kinds, self.why = kinds, why

    @property
    def note(self) -> str:
        """A note for the report: which values count unread, and why; empty if none do."""
        if not self.why:
            return ""
        what = "numbers" if self.kinds == _NUMBERS else "strings and numbers"
        why = in_words(self.why)
        return (
            f"all {what} of a batch are part of its signature, because C code takes one of them ({why});"
            " tensors in their place have one graph"
        )

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of a capture: reads count there. Others are those of hooks with a static batch."""
        self._is_noting, self.has_given_parts = True, False
        HostReads.captures += 1
        try:
            yield
        finally:
            self._is_noting = False
            HostReads.captures -= 1

    def noting(self, path: str, value: Any) -> HostValue:
        """A `HostValue` for a leaf of a static batch."""
        whole = HostRead(path, path, _itself)
        if type(value) is int:
            leaf = self._number(whole, value, self._note, lambda read: False)
        else:
            leaf = HostValue(value, lambda: self._note(whole))
        leaf._is_of_batch = True
        return leaf

    def beside_batch(
        self,
        name: str,
        value: int,
        has_many: Callable[[HostRead], bool],
        refuse: Callable[[HostRead], None],
    ) -> HostValue:
        """A `HostValue` for an integer that differs in each batch; reads of many values are refused."""

        def note(read: HostRead) -> None:
            if has_many(self._limited(read)):
                refuse(self._limited(read))
            self._note(read)

        return self._number(HostRead(name, name, _itself), value, note, has_many)

    def _number(
        self,
        whole: HostRead,
        value: int,
        note: Callable[[HostRead], None],
        has_many: Callable[[HostRead], bool],
    ) -> HostValue:
        def make_part(read: HostRead, value: Any) -> Any:
            if read.text in self._lines or (self.is_needed(type(value)) and not has_many(read)):
                note(read)
                return value
            self.has_given_parts = True
            return _HostNumber(value, read, note, make_part)

        return _HostNumber(value, whole, note, make_part)

    def _limited(self, read: HostRead) -> HostRead:
        """A read, or that of the value itself in place of one too many."""
        of_path = self._of.get(read.path, {})
        if read.text in of_path or len(of_path) < _MAX_READS:
            return read
        return HostRead(read.path, read.path, _itself)

    def _note(self, read: HostRead) -> None:
        read = self._limited(read)
        if self._is_noting and read.text not in self._lines:
            self._lines[read.text] = self._located()
            self._of.setdefault(read.path, {})[read.text] = read
            self.version += 1

    def line_of(self, path: str) -> Location | None:
        """The line that reads a value; None if that is unknown."""
        return self._lines.get(path)

    def described(self, path: str) -> str:
        """The line that reads a value, in words; empty if that is unknown."""
        where = self.line_of(path)
        return f", which the step reads at {where}," if where else ""
