"""Static tensors for rebound attributes: state that a step binds to another tensor at every call.

An object that keeps a running sum as ``self.total = self.total + x`` has another tensor after each step,
and a graph knows addresses only. So each such attribute has a static tensor. A captured step
ends with a copy of the new value into it, and binds the attribute to it again. If other
code has rebound the attribute since (a reset, an eager step, a loaded checkpoint), its value is copied
into that tensor before the replay.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.batch import copied_leaf
from lightning_cudagraph.tensors.layouts import has_strides
from lightning_cudagraph.tensors.writes import storage_id


@dataclass
class _Binding:
    """An attribute and its static tensor.

    Attributes:
        static: the tensor that a graph reads and writes.
        rebound: True if the step binds another tensor, so that an eager step does not write this one.
    """

    namespace: dict[str, Any]
    name: str
    label: str
    static: Tensor
    rebound: bool = False

    def fits(self) -> bool:
        """True if the bound value can be copied into the static tensor."""
        return _described(self.namespace.get(self.name)) == _described(self.static)

    def counted(self) -> int:
        return sys.getrefcount(self.static)


def _own_references() -> int:
    """The reference count of a static tensor that only its binding refers to."""
    return _Binding({}, "", "", torch.zeros(())).counted()


_OWN_REFERENCES = _own_references()


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a `{type(value).__qualname__}`"
    shape = "x".join(map(str, value.shape)) or "one number"
    layout = f", {value.layout}"
    if has_strides(value):
        layout = "" if value.is_contiguous() else f", strides {value.stride()}"
    gradient = ", with a gradient" if value.requires_grad else ""
    return f"{shape} ({value.dtype}{layout} on {value.device}{gradient})"


class StaticState:
    """The rebound attributes of a step, with their static tensors."""

    def __init__(self) -> None:
        self._bindings: dict[tuple[int, str], _Binding] = {}
        # The bindings as columns, for C-level loops before every replay.
        self._namespaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._statics: list[Tensor] = []
        self._rebound: list[Tensor] = []
        # Reference counts of the rebound tensors without external references; None if not counted.
        self._references: list[int] | None = None

    def keep(self, namespace: dict[str, Any], name: str, label: str) -> None:
        """Give an attribute a static tensor: the bound one, unless another has its storage."""
        binding = self._bindings.get((id(namespace), name))
        if binding is not None and binding.fits():
            return
        value: Tensor = namespace[name]
        taken = {storage_id(other.static) for other in self._bindings.values() if other is not binding}
        # A reset in validation's `inference_mode` makes inference tensors, which cannot be written.
        if value.is_inference() or storage_id(value) in taken or value.requires_grad:
            with torch.inference_mode(False), torch.no_grad():
                value = namespace[name] = copied_leaf(value.detach())
        self._bindings[id(namespace), name] = _Binding(namespace, name, label, value)
        self._arrange()

    def _arrange(self) -> None:
        bindings = [*self._bindings.values()]
        self._namespaces = [binding.namespace for binding in bindings]
        self._names = [binding.name for binding in bindings]
        self._statics = [binding.static for binding in bindings]
        self._rebound = [binding.static for binding in bindings if binding.rebound]
        self._references = None

    def _drop_columns(self) -> None:
        """Refer to static tensors from bindings alone, so that external references can be counted."""
        self._statics, self._rebound, self._references = [], [], None

    def _all_bound(self) -> bool:
        try:
            found = map(operator.getitem, self._namespaces, self._names)
            return all(map(operator.is_, found, self._statics))
        except KeyError:
            return False

    def forget(self, keeps: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the static tensors of objects for which `keeps` is false."""
        self._bindings = {
            key: binding for key, binding in self._bindings.items() if keeps(binding.namespace)
        }
        self._arrange()

    def tensors(self) -> dict[str, Tensor]:
        return {binding.label: binding.static for binding in self._bindings.values()}

    def _untouched(self) -> bool:
        """True if all are bound as after the last replay, without external references."""
        if self._references is None or not self._all_bound():
            return False
        return not any(map(operator.gt, map(sys.getrefcount, self._rebound), self._references))

    def fits(self) -> bool:
        """True if all bound values can be copied into their static tensors."""
        return self._all_bound() or all(binding.fits() for binding in self._bindings.values())

    def described(self) -> dict[str, str]:
        """A description of each bound value, by label."""
        bindings = self._bindings.values()
        return {binding.label: _described(binding.namespace.get(binding.name)) for binding in bindings}

    def adopt(self) -> None:
        """Copy values bound by other code into static tensors; separate these from external references.

        Called before each replay.
        """
        if not self._bindings or self._untouched():
            self._references = None
            return
        self._drop_columns()
        storages = {storage_id(binding.static) for binding in self._bindings.values()}
        # If a value does not fit, no graph that knows the tensor is replayed.
        moved = [
            binding for binding in self._bindings.values() if not _is_bound(binding) and binding.fits()
        ]
        for binding in moved:
            if storage_id(binding.namespace[binding.name]) in storages:  # that of another attribute
                binding.namespace[binding.name] = binding.namespace[binding.name].clone()
        for binding in moved:
            _take_over(binding)
        for binding in self._bindings.values():
            if binding.rebound and _is_bound(binding) and binding.counted() > _OWN_REFERENCES + 1:
                binding.namespace[binding.name] = _give_away(binding)
        self._arrange()

    def count_references(self) -> None:
        """Count references to static tensors, right after a replay, when there are no external ones."""
        if self._bindings:
            self._references = [*map(sys.getrefcount, self._rebound)]

    def write_back(self) -> None:
        """Copy the values of a captured step into static tensors at its end, and bind these again."""
        moved = [binding for binding in self._bindings.values() if not _is_bound(binding)]
        for binding in moved:
            if not binding.fits():
                found, expected = binding.namespace.get(binding.name), binding.static
                raise CaptureError(
                    f"The training step changes what {binding.label} is: expected"
                    f" {_described(expected)}, found {_described(found)}.",
                    "Keep the shape and the dtype of a state the same in all steps.",
                )
            binding.rebound = True
        storages = {storage_id(binding.static) for binding in self._bindings.values()}
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        with torch.no_grad():
            for binding in moved:
                value = binding.namespace[binding.name]
                if storage_id(value) in storages:  # the value of another attribute before the step
                    value = value.clone()
                targets, values = by_dtype.setdefault(binding.static.dtype, ([], []))
                targets.append(binding.static)
                values.append(value)
            for targets, values in by_dtype.values():
                torch._foreach_copy_(targets, values)
        self.put_back()
        if any(binding.rebound for binding in moved):
            self._arrange()

    def put_back(self) -> None:
        """Bind the attributes to their static tensors again."""
        for binding in self._bindings.values():
            binding.namespace[binding.name] = binding.static


def _is_bound(binding: _Binding) -> bool:
    return binding.namespace.get(binding.name) is binding.static


def _give_away(binding: _Binding) -> Tensor:
    """Give the memory of a static tensor to a new one, and leave its value to external references."""
    kept = binding.static
    with torch.inference_mode(False):
        binding.static = kept.detach()
        kept.data = kept.clone()
    return binding.static


def _take_over(binding: _Binding) -> None:
    """Copy the bound value into the static tensor.

    If the step writes the attribute in place, other code may rely on the bound tensor staying the same
    object: so this tensor moves to the memory of the static one. If the step rebinds the attribute, the
    bound tensor is left alone.
    """
    found: Tensor = binding.namespace[binding.name]
    static = _give_away(binding) if binding.counted() > _OWN_REFERENCES else binding.static
    with torch.no_grad():
        static.copy_(found)
    if not binding.rebound and not found.is_inference():
        found.data = static
        binding.static = found
    binding.namespace[binding.name] = binding.static
