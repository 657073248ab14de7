"""Python values that a captured step has read, and whether they are still the same.

Which attributes a step reads cannot be seen without slowing everything down; which names its code
mentions can. While the step is captured, the names of all code that runs are collected. Afterwards the
attributes of the model's modules, and the globals of the user's code, that have one of these names and
a value that can be compared are remembered, and compared before every replay: a loss weight that a hook
changes every epoch leads to a new capture, and not to a stale one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MentionedNames", "PythonValues"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MISSING = object()


@dataclass
class MentionedNames:
    """What the code of a step mentions.

    Attributes:
        names: of attributes and globals.
        user_globals: the global namespaces of the user's code among it, with the names from each.
    """

    names: set[str] = field(default_factory=set)
    user_globals: list[tuple[dict[str, Any], str]] = field(default_factory=list)


def _comparable(value: Any) -> Any:
    """What to compare of a value: itself, or its contents; `_MISSING` if it cannot be."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return (id(value), value.data_ptr())
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return id(value)
    if isinstance(value, MethodType):
        return (id(value.__self__), id(value.__func__))
    if isinstance(value, (list, tuple)) and all(isinstance(member, _PLAIN) for member in value):
        return tuple(value)
    if isinstance(value, (set, frozenset)) and all(isinstance(member, _PLAIN) for member in value):
        return frozenset(value)
    if isinstance(value, dict) and all(isinstance(member, _PLAIN) for member in value.values()):
        return tuple(value.items())
    return _MISSING


class PythonValues:
    """The values under the mentioned names, as they were at a capture.

    Args:
        model: the model whose modules' attributes are watched.
        mentioned: what the captured step mentions.
        frameworks_own: attributes that torch and Lightning keep for themselves in every module.
    """

    def __init__(
        self, model: nn.Module, mentioned: MentionedNames, frameworks_own: frozenset[str]
    ) -> None:
        self._held: list[tuple[dict[str, Any], str, str, Any]] = []
        for path, module in model.named_modules():
            where = f"`{path}`" if path else f"the `{type(module).__qualname__}`"
            for name, value in vars(module).items():
                if name in mentioned.names and name not in frameworks_own:
                    self._hold(vars(module), name, f"`{name}` of {where}", value)
            for name in mentioned.names - vars(module).keys():
                # A class attribute, until somebody sets it on the instance.
                if isinstance(getattr(type(module), name, _MISSING), _PLAIN):
                    self._held.append((vars(module), name, f"`{name}` of {where}", _MISSING))
        for namespace, name in mentioned.user_globals:
            where = namespace.get("__name__", "a module")
            self._hold(namespace, name, f"`{name}` of `{where}`", namespace[name])

    def _hold(self, namespace: dict[str, Any], name: str, label: str, value: Any) -> None:
        comparable = _comparable(value)
        if comparable is not _MISSING:
            self._held.append((namespace, name, label, comparable))

    def changed(self) -> str | None:
        """The first value that is not as it was, in words, or None."""
        for namespace, name, label, was in self._held:
            value = namespace.get(name, _MISSING)
            if value is was:
                continue
            now = _comparable(value)
            if type(now) is not type(was) or (now != was and not (now != now and was != was)):
                shown = f" from {was} to {now}" if isinstance(value, _PLAIN) else ""
                return f"{label} changed{shown}"
        return None
