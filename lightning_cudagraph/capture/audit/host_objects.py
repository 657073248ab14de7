"""Which objects are the user's, and how they are read and written without running code of theirs."""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable
from functools import cache, wraps
from types import GetSetDescriptorType, MemberDescriptorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lightning_cudagraph.capture.sentry import is_user_code

__all__ = [
    "UNSET",
    "VALUES",
    "attributes_of",
    "cached_by_class",
    "is_frameworks",
    "is_plain_object",
    "is_users_class",
    "is_users_module",
    "is_users_part",
    "lineage",
    "mapping_access",
    "member_access",
    "namespace_of",
    "slot_access",
    "slot_value",
    "slots_of",
]

UNSET = object()

Access = tuple[Callable[[], Any], Callable[[Any], None]]

# Of these, an equal one is as good as the same one.
VALUES = frozenset(
    {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
# Installed beside the user's own packages, and none of theirs; Triton is what torch compiles with.
_NOT_USERS = (
    "numpy",
    "triton",
    "tensorboard",
    "tensorboardX",
    "wandb",
    "comet_ml",
    "mlflow",
    "clearml",
    "aim",
)
_FRAMEWORKS = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
# Classes of Lightning's that users derive their own from, apart from modules.
_PARTS = ("Callback", "LightningDataModule")
_PLAIN_OF_PYTHON = (SimpleNamespace, argparse.Namespace, UserDict, UserList)


def mapping_access(value: Any) -> Access:
    """How a dict of any class is read and written without its own methods."""
    # The order of an OrderedDict is kept apart from that of the dict below it.
    base: Any = OrderedDict if issubclass(type(value), OrderedDict) else dict

    def write(held: Any) -> None:
        base.clear(value)
        for key, item in zip(held[::2], held[1::2], strict=True):
            base.__setitem__(value, key, item)

    return lambda: tuple(part for item in base.items(value) for part in item), write


def member_access(value: Any, base: Any) -> Access:
    """The same for a list, deque or set, of class `base` or one derived from it."""

    def write(held: Any) -> None:
        base.clear(value)
        (base.update if base is set else base.extend)(value, held)

    return lambda: tuple(base.__iter__(value)), write


def slot_access(value: Any, slots: dict[str, Any]) -> Access:
    """How the slots of an object are read, as a dict of those that are set, and written."""

    def read() -> dict[str, Any]:
        found = {name: slot_value(slot, value) for name, slot in slots.items()}
        return {name: part for name, part in found.items() if part is not UNSET}

    def write(held: dict[str, Any]) -> None:
        for name in read().keys() - held.keys():
            slots[name].__delete__(value)
        for name, part in held.items():
            slots[name].__set__(value, part)

    return read, write


def slot_value(slot: Any, holder: Any) -> Any:
    """What is in a slot of an object; `UNSET` if nothing is."""
    try:
        return slot.__get__(holder)
    except AttributeError:
        return UNSET


def namespace_of(cls: type) -> Any:
    """The attributes of a class itself, whatever its metaclass."""
    return type.__dict__["__dict__"].__get__(cls)


def lineage(cls: type) -> tuple[type, ...]:
    """The classes in which attributes are looked up, whatever the metaclass."""
    return type.__dict__["__mro__"].__get__(cls)  # type: ignore[no-any-return]


def cached_by_class(asked: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Cache the answer for a class as long as the class lives.

    A class holds the closures of its functions, and these may hold a whole run.

    Args:
        asked: the question; it depends on the class alone.
    """
    answers: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    @wraps(asked)
    def cached(cls: Any) -> bool:
        if (answer := answers.get(cls)) is None:
            answer = answers[cls] = asked(cls)
        return answer

    return cached


@cache
def is_users_module(module: str) -> bool:
    """True if a module of this name comes from neither Python's library, torch nor Lightning."""
    top = module.partition(".")[0]
    if top in _NOT_USERS or top in _FRAMEWORKS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    # Without a file: of a prompt or a notebook, or of code that was run under some name.
    return is_user_code(file) if file else module == "__main__" or module not in sys.modules


def is_users_class(cls: type) -> bool:
    """Whether a class comes from neither Python's library, torch nor Lightning."""
    module = namespace_of(cls).get("__module__")
    return isinstance(module, str) and is_users_module(module)


@cached_by_class
def is_plain_object(cls: Any) -> bool:
    """Whether objects of this class can be looked into: the user's, without traps, of no framework."""
    if cls not in _PLAIN_OF_PYTHON and not is_users_class(cls):
        return False
    for base in lineage(cls)[:-1]:
        namespace = namespace_of(base)
        module = str(namespace.get("__module__", ""))
        if "__getattr__" in namespace or "__getattribute__" in namespace:
            return False
        if module.partition(".")[0] in _FRAMEWORKS:
            return False
    return True


@cached_by_class
def is_frameworks(cls: Any) -> bool:
    """Whether it is a class of a framework's, or derived from one, other than of modules and tensors."""
    if issubclass(cls, (torch.Tensor, torch.nn.Module, type)):
        return False
    modules = (str(namespace_of(base).get("__module__", "")) for base in lineage(cls))
    return any(module.partition(".")[0] in _FRAMEWORKS for module in modules)


@cached_by_class
def is_users_part(cls: Any) -> bool:
    """Whether a class is the user's own callback or datamodule, whose attributes are the user's too."""
    if not is_users_class(cls):
        return False
    bases = [namespace_of(base) for base in lineage(cls)[:-1]]
    if any("__getattr__" in base or "__getattribute__" in base for base in bases):
        return False
    return any(
        base.__name__ in _PARTS and namespace_of(base)["__module__"].partition(".")[0] in _FRAMEWORKS
        for base in lineage(cls)
    )


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, or None if it has none."""
    for base in lineage(type(value)):
        slot = namespace_of(base).get("__dict__")
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):  # the latter of SimpleNamespace
            return slot.__get__(value)  # type: ignore[no-any-return]
    return None


def slots_of(cls: type) -> dict[str, Any]:
    """The slots of objects of a class."""
    return {
        name: slot
        for base in lineage(cls)
        if is_users_class(base)
        for name, slot in namespace_of(base).items()
        if type(slot) is MemberDescriptorType
    }
