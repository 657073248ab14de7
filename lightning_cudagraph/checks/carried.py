"""Tensors that a step, or the host between two steps, puts anew into an attribute of a module.

The hidden state of a recurrent net that is kept on the module is one, a moving mean another. A graph
reads and writes addresses, so such an attribute has buffers of its own: what it holds is copied in
before a replay, what the step puts there is copied into them at the end of the step, inside the graph,
and the module is given a copy afterwards.

Which attributes these are shows in warm-up: they hold other tensors of the same form before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_cudagraph.checks.audit.host_objects import VALUES
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.recomputed import recomputed_names
from lightning_cudagraph.tensors.writes import storage_id

__all__ = ["CarriedTensors"]

_Form = tuple[Any, ...]

# After so many steps in a row with another form than in the graph, an attribute has changed for good.
_MANY_UNFIT_STEPS = 4


def _tensors_of(value: Any) -> list[Tensor] | None:
    """The tensors in a tensor or in tuples of them; None if there is anything else."""
    kind = type(value)
    if kind is Tensor:
        return [value] if value.layout is torch.strided else None
    if kind is not tuple:
        return [] if kind in VALUES else None
    found: list[Tensor] = []
    for part in value:
        inner = _tensors_of(part)
        if inner is None:
            return None
        found += inner
    return found


def _form_of(value: Any) -> _Form | None:
    """All about a value that a graph takes for granted, or None if it cannot be carried."""
    tensors = _tensors_of(value)
    if not tensors:
        return None
    first = {id(tensor): index for index, tensor in reversed([*enumerate(tensors)])}
    described = tuple((t.shape, t.stride(), t.dtype, t.device, first[id(t)]) for t in tensors)
    return (_skeleton(value), described)


def _skeleton(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_skeleton, value))
    return Tensor if type(value) is Tensor else (type(value), value)


def _mapped(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    if type(value) is tuple:
        return tuple(_mapped(part, new) for part in value)
    return new(value) if type(value) is Tensor else value


def _once_each(new: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same new tensor for the same tensor."""
    made: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = new(tensor)
        return made[id(tensor)]

    return once


@dataclass(eq=False)
class _Carried:
    """One attribute.

    Attributes:
        namespace: the attributes of its module.
        name: its name.
        of: the module, in words.
        form: what it holds, but for the values.
        buffers: what is in it while a graph can look: the same containers around static tensors.
        needs_grad: which of these take the place of tensors that required gradients, by id.
        host: what the module had before the step.
        found: what a step on the static batch finds.
        leaves: tensors in that, to which gradients come that go back through the attribute.
        versions: of the static tensors, before the step.
        is_set: the captured step puts something there.
    """

    namespace: dict[str, Any]
    name: str
    of: str
    form: _Form
    buffers: Any
    needs_grad: set[int]
    host: Any = None
    found: Any = None
    leaves: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_set: bool = False

    @classmethod
    def holding(cls, namespace: dict[str, Any], name: str, of: str, form: _Form) -> _Carried:
        """One that holds what the module holds."""
        value = namespace[name]
        buffers = _mapped(value, _once_each(lambda tensor: tensor.detach().clone()))
        pairs = zip(_tensors_of(value) or [], _tensors_of(buffers) or [], strict=True)
        return cls(namespace, name, of, form, buffers, {id(b) for was, b in pairs if was.requires_grad})

    @property
    def tensors(self) -> list[Tensor]:
        return _tensors_of(self.buffers) or []

    @property
    def now(self) -> Any:
        return self.namespace.get(self.name)

    def put_in(self) -> bool:
        """Copy in what the module holds; whether that has the form that it must have."""
        now = self.now
        if now is self.buffers:
            return True
        if _form_of(now) != self.form:
            return False
        self.host = now
        _copy(self.tensors, _tensors_of(now) or [])
        self.namespace[self.name] = self.buffers
        return True

    def take_out(self) -> None:
        """Give the module back what it had."""
        if self.now is self.buffers:
            self.namespace[self.name] = self.host

    def hand_out(self) -> None:
        """Give the module what a replay has left, as its own; or what it had, if none was."""
        if self.is_set and self.now is self.buffers:
            self.host = _mapped(self.buffers, _once_each(lambda tensor: tensor.detach().clone()))
        self.take_out()

    def let_in(self) -> None:
        """Let a step on the static batch find tensors that tell whether gradients go back."""
        self.leaves = []

        def alias(tensor: Tensor) -> Tensor:
            if id(tensor) not in self.needs_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            self.leaves.append(leaf)
            with torch.enable_grad():
                return leaf.view_as(leaf)

        self.versions = [tensor._version for tensor in self.tensors]
        self.found = _mapped(self.buffers, _once_each(alias))
        self.namespace[self.name] = self.found

    def left_behind(self, outlive: set[int]) -> list[Tensor] | None:
        """What the step has put there, or None if it cannot be carried."""
        now, leaves, self.leaves = self.now, self.leaves, []
        if any(leaf.grad is not None for leaf in leaves) or _form_of(now) != self.form:
            return None
        if [tensor._version for tensor in self.tensors] != self.versions:
            # Somebody can have kept the tensor, which a replay would not write into.
            raise CaptureError(
                f"The training step writes in place into `{self.name}` of {self.of}, where there is"
                " another tensor in every step.",
                f"Make a new one (`self.{self.name} = self.{self.name} * 2`), or keep it in a buffer"
                " (`register_buffer`) that is only written in place.",
            )
        if now is self.found:
            return []
        tensors = _tensors_of(now) or []
        if any(storage_id(tensor) in outlive for tensor in tensors):
            return None
        self.is_set = True
        return tensors


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in memory, and the first one behind it."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors into others, some of which may be the same or lie in the same memory."""
    targets = {storage_id(tensor) for tensor in into}
    with torch.no_grad():
        values = [value.clone() if storage_id(value) in targets else value for value in values]
        for tensor, value in zip(into, values, strict=True):
            tensor.copy_(value)


class CarriedTensors:
    """The attributes of a model's modules whose tensors are others in every step.

    Args:
        model: the model.
        device: where steps are captured; tensors elsewhere are not carried.
        unwatched: names of attributes that are none of ours.
        stays_on_host: whether a module is only called on the host, such as a metric.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        unwatched: frozenset[str],
        stays_on_host: Callable[[nn.Module], bool],
    ) -> None:
        self._model = model
        self._device = device
        self._unwatched = unwatched
        self._stays_on_host = stays_on_host
        self._seen: dict[tuple[int, str], tuple[_Form, list[ref[Tensor]]]] = {}
        self._moving: set[tuple[int, str]] = set()
        self._carried: list[_Carried] = []
        self._unfit_steps = 0  # in a row

    @property
    def has_any(self) -> bool:
        """Whether any attribute is carried."""
        return bool(self._carried)

    def watch(self) -> None:
        """Note what the attributes hold before a warm-up step, or before a capture."""
        seen: dict[tuple[int, str], tuple[_Form, list[ref[Tensor]]]] = {}
        for namespace, name, _, form in self._attributes():
            key = (id(namespace), name)
            tensors = _tensors_of(namespace[name]) or []
            seen[key] = (form, [*map(ref, tensors)])
            was = self._seen.get(key)
            if was is None or was[0] != form:
                continue
            if any(before() is not now for before, now in zip(was[1], tensors, strict=True)):
                self._moving.add(key)
        self._seen = seen

    def place(self) -> None:
        """Before a capture: give buffers to the attributes that hold other tensors in every step."""
        known = {(id(carried.namespace), carried.name) for carried in self._carried}
        for namespace, name, of, form in [*self._attributes()]:
            key = (id(namespace), name)
            if key in self._moving and key not in known:
                self._carried.append(_Carried.holding(namespace, name, of, form))
        self.put_in()

    def put_in(self, has_graphs: bool = False) -> str:
        """Before a step: copy into the buffers what the modules hold, and let the step find those.

        Args:
            has_graphs: there are graphs that read these buffers. An attribute that holds another form
                for a few steps in a row, such as what an eager step with fewer samples has left there,
                is still carried afterwards.

        Returns:
            Why this step cannot be a replay, in words; empty if it can.
        """
        if not self._carried:
            return ""
        unfit = [carried for carried in self._carried if not carried.put_in()]
        self._unfit_steps = self._unfit_steps + 1 if unfit else 0
        if has_graphs and 0 < self._unfit_steps < _MANY_UNFIT_STEPS:
            return f"`{unfit[0].name}` of {unfit[0].of} holds tensors of another form than in the graph"
        self._carried = [carried for carried in self._carried if carried not in unfit]
        return ""

    def take_out(self) -> None:
        """Before an eager step, and after a failure: give the modules back what they had."""
        for carried in self._carried:
            carried.take_out()

    def hand_out(self) -> None:
        """After a replay: give the modules copies, which the next one does not overwrite."""
        for carried in self._carried:
            carried.hand_out()

    @contextmanager
    def inside(self, turns: Callable[[], str]) -> Iterator[None]:
        """Around a step on the static batch: what it puts into the attributes goes into the buffers.

        What cannot go there stays where it is, and is found by the audit: tensors of another form, and
        those that share memory with parameters or buffers of the model. Nor can what the step writes
        into in place, or through which gradients go back into the step before.

        Args:
            turns: asked at the end, which hooks the host had turns for, in words; empty if none.

        Raises:
            CaptureError: if the host could look at such an attribute in the middle of the step.
        """
        if not self._carried:
            yield
            return
        for carried in self._carried:
            carried.let_in()
        try:
            yield
            self._settle(turns())
        except BaseException:
            for carried in self._carried:
                carried.namespace[carried.name] = carried.buffers
            raise

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """In the middle of the step: inside, the attributes hold what they held before it."""
        now = [(carried, carried.namespace.get(carried.name)) for carried in self._carried]
        for carried in self._carried:
            carried.namespace[carried.name] = carried.buffers
        try:
            yield
        finally:
            for carried, value in now:
                carried.namespace[carried.name] = value

    def _settle(self, turns: str) -> None:
        outlive = {storage_id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        into: list[Tensor] = []
        values: list[Tensor] = []
        places: list[tuple[_Carried, int, int]] = []
        for carried in self._carried:
            left = carried.left_behind(outlive)
            if left is None:
                continue
            for begin, end in map(_extent, left):
                for other, its_begin, its_end in places:
                    if other is not carried and begin < its_end and its_begin < end:
                        raise CaptureError(
                            f"The training step puts the same memory into `{carried.name}` of"
                            f" {carried.of} and into `{other.name}` of {other.of}; after a replay, each"
                            " would have memory of its own.",
                            f"Put a copy into one of them: `self.{carried.name} = ....clone()`.",
                        )
                places.append((carried, begin, end))
            if left and turns:
                raise CaptureError(
                    f"{turns} runs in the middle of the training step, which puts another tensor into"
                    f" `{carried.name}` of {carried.of}; a replay does that only at its end, and the"
                    " hook would find that of the step before.",
                    "Move what the hook does to `on_train_batch_end`.",
                )
            into += carried.tensors if left else []
            values += left
            carried.namespace[carried.name] = carried.buffers
        _copy(into, values)

    def _attributes(self) -> Iterator[tuple[dict[str, Any], str, str, _Form]]:
        for path, module in self._model.named_modules():
            if self._stays_on_host(module):
                continue
            namespace = vars(module)
            others = self._unwatched | recomputed_names(module)
            for name, value in namespace.items():
                if type(value) in (Tensor, tuple) and name not in others:
                    form = _form_of(value)
                    if form is not None and all(d[3].type == self._device.type for d in form[1]):
                        of = f"`{path}`" if path else f"the `{type(module).__qualname__}`"
                        yield namespace, name, of, form
