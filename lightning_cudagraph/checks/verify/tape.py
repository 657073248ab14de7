"""Op tape: the ops of a step with their Python arguments, compared with the same step later.

A frozen number matters only where it reaches an op, a shape or a branch. There it shows, wherever it is
kept: the first op that differs, or that has another argument, names it with the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.errors import Location
from lightning_cudagraph.tensors.writes import storage_id

# Of lists in arguments; of longer ones, the rest is compared by its length.
_MAX_ITEMS = 4096
# Differing ops that are recorded.
_MAX_DIFFERENCES = 64
_PLAIN = (int, float, complex, bool, str, type(None))


@dataclass(frozen=True)
class _TensorForm:
    """A tensor among the arguments of an op.

    It has a name if it outlives the step, and a value if it was made from a number on the host.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    value: Any = None


# True where the host computes the floats for each replay, as in the step of an optimizer.
_are_floats_given: OfThread[bool] = OfThread(False)


def floats_given(are_given: bool) -> AbstractContextManager[None]:
    """Let tapes leave out floats, or let them note floats again.

    The numbers that come from them are compared all the same: those of the step and of the replay.
    """
    return setting(_are_floats_given, value=are_given)


_Entry = tuple[str, tuple[Any, ...]]  # the op, and its arguments in a comparable form


@dataclass(frozen=True)
class TapeDifference:
    """An op that differs from the recorded one, or has other numbers or shapes (`is_value`)."""

    was: str
    now: str
    where: Location | None
    is_value: bool

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        if self.is_value:
            return f"{self.was} in the captured step, {self.now} now{at}"
        return f"the captured step comes to {self.was}, the step now to {self.now}{at}"


class OpTape:
    """The ops of a step, recorded when a check first runs it eagerly."""

    def __init__(self) -> None:
        self._entries: list[_Entry] | None = None
        self._differences: list[TapeDifference] = []

    @property
    def difference(self) -> TapeDifference | None:
        """The first differing op of the latest run; None if there is none.

        Ops with a line of the user's come first: the optimizer gets its learning rate from this package,
        as another number than before, and the graph reads that from the device.
        """
        with_line = (difference for difference in self._differences if difference.where is not None)
        return next(with_line, next(iter(self._differences), None))

    def compared(self, named: Mapping[str, Tensor]) -> OwnDispatchMode:
        """Dispatch mode around the step, which records the first time and compares later."""
        self._differences.clear()
        return _TapeMode(self, named)


class _TapeMode(OwnDispatchMode):
    def __init__(self, tape: OpTape, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tape = tape
        self._was = tape._entries
        self._entries: list[_Entry] = []
        self._is_aligned = True
        self._names = {storage_id(tensor): name for name, tensor in named.items()}

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None:
            return
        if self._was is None:
            self._tape._entries = self._entries
        elif len(self._entries) < len(self._was):
            missing = _op_in_words(self._was[len(self._entries)])
            self._note(TapeDifference(missing, "its end", None, is_value=False))

    def _note(self, difference: TapeDifference) -> None:
        # After a different op, positions no longer match.
        self._is_aligned = self._is_aligned and difference.is_value
        self._tape._differences.append(difference)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made_on_host = func._schema.name == "aten::lift_fresh"
        entry = (str(func), (self._form(args, made_on_host), self._form(kwargs, False)))
        index = len(self._entries)
        self._entries.append(entry)
        if self._was is not None and self._is_aligned:
            was = self._was[index] if index < len(self._was) else None
            if was != entry and len(self._tape._differences) < _MAX_DIFFERENCES:
                self._note(_difference(was, entry))
        return func(*args, **kwargs)

    def _form(self, value: Any, made_on_host: bool) -> Any:
        kind = type(value)
        if kind is float and _are_floats_given.value:
            return kind.__name__
        if kind in _PLAIN:
            # NaN equals NaN; 1, 1.0 and True are different.
            return (kind.__name__, "nan" if value != value else value)
        if issubclass(kind, Tensor):
            return self._tensor_form(value, made_on_host)
        if issubclass(kind, (list, tuple)):
            return (len(value), *(self._form(item, made_on_host) for item in value[:_MAX_ITEMS]))
        if issubclass(kind, dict):
            return tuple((str(key), self._form(item, False)) for key, item in value.items())
        if kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
            return str(value)
        return kind.__qualname__

    def _tensor_form(self, tensor: Tensor, made_on_host: bool) -> Any:
        if tensor.layout is not torch.strided:
            return str(tensor.layout)
        value = None
        if (
            made_on_host
            and not _are_floats_given.value
            and tensor.device.type == "cpu"
            and tensor.numel() == 1
        ):
            value = repr(tensor.item())
        name = self._names.get(storage_id(tensor), "")
        return _TensorForm(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, value)


def _difference(was: _Entry | None, now: _Entry) -> TapeDifference:
    where = user_location()
    if was is None or was[0] != now[0]:
        then = "its end" if was is None else _op_in_words(was)
        return TapeDifference(then, _op_in_words(now), where, is_value=False)
    one, other = _first_leaves(was[1], now[1])
    return TapeDifference(f"{_op_in_words(now)} had {one}", f"has {other}", where, is_value=True)


def _op_in_words(entry: _Entry) -> str:
    return f"`{entry[0].removesuffix('.default')}`"


def _first_leaves(was: Any, now: Any) -> tuple[str, str]:
    """The first difference of two forms, in words."""
    both = isinstance(was, tuple) and isinstance(now, tuple)
    if both and len(was) == len(now) and not _is_number(was):
        for one, other in zip(was, now, strict=True):
            if one != other:
                return _first_leaves(one, other)
    if isinstance(was, _TensorForm) and isinstance(now, _TensorForm):
        for name in ("value", "shape", "dtype", "stride", "name"):
            one, other = getattr(was, name), getattr(now, name)
            if one != other:
                if name == "name":
                    return one or "another tensor", other or "another tensor"
                return f"a tensor with {name} {one}", f"one with {other}"
    return _value_in_words(was), _value_in_words(now)


def _is_number(form: Any) -> bool:
    return isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], str)


def _value_in_words(form: Any) -> str:
    return str(form[1]) if _is_number(form) else str(form)
