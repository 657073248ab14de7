"""State that a step binds anew at every call, kept where a graph can find it.

An object that keeps a running sum as ``self.total = self.total + x`` has another tensor after each step;
a graph knows addresses. So each such attribute is given a place. At the end of a captured step its new
value is copied there and the place bound again; before a replay, what somebody has bound in the meantime
(a reset, an eager step, a loaded checkpoint) is copied into the place.
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

__all__ = ["StaticState"]


@dataclass
class _Slot:
    """An attribute, and the tensor that is its place.

    Attributes:
        namespace: the attributes of the object.
        name: of the attribute.
        label: the same in words.
        place: what a graph reads and writes.
        rebound: the step binds another tensor, so that an eager one would leave this one alone.
    """

    namespace: dict[str, Any]
    name: str
    label: str
    place: Tensor
    rebound: bool = False

    def fits(self) -> bool:
        """Whether what is bound now can be copied into the place."""
        return _described(self.namespace.get(self.name)) == _described(self.place)

    def counted(self) -> int:
        return sys.getrefcount(self.place)


def _own_references() -> int:
    """How many references to a place are counted if nobody but its slot holds it."""
    return _Slot({}, "", "", torch.zeros(())).counted()


_OWN_REFERENCES = _own_references()


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a `{type(value).__qualname__}`"
    shape = "x".join(map(str, value.shape)) or "one number"
    layout = "" if value.layout is torch.strided else f", {value.layout}"
    gradient = ", with a gradient" if value.requires_grad else ""
    return f"{shape} ({value.dtype}{layout} on {value.device}{gradient})"


class StaticState:
    """Attributes with a place each."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str], _Slot] = {}
        # The same in columns, for loops that run in C: they are gone through before every replay.
        self._namespaces: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._places: list[Tensor] = []
        self._rebound: list[Tensor] = []
        # How often each of the rebound is referred to if nobody outside has kept it; None: not counted.
        self._references: list[int] | None = None

    def keep(self, namespace: dict[str, Any], name: str, label: str) -> None:
        """Give an attribute a place: the tensor that is bound now, if no other attribute has it."""
        slot = self._slots.get((id(namespace), name))
        if slot is not None and slot.fits():
            return
        value: Tensor = namespace[name]
        taken = {storage_id(other.place) for other in self._slots.values() if other is not slot}
        # In the middle of validation's `inference_mode` a reset makes tensors that nothing may write.
        if value.is_inference() or storage_id(value) in taken or value.requires_grad:
            with torch.inference_mode(False), torch.no_grad():
                value = namespace[name] = torch.empty_like(value, requires_grad=False).copy_(value)
        self._slots[id(namespace), name] = _Slot(namespace, name, label, value)
        self._arrange()

    def _arrange(self) -> None:
        slots = [*self._slots.values()]
        self._namespaces = [slot.namespace for slot in slots]
        self._names = [slot.name for slot in slots]
        self._places = [slot.place for slot in slots]
        self._rebound = [slot.place for slot in slots if slot.rebound]
        self._references = None

    def _let_go(self) -> None:
        """Hold the places in the slots alone, so that who else holds one can be counted."""
        self._places, self._rebound, self._references = [], [], None

    def _all_bound(self) -> bool:
        try:
            found = map(operator.getitem, self._namespaces, self._names)
            return all(map(operator.is_, found, self._places))
        except KeyError:
            return False

    def forget(self, keeps: Callable[[dict[str, Any]], bool]) -> None:
        """Let go of the places of objects that are not kept any more."""
        self._slots = {key: slot for key, slot in self._slots.items() if keeps(slot.namespace)}
        self._arrange()

    def tensors(self) -> dict[str, Tensor]:
        """The places, by what they are called."""
        return {slot.label: slot.place for slot in self._slots.values()}

    def _untouched(self) -> bool:
        """Whether the places are bound as the last replay left them, and nobody has kept one."""
        if self._references is None or not self._all_bound():
            return False
        return not any(map(operator.gt, map(sys.getrefcount, self._rebound), self._references))

    def fits(self) -> bool:
        """Whether all that has been bound can be copied into its place."""
        return self._all_bound() or all(slot.fits() for slot in self._slots.values())

    def described(self) -> dict[str, str]:
        """What kind of tensor is bound now, by what it is called."""
        slots = self._slots.values()
        return {slot.label: _described(slot.namespace.get(slot.name)) for slot in slots}

    def adopt(self) -> None:
        """Copy what somebody has bound into the places; who has kept one gets it for himself.

        To be called before each replay.
        """
        if not self._slots or self._untouched():
            self._references = None
            return
        self._let_go()
        places = {storage_id(slot.place) for slot in self._slots.values()}
        # Where it does not fit, no graph will be replayed that knows the place.
        moved = [slot for slot in self._slots.values() if not _is_bound(slot) and slot.fits()]
        for slot in moved:
            if storage_id(slot.namespace[slot.name]) in places:  # that of another state
                slot.namespace[slot.name] = slot.namespace[slot.name].clone()
        for slot in moved:
            _take_over(slot)
        for slot in self._slots.values():
            if slot.rebound and _is_bound(slot) and slot.counted() > _OWN_REFERENCES + 1:
                slot.namespace[slot.name] = _give_away(slot)
        self._arrange()

    def count_references(self) -> None:
        """Note how many refer to the places, when nobody outside has had the time to keep one."""
        if self._slots:
            self._references = [*map(sys.getrefcount, self._rebound)]

    def write_back(self) -> None:
        """At the end of a captured step: its values, copied into the places; these are bound again.

        Raises:
            CaptureError: if one of them has another shape or dtype.
        """
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
                if storage_id(value) in places:  # the value of another state before the step
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
        """Bind the places again."""
        for slot in self._slots.values():
            slot.namespace[slot.name] = slot.place


def _is_bound(slot: _Slot) -> bool:
    return slot.namespace.get(slot.name) is slot.place


def _give_away(slot: _Slot) -> Tensor:
    """Leave the tensor to who has kept it, with its value: an eager step would not touch it."""
    kept = slot.place
    with torch.inference_mode(False):
        slot.place = kept.detach()
        kept.data = kept.clone()
    return slot.place


def _take_over(slot: _Slot) -> None:
    """Bring what has been bound to the place.

    In an eager step a state that is written in place stays the tensor that somebody may have kept; so
    that one moves to the place. One that the step binds anew is left to him.
    """
    found: Tensor = slot.namespace[slot.name]
    place = _give_away(slot) if slot.counted() > _OWN_REFERENCES else slot.place
    with torch.no_grad():
        place.copy_(found)
    if not slot.rebound and not found.is_inference():
        found.data = place
        slot.place = found
    slot.namespace[slot.name] = slot.place
