"""Iterators, whose positions cannot be restored, and replacements for them during a capture."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from io import IOBase
from types import WrapperDescriptorType
from typing import Any, NoReturn
from weakref import ProxyTypes

from lightning_cudagraph.checks.walk.host_objects import cached_by_class, lineage, namespace_of
from lightning_cudagraph.checks.walk.parts import Item, Node, joined
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbidden, refused


@cached_by_class
def _is_iterator_type(kind: Any) -> bool:
    # Not by `getattr`, which makes a mock answer.
    found = (namespace_of(base).get("__next__") for base in lineage(kind))
    of_c = type(next(filter(None, found), None)) is WrapperDescriptorType
    # A weak proxy has all methods, and answers for another object.
    return of_c and not issubclass(kind, (IOBase, *ProxyTypes))


def is_iterator(value: Any) -> bool:
    """True for an iterator or generator that is written in C: its position cannot be restored."""
    kind: Any = type(value)
    return _is_iterator_type(kind)


def holds_iterator(value: Any) -> bool:
    """True for an iterator, and for a tuple with iterators."""
    return is_iterator(value) or (isinstance(value, tuple) and any(map(holds_iterator, value)))


class HeldIterator:
    """Replacement for an iterator during a capture, which refuses draws; `of` names its holder."""

    __slots__ = ("_iterator", "_name", "_of")

    def __init__(self, iterator: Any, name: str, of: str) -> None:
        self._iterator = iterator
        self._name = name
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __iter__(self) -> HeldIterator:
        return self

    def __next__(self, *args: Any) -> NoReturn:
        error = forbidden(
            f"a draw from the iterator `{self._name}` of {self._of}, which a replay would not repeat",
            "Draw in `on_train_batch_start`, and hand the result to the step in a registered buffer,"
            " written with `copy_` or `fill_`; or draw in the dataloader. If it may stay what it is,"
            f' allow it: `CUDAGraphCallback(harmless=["{self._name}"])`.',
            user_location(),
        )
        error.subject = self._name, self._of
        raise refused(error)  # also where refusals are gathered: a draw cannot be undone

    send = throw = close = __next__


class HeldIterators:
    """The iterators that a walk has replaced by ones that refuse draws."""

    def __init__(self, harmless: Collection[str]) -> None:
        self._harmless = harmless
        self._held: dict[int, tuple[Any, Any]] = {}  # by id: a replacement, and what it replaces

    def hold(self, node: Node) -> None:
        """Replace the iterators among the parts of an object."""
        _exchange(node, holds_iterator, partial(self._replacement, node.of))

    def put_back(self, node: Node) -> None:
        _exchange(node, lambda part: id(part) in self._held, lambda part, _: self._held[id(part)][1])

    def _replacement(self, of: str, value: Any, path: str) -> Any:
        if not holds_iterator(value) or path in self._harmless:
            return value
        if is_iterator(value):
            held: Any = HeldIterator(value, path, of)
        else:
            parts = (
                self._replacement(of, part, joined(path, Item(at))) for at, part in enumerate(value)
            )
            held = tuple.__new__(type(value), parts)
        self._held[id(held)] = held, value
        return held


def _exchange(node: Node, old: Callable[[Any], bool], new: Callable[[Any, str], Any]) -> None:
    """Replace every part for which `old` is true with `new` of it and its path."""
    parts = node.read() if node.write is not None and not node.draws else {}
    if any(map(old, parts.values())):
        assert node.write is not None
        changed = {
            label: new(part, joined(node.path, label)) if old(part) else part
            for label, part in parts.items()
        }
        node.write(changed)
        node.parts = node.read()
