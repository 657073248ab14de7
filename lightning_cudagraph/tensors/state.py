"""Static tensors for rebound attributes: state that a step binds to another tensor at every call.

An object that keeps a running sum as ``self.total = self.total + x`` has another tensor after each step,
and a graph knows addresses only. So each such attribute has a static tensor, its place. A captured step
ends with a copy of the new value into the place, and binds the attribute to the place again. If other
code has rebound the attribute since (a reset, an eager step, a loaded checkpoint), its value is copied
into the place before the replay.
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
from lightning_cudagraph.tensors.writes import storage_id


@dataclass
class _Binding:
    """An attribute and its place.

    Attributes:
        place: the static tensor that a graph reads and writes.
        rebound: True if the step binds another tensor, so that an eager step does not write this one.
    """

    namespace: dict[str, Any]
    name: str
    label: str
    place: Tensor
    rebound: bool = False

    def fits(self) -> bool:
        """True if the bound value can be copied into the place."""
        return _described(self.namespace.get(self.name)) == _described(self.place)

    def counted(self) -> int:
        return sys.getrefcount(self.place)


def _own_references() -> int:
    """The reference count of a place that only its slot refers to."""
    return _Binding({}, "", "", torch.zeros(())).counted()


_OWN_REFERENCES = _own_references()


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a `{type(value).__qualname__}`"
    shape = "x".join(map(str, value.shape)) or "one number"
    layout = "" if value.layout is torch.strided else f", {value.layout}"
    gradient = ", with a gradient" if value.requires_grad else ""
    return f"{shape} ({value.dtype}{layout} on {value.device}{gradient})"


class StaticState:
    """The rebound attributes of a step, with their places."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str], _Binding] = {}
        # The slots as columns, for C-level loops before every replay.
        self._namespaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._places: list[Tensor] = []
        self._rebound: list[Tensor] = []
        # Reference counts of the rebound places without external references; None if not counted.
        self._references: list[int] | None = None

    def keep(self, namespace: dict[str, Any], name: str, label: str) -> None:
        """Give an attribute a place: the bound tensor, unless another attribute has its storage."""
        slot = self._slots.get((id(namespace), name))
        if slot is not None and slot.fits():
            return
        value: Tensor = namespace[name]
        taken = {storage_id(other.place) for other in self._slots.values() if other is not slot}
        # A reset in validation's `inference_mode` makes inference tensors, which cannot be written.
        if value.is_inference() or storage_id(value) in taken or value.requires_grad:
            with torch.inference_mode(False), torch.no_grad():
                value = namespace[name] = torch.empty_like(value, requires_grad=False).copy_(value)
        self._slots[id(namespace), name] = _Binding(namespace, name, label, value)
        self._arrange()

    def _arrange(self) -> None:
        slots = [*self._slots.values()]
        self._namespaces = [slot.namespace for slot in slots]
        self._names = [slot.name for slot in slots]
        self._places = [slot.place for slot in slots]
        self._rebound = [slot.place for slot in slots if slot.rebound]
        self._references = None

    def _drop_columns(self) -> None:
        """Refer to the places from the slots alone, so that external references can be counted."""
        self._places, self._rebound, self._references = [], [], None

    def _all_bound(self) -> bool:
        try:
            found = map(operator.getitem, self._namespaces, self._names)
            return all(map(operator.is_, found, self._places))
        except KeyError:
            return False

    def forget(self, keeps: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the places of objects for which `keeps` is false."""
        self._slots = {key: slot for key, slot in self._slots.items() if keeps(slot.namespace)}
        self._arrange()

    def tensors(self) -> dict[str, Tensor]:
        return {slot.label: slot.place for slot in self._slots.values()}

    def _untouched(self) -> bool:
        """True if all places are bound as after the last replay, without external references."""
        if self._references is None or not self._all_bound():
            return False
        return not any(map(operator.gt, map(sys.getrefcount, self._rebound), self._references))

    def fits(self) -> bool:
        """True if all bound values can be copied into their places."""
        return self._all_bound() or all(slot.fits() for slot in self._slots.values())

    def described(self) -> dict[str, str]:
        """A description of each bound value, by label."""
        slots = self._slots.values()
        return {slot.label: _described(slot.namespace.get(slot.name)) for slot in slots}

    def adopt(self) -> None:
        """Copy values bound by other code into the places; separate places from external references.

        Called before each replay.
        """
        if not self._slots or self._untouched():
            self._references = None
            return
        self._drop_columns()
        places = {storage_id(slot.place) for slot in self._slots.values()}
        # If a value does not fit, no graph that knows the place is replayed.
        moved = [slot for slot in self._slots.values() if not _is_bound(slot) and slot.fits()]
        for slot in moved:
            if storage_id(slot.namespace[slot.name]) in places:  # the place of another attribute
                slot.namespace[slot.name] = slot.namespace[slot.name].clone()
        for slot in moved:
            _take_over(slot)
        for slot in self._slots.values():
            if slot.rebound and _is_bound(slot) and slot.counted() > _OWN_REFERENCES + 1:
                slot.namespace[slot.name] = _give_away(slot)
        self._arrange()

    def count_references(self) -> None:
        """Count the references to the places, right after a replay, when there are no external ones."""
        if self._slots:
            self._references = [*map(sys.getrefcount, self._rebound)]

    def write_back(self) -> None:
        """Copy the values of a captured step into the places at its end, and bind these again."""
        moved = [slot for slot in self._slots.values() if not _is_bound(slot)]
        for slot in moved:
            if not slot.fits():
                found, expected = slot.namespace.get(slot.name), slot.place
                raise CaptureError(
                    f"The training step changes what {slot.label} is: expected {_described(expected)},"
                    f" found {_described(found)}.",
                    "Keep the shape and the dtype of a state the same in all steps.",
                )
            slot.rebound = True
        places = {storage_id(slot.place) for slot in self._slots.values()}
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        with torch.no_grad():
            for slot in moved:
                value = slot.namespace[slot.name]
                if storage_id(value) in places:  # the value of another attribute before the step
                    value = value.clone()
                targets, values = by_dtype.setdefault(slot.place.dtype, ([], []))
                targets.append(slot.place)
                values.append(value)
            for targets, values in by_dtype.values():
                torch._foreach_copy_(targets, values)
        self.put_back()
        if any(slot.rebound for slot in moved):
            self._arrange()

    def put_back(self) -> None:
        """Bind the attributes to their places again."""
        for slot in self._slots.values():
            slot.namespace[slot.name] = slot.place


def _is_bound(slot: _Binding) -> bool:
    return slot.namespace.get(slot.name) is slot.place


def _give_away(slot: _Binding) -> Tensor:
    """Give the memory of a place to a new tensor, and leave its value to external references."""
    kept = slot.place
    with torch.inference_mode(False):
        slot.place = kept.detach()
        kept.data = kept.clone()
    return slot.place


def _take_over(slot: _Binding) -> None:
    """Copy the bound value into the place.

    If the step writes the attribute in place, other code may rely on the bound tensor staying the same
    object: so this tensor moves to the memory of the place. If the step rebinds the attribute, the bound
    tensor is left alone.
    """
    found: Tensor = slot.namespace[slot.name]
    place = _give_away(slot) if slot.counted() > _OWN_REFERENCES else slot.place
    with torch.no_grad():
        place.copy_(found)
    if not slot.rebound and not found.is_inference():
        found.data = place
        slot.place = found
    slot.namespace[slot.name] = slot.place
