"""Tensors outside of a metric that its calls use: parameters of the model, gradients, kept tensors.

A deferred call is made after the replay. It would find what the step changes after the place of the
call, and the step would miss what the call writes. Warm-up steps tell: their calls are in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.checks.verify.compare import names_that_differ
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.layouts import has_strides
from lightning_cudagraph.tensors.writes import storage_id, tensors_in, written_by
from lightning_cudagraph.trainer.metrics.model_metrics import is_metric, metrics_of, states_of


class _OlderTensors(OwnDispatchMode):
    """Dispatch mode of a call that tells the tensors of others from its own, and from what ops make."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._own = {storage_id(tensor) for tensor in own if has_strides(tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_id(t): t for t in tensors_in(args, kwargs) if has_strides(t)}
        self.note({key: t for key, t in given.items() if key not in self._own}, func, args, kwargs)
        result = func(*args, **kwargs)
        made = {storage_id(tensor) for tensor in tensors_in(result) if has_strides(tensor)}
        self._own |= made - given.keys()
        return result

    def note(self, others: dict[int, Tensor], func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the tensors of others, by storage, that an op is about to use."""
        raise NotImplementedError


class NoWrites(_OlderTensors):
    """Dispatch mode of a trial, which must not write into tensors that are no copies."""

    def note(self, others: dict[int, Tensor], func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if others and any(storage_id(t) in others for t in written_by(func, args, kwargs)):
            raise CaptureError("it writes into a tensor of others.", "Give the metric a state.")


class _Used(_OlderTensors):
    """Dispatch mode that finds the tensors of others that a call uses, with their versions before."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__(own)
        self.found: dict[int, tuple[Tensor, int]] = {}

    def note(self, others: dict[int, Tensor], func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for key, tensor in others.items():
            if not tensor.is_inference():  # these have no versions
                self.found.setdefault(key, (tensor, tensor._version))


class _Use:
    """A use of one tensor by calls of metrics."""

    def __init__(self, model: nn.Module, tensor: Tensor) -> None:
        self.tensor = tensor
        self.members: set[int] = set()
        self._holders = [space for space in _spaces(model) if _holds(space, tensor)]
        self._gradients = [parameter for parameter in model.parameters() if parameter.grad is tensor]

    def remember(self) -> None:
        self._version = self.tensor._version
        self._value = self.tensor.detach().clone()  # because fused optimizers count no version

    def has_changed(self) -> bool:
        """True if the step has written into it, or put another tensor in its place."""
        return (
            self.tensor._version != self._version
            or names_that_differ({"": self.tensor.detach()}, {"": self._value}) != []
            or not all(_holds(space, self.tensor) for space in self._holders)
            or any(parameter.grad is not self.tensor for parameter in self._gradients)
        )


class OutsideTensors:
    """The tensors that calls of metrics have used in the warm-up step under way.

    Attributes:
        reasons: why a call cannot be deferred, by the identity of the metric.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._uses: dict[int, _Use] = {}
        self.reasons: dict[int, str] = {}

    @contextmanager
    def watched(self, metric: nn.Module, *given: Any) -> Iterator[None]:
        """Context of a call that will be deferred."""
        self._note_changes()
        members = {id(inner) for _, inner in metrics_of(metric)}
        states = [own[name] for _, own, name in states_of(metric) if name in own]
        with _Used(tensors_in(*given, *states)) as used:
            yield
        names = self._registered()
        for key, (tensor, version) in used.found.items():
            if tensor._version != version and key in names:
                self._refuse(members, f"writes into {names[key]}")
            use = self._uses.setdefault(key, _Use(self._model, tensor))
            use.members |= members
        for use in self._uses.values():  # what calls themselves change stays in their order
            use.remember()

    def step_ended(self) -> None:
        self._note_changes()
        self._uses.clear()

    def _note_changes(self) -> None:
        for key, use in self._uses.items():
            if use.has_changed():
                name = self._registered().get(key, "a tensor")
                self._refuse(use.members, f"reads {name}, which the step changes later")

    def _refuse(self, members: set[int], reason: str) -> None:
        for member in members:
            self.reasons.setdefault(member, reason)

    def _registered(self) -> dict[int, str]:
        """The parameters and buffers of the model by storage, in words, without buffers of metrics."""
        found: dict[int, str] = {}
        for path, module in self._model.named_modules():
            buffers = {} if is_metric(module) else module._buffers
            for kind, table in (("parameter", module._parameters), ("buffer", buffers)):
                for name, tensor in table.items():
                    if tensor is not None and has_strides(tensor):
                        found[storage_id(tensor)] = f"the {kind} `{path}{'.' if path else ''}{name}`"
        return found


def _spaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The dictionaries of modules in which tensors are bound to names, without those of metrics."""
    for module in model.modules():
        if not is_metric(module):
            yield from (vars(module), module._buffers)


def _holds(space: dict[str, Any], tensor: Tensor) -> bool:
    return any(value is tensor for value in space.values())
