"""Classes and attributes of host objects, read without running user code."""

from __future__ import annotations

import argparse
import gc
import sys
from collections import UserDict, UserList
from collections.abc import Callable
from functools import cache, wraps
from types import GetSetDescriptorType, MemberDescriptorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lightning_cudagraph.device.lines.user_lines import is_user_code

UNSET = object()

# Compared by value; all other objects by identity.
VALUES = frozenset(
    {int, float, complex, bool, str, bytes, range, type(None), torch.dtype, torch.device, torch.Size}
)
# Installed packages that are not user code.
_NOT_USERS = ("numpy", "tensorboard", "tensorboardX", "wandb", "comet_ml", "mlflow", "clearml", "aim")
_FRAMEWORKS = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
# Classes of Python's library that users keep state in.
PLAIN_OF_PYTHON = (SimpleNamespace, argparse.Namespace, UserDict, UserList)


def slot_value(slot: Any, holder: Any) -> Any:
    """The content of a slot of an object; `UNSET` if it is empty."""
    try:
        return slot.__get__(holder)
    except AttributeError:
        return UNSET


def namespace_of(cls: type) -> Any:
    """The attributes of the class itself, whatever its metaclass."""
    return type.__dict__["__dict__"].__get__(cls)


def dict_behind(space: Any) -> dict[str, Any]:
    """The dictionary itself: that of a class is behind a proxy."""
    held: dict[str, Any] = space if isinstance(space, dict) else gc.get_referents(space)[0]
    return held


def lineage(cls: type) -> tuple[type, ...]:
    """The method resolution order of a class, whatever its metaclass."""
    return type.__dict__["__mro__"].__get__(cls)  # type: ignore[no-any-return]


def cached_by_class(asked: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Cache a predicate on classes, by weak references.

    A class holds the closures of its functions, and these may hold a whole run.
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
    # Without a file: a prompt or a notebook, or code that was run under another name.
    return is_user_code(file) if file else module == "__main__" or module not in sys.modules


def is_users_class(cls: type) -> bool:
    """True if a class comes from neither Python's library, torch nor Lightning."""
    module = namespace_of(cls).get("__module__")
    return isinstance(module, str) and is_users_module(module)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attribute dictionary of an object; None if it has none."""
    for base in lineage(type(value)):
        slot = namespace_of(base).get("__dict__")
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):  # the latter: SimpleNamespace
            return slot.__get__(value)  # type: ignore[no-any-return]
    return None


def slots_of(cls: type) -> dict[str, Any]:
    """The slots (`__slots__`) of a class and of its bases, where these are the user's."""
    return {
        name: slot
        for base in lineage(cls)
        if is_users_class(base)
        for name, slot in [*namespace_of(base).items()]
        if type(slot) is MemberDescriptorType
    }
