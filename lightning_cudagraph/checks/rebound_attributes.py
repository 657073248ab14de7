"""Rebound attributes: module attributes that a step, or the host between steps, binds to new tensors.

Examples are a hidden state that is kept on the module, and a moving mean. A graph reads and writes
fixed addresses, so each rebound attribute gets static tensors. Before a replay its value is copied into
them; at the end of the captured step the new value is copied into them, inside the graph; after the
replay the module gets a copy.

Warm-up finds these attributes: before each step they hold different tensors of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_cudagraph.checks.walk.host_objects import VALUES
from lightning_cudagraph.compat.attributes import bound
from lightning_cudagraph.errors import CaptureError, see
from lightning_cudagraph.tensors.batch import copied_leaf, has_gradient, retains_gradient
from lightning_cudagraph.tensors.layouts import alignment_bytes, extent, has_strides, without_repeats
from lightning_cudagraph.tensors.recomputed import recomputed_names
from lightning_cudagraph.tensors.writes import storage_id

_Form = tuple[Any, ...]

# After so many steps in a row with another form than in the graph, an attribute has changed for good.
_MAX_MISMATCHED_STEPS = 4


def _tensors_of(value: Any) -> list[Tensor] | None:
    """The tensors in a tensor or in tuples of them; None if there is anything else."""
    kind = type(value)
    if kind is Tensor:
        return [value] if has_strides(value) and not value.is_quantized else None
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
    """The properties of a value that a graph is specialised on; None if it cannot be carried."""
    tensors = _tensors_of(value)
    if not tensors:
        return None
    first = {id(tensor): index for index, tensor in reversed([*enumerate(tensors)])}
    described = tuple(
        (t.shape, t.stride(), t.dtype, t.device, alignment_bytes(t), *_signs(t), first[id(t)])
        for t in tensors
    )
    return (_skeleton(value), described)


def _signs(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _skeleton(value: Any) -> Any:
    """The value with `Tensor` for each tensor in it."""
    if type(value) is tuple:
        return tuple(map(_skeleton, value))
    return Tensor if type(value) is Tensor else (type(value), value)


def _mapped(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    if type(value) is tuple:
        return tuple(_mapped(part, new) for part in value)
    return new(value) if type(value) is Tensor else value


def _once_each(new: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Memoize `new`: one new tensor for each tensor."""
    made: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = new(tensor)
        return made[id(tensor)]

    return once


@dataclass(eq=False)
class _Carried:
    """One rebound attribute.

    Attributes:
        form: structure, shapes, strides, dtypes and devices of the value.
        buffers: the value inside a captured step: the same containers around static tensors.
        needs_grad: ids of the static tensors that replace tensors which required gradients.
        found: the value that a step on the static batch reads.
        leaves: leaf tensors in `found`; a gradient on one of them went back through the attribute.
        versions: version counters of the static tensors before the step.
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
    is_read: bool = False

    @classmethod
    def holding(cls, namespace: dict[str, Any], name: str, of: str, form: _Form) -> _Carried:
        """Make static tensors with the module's present values."""
        value = namespace[name]
        buffers = _mapped(value, _once_each(_copied))
        pairs = zip(_tensors_of(value) or [], _tensors_of(buffers) or [], strict=True)
        return cls(namespace, name, of, form, buffers, {id(b) for was, b in pairs if was.requires_grad})

    @property
    def tensors(self) -> list[Tensor]:
        return _tensors_of(self.buffers) or []

    @property
    def now(self) -> Any:
        return self.namespace.get(self.name)

    def put_in(self) -> bool:
        """Copy the module's value into the static tensors; False if its form is another one."""
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
        """Restore the module's own value."""
        if self.now is self.buffers:
            self.namespace[self.name] = self.host

    def copy_out(self) -> None:
        """Give the module a copy of what a replay left; its own value if the step sets none."""
        if self.is_set and self.now is self.buffers:
            self.host = _mapped(self.buffers, _once_each(_copied))
        self.take_out()

    def let_in(self) -> None:
        """Bind tensors that show whether gradients go back through the attribute."""
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
        now, leaves, self.leaves = self.now, self.leaves, []
        if any(leaf.grad is not None for leaf in leaves) or _form_of(now) != self.form:
            return None
        if [tensor._version for tensor in self.tensors] != self.versions:
            # User code can hold a reference to the tensor, which a replay would not write into.
            raise CaptureError(
                f"The training step writes in place into `{self.name}` of {self.of}, where there is"
                " another tensor in every step.",
                f"Make a new one (`self.{self.name} = self.{self.name} * 2`), or keep it in a buffer"
                " (`register_buffer`) that is only written in place." + see("kept_tensors"),
            )
        if now is self.found:
            return []
        tensors = _tensors_of(now) or []
        if any(storage_id(tensor) in outlive for tensor in tensors):
            return None
        if any(map(has_gradient, tensors)):
            raise retains_gradient(
                f"The training step keeps a tensor in `{self.name}` of {self.of} with a gradient"
                " (`retain_grad()`), which the tensor that a replay leaves there does not have."
            )
        self.is_set = True
        return tensors


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The address range of a tensor: its first byte, and the first one after it."""
    elements = extent(tensor.shape, tensor.stride()) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _copied(tensor: Tensor) -> Tensor:
    copy: Tensor = copied_leaf(tensor.detach())
    return copy


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors into others that may share memory with them."""
    targets = {storage_id(tensor) for tensor in into}
    with torch.no_grad():
        values = [_copied(value) if storage_id(value) in targets else value for value in values]
        for tensor, value in zip(into, values, strict=True):
            without_repeats(tensor).copy_(without_repeats(value))


class ReboundAttributes:
    """The rebound attributes of a model's modules; tensors on another device are not carried."""

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
        self._mismatched_steps = 0  # in a row

    def watch(self) -> None:
        """Record the attributes' tensors before a warm-up step or a capture, and find rebound ones."""
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
        """Give static tensors to the rebound attributes, before a capture."""
        known = {(id(carried.namespace), carried.name) for carried in self._carried}
        for namespace, name, of, form in [*self._attributes()]:
            key = (id(namespace), name)
            if key in self._moving and key not in known:
                self._carried.append(_Carried.holding(namespace, name, of, form))
        self.put_in()

    def put_in(self, has_graphs: bool = False) -> str:
        """Copy the modules' values into the static tensors, and bind these, before a step.

        Args:
            has_graphs: graphs of any engine read these static tensors. An attribute that holds another
                form for a few steps in a row, such as after an eager step with fewer samples, stays
                carried.

        Returns:
            The reason why this step cannot be a replay; empty if it can.
        """
        if not self._carried:
            return ""
        mismatched = [carried for carried in self._carried if not carried.put_in()]
        self._mismatched_steps = self._mismatched_steps + 1 if mismatched else 0
        if has_graphs and 0 < self._mismatched_steps < _MAX_MISMATCHED_STEPS:
            first = mismatched[0]
            return f"`{first.name}` of {first.of} holds tensors of another form than in the graph"
        self._carried = [carried for carried in self._carried if carried not in mismatched]
        return ""

    def enter(self) -> bool:
        """Put all values in before a replay; False, and nothing is in, if one does not fit."""
        if all(carried.put_in() for carried in self._carried):
            return True
        self.take_out()
        return False

    def keep(self, can_read: Callable[[nn.Module], frozenset[str]]) -> None:
        """Carry only what a captured step can have read, or has set.

        The others are set by code between steps, which may keep any number of tensors on a module.
        """
        names = {id(vars(module)): can_read(module) for module in self._model.modules()}
        for carried in self._carried:
            carried.is_read |= carried.name in names[id(carried.namespace)]
            if not (carried.is_read or carried.is_set):
                carried.take_out()
        self._carried = [carried for carried in self._carried if carried.is_read or carried.is_set]

    def take_out(self) -> None:
        """Restore the modules' own values, before an eager step and after a failure."""
        for carried in self._carried:
            carried.take_out()

    def copy_out(self) -> None:
        """Give the modules copies after a replay, which the next one does not overwrite."""
        for carried in self._carried:
            carried.copy_out()

    @contextmanager
    def inside(self, hooks: Callable[[], str]) -> Iterator[None]:
        """Copy tensors that the enclosed step binds to the attributes into the static tensors.

        Not copied, and left for the audit to find: tensors of another form, tensors that share memory
        with the model's parameters or buffers, and attributes through which gradients go back into the
        step before.

        Args:
            hooks: asked at the end for the hooks at the step's graph breaks, in words; empty if none.

        Raises:
            CaptureError: if the step writes into such a tensor in place, binds one memory to two
                attributes, or rebinds an attribute that a hook in the middle of the step could read.
        """
        if not self._carried:
            yield
            return
        for carried in self._carried:
            carried.let_in()
        try:
            yield
            self._settle(hooks())
        except BaseException:
            for carried in self._carried:
                carried.namespace[carried.name] = carried.buffers
            raise

    def as_before(self) -> AbstractContextManager[None]:
        """Bind the values from before the step for the enclosed host code in the middle of it."""
        return bound((each.namespace, each.name, each.buffers) for each in self._carried)

    def _settle(self, hooks: str) -> None:
        """Copy the values that a step has left into the static tensors."""
        outlive = {storage_id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        into: list[Tensor] = []
        values: list[Tensor] = []
        extents: list[tuple[_Carried, int, int]] = []
        for carried in self._carried:
            left = carried.left_behind(outlive)
            if left is None:
                continue
            for begin, end in map(_extent, left):
                for other, its_begin, its_end in extents:
                    if other is not carried and begin < its_end and its_begin < end:
                        raise CaptureError(
                            f"The training step puts the same memory into `{carried.name}` of"
                            f" {carried.of} and into `{other.name}` of {other.of}; after a replay, each"
                            " would have memory of its own.",
                            f"Put a copy into one of them: `self.{carried.name} = ....clone()`.",
                        )
                extents.append((carried, begin, end))
            if left and hooks:
                raise CaptureError(
                    f"{hooks} runs in the middle of the training step, which puts another tensor into"
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
