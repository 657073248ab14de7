"""Gradients that a captured step uses or makes, and that no replay would find or make.

Lightning calls `training_step` before it drops the gradients of the step before, whose memory the graph
reuses. And a graph knows the parameters of the module and of its optimizer: a replay gives no other
tensor the gradient that the capture has made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import unwrap
from types import CodeType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid, refuse
from lightning_cudagraph.device.sentry.own_modes import InputsMode, OwnFunctionMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.writes import has_memory, storage_id

T = TypeVar("T")
_READ = Tensor.grad.__get__  # type: ignore[union-attr]
# The files of `Module.zero_grad`, `Module.to` and `Optimizer.zero_grad`. They may read a gradient: they
# delete it, or move it to a device, and compute nothing from it.
_DROP = {
    unwrap(function).__code__.co_filename
    for function in (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad)
}
_KEEP_IT = (
    "Write what you need of it into a registered buffer in `on_before_optimizer_step`"
    " (`self.norm.copy_(...)`), and read the buffer."
)
_NO_PARAMETER = "that is no parameter of the module: replays would not give it one"
_REGISTER = (
    "Make it a parameter of the module, `self.name = nn.Parameter(...)`, or register the layer that it"
    " is of; it may have an optimizer of its own."
)


class LostGradients:
    """The gradients of one captured step.

    Args:
        module: the module; all of its parameters are known to the graph.
        stepped: the parameters of the optimizer.
        dropped: the parameters with gradients from the step before, which this step drops.
        batch: the static batch, if its gradients are those of a batch alone.
        unknown: what a tensor is that the graph does not know, in words, with the remedy.
    """

    def __init__(
        self,
        module: nn.Module,
        stepped: Iterable[nn.Parameter],
        dropped: Iterable[nn.Parameter] = (),
        batch: Any = (),
        unknown: tuple[str, str] = (_NO_PARAMETER, _REGISTER),
    ) -> None:
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._dropped = {*map(id, dropped)}
        self._unknown = unknown
        self._known = {*self._names, *map(id, stepped)}
        leaves = (leaf for _, leaf in flatten_batch(batch))
        self._own_memory = {storage_id(leaf) for leaf in leaves if has_memory(leaf)}
        # By identity: with the gradient before the step, and its version.
        self._others: dict[int, tuple[ref[Tensor], Tensor | None, int]] = {}

    def unused_in(self, step: Callable[[], T]) -> Callable[[], T]:
        """Return a step that is refused if it looks at gradients of the step before."""

        def run() -> T:
            with _Reads(self), self.watched():
                return step()

        return run

    def watched(self) -> AbstractContextManager[Any]:
        """Context of a step, or of the part of it that may use other tensors."""
        return _Watch(self)

    def note(self, inputs: Iterable[Tensor], made: set[int]) -> None:
        """Look at the inputs of an op; `made` are the storages that the step has made so far."""
        for tensor in inputs:
            if not (tensor.requires_grad and tensor.is_leaf) or id(tensor) in self._known:
                continue
            if id(tensor) not in self._others and storage_id(tensor) not in made | self._own_memory:
                self._others[id(tensor)] = ref(tensor), tensor.grad, _version(tensor.grad)

    def refuse_read(self, tensor: Tensor) -> None:
        """Refuse the step if it looks at the gradient of one of the dropped parameters."""
        if id(tensor) in self._dropped:
            name = self._names.get(id(tensor))
            whose = f"`{name}`" if name else "a parameter"
            what = f"the gradient of {whose} from the step before, whose memory it reuses"
            forbid(what, _KEEP_IT, user_location())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give other tensors the gradients that they had before, if the enclosed step fails."""
        try:
            yield
        except BaseException:
            for leaf, before in self._moved():
                leaf.grad = before
            raise

    def check(self) -> None:
        """Refuse the step if it has made the gradient of a tensor that the graph does not know.

        Call it when nothing holds the autograd graph of the step any more: what lives then is held by
        code that may read its gradient.
        """
        moved = [*self._moved()]
        for leaf, before in moved:
            leaf.grad = before
        whose, remedy = self._unknown
        for shape in (tuple(leaf.shape) for leaf, _ in moved):
            what = f"The training step makes the gradient of a tensor of shape {shape} {whose}."
            error = CaptureError(what, remedy)
            refuse(error, ("gradient", shape))

    def _moved(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The other tensors whose gradients the step has made or changed, with those before it."""
        for other, before, version in self._others.values():
            if (leaf := other()) is None or (now := leaf.grad) is None:
                continue
            if now is not before or _version(now) != version:
                yield leaf, before


def _caller() -> CodeType:
    """The code that has come to a function mode."""
    codes = (frame.f_code for frame in frames(sys._getframe(1)))
    return next(code for code in codes if not code.co_filename.startswith(PACKAGE_DIR))


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


class _Reads(OwnFunctionMode):
    """Mode that shows the tensors whose gradients are read to `LostGradients`."""

    def __init__(self, gradients: LostGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _READ and _caller().co_filename not in _DROP:
            self._gradients.refuse_read(args[0])
        return func(*args, **kwargs)


class _Watch(InputsMode):
    """Mode that shows the inputs of ops to `LostGradients`."""

    def __init__(self, gradients: LostGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        self._gradients.note(inputs, self.made)
