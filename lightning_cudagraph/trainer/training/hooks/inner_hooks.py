"""User hooks in the middle of a step that run on the host in every replay, at graph breaks.

These are the hooks around `zero_grad`, and those of callbacks. They hold host code (moving averages,
statistics, records), and callbacks have state of their own. So a step is captured in parts: a capture
leaves these hooks out, and a replay calls them between two parts, by Lightning's own functions, at the
point where an eager step calls them. The module's later hooks (`on_before_backward`, `backward`,
`on_after_backward`, `on_before_optimizer_step`, `configure_gradient_clipping`) are captured with
`training_step`.

If the optimizer steps eagerly after the replay, `on_after_backward`, `on_before_optimizer_step` and
`configure_gradient_clipping` run on the host before it. It does so if a callback has one of these hooks,
or if the module's cannot be captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.attributes import do_nothing
from lightning_cudagraph.compat.method_patches import in_place
from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.errors import CaptureError, HookError
from lightning_cudagraph.trainer.config.support import callbacks_of, described_hook, is_overridden
from lightning_cudagraph.trainer.training.closures import GraphClosure

# Called by a step under capture at a graph break, with the names of the hooks, True if they drop
# gradients, and the function that calls them, given the closure of the step.
AtGraphBreak = Callable[[str, bool, Callable[[GraphClosure], None]], None]

_OF_MODULES = frozenset({"on_before_zero_grad", "optimizer_zero_grad"})
_OF_CALLBACKS = frozenset(
    {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
)
# In C, for all names at once.
_hooks_of_module = operator.attrgetter(*_OF_MODULES)
_hooks_of_callback = operator.attrgetter(*_OF_CALLBACKS)

_OF_AUTOGRAD = frozenset(
    {
        torch.autograd.grad,
        torch.autograd.backward,
        Tensor.backward,
        Tensor.register_hook,
        Tensor.retain_grad,
        Tensor.grad_fn.__get__,  # type: ignore[union-attr]
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    }
)


class _AutogradOfLoss(OwnFunctionMode):
    """Function mode that detects use of the loss's autograd graph, which a replayed loss has not."""

    def __init__(self, loss: Tensor, found: Callable[[], None]) -> None:
        super().__init__()
        self._loss = loss
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_AUTOGRAD and any(leaf is self._loss for leaf in tree_iter((args, kwargs))):
            self._found()
        return func(*args, **kwargs)


class InnerHooks:
    """The user hooks inside the steps of one run.

    Attributes:
        leave_gradients: True if those around `zero_grad` leave gradients (`set_to_none=False`), to which
            the backward pass then adds.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, steps_eagerly: Callable[[], bool]
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._steps_eagerly = steps_eagerly  # the optimizer steps eagerly after the replay
        self._zeroed = 0  # steps in which user hooks ran around `zero_grad`
        self.leave_gradients = False
        self._differentiates = ""

    def named(self) -> list[str]:
        """The names of all of them. A capture leaves them out, and another list invalidates it."""
        module = [
            described_hook(self._module, name)
            for name in sorted(_OF_MODULES)
            if is_overridden(name, self._module, pl.LightningModule)
        ]
        return module + [text for name in sorted(_OF_CALLBACKS) for text in self._of_callbacks(name)]

    def quick(self) -> tuple[Any, ...]:
        """All of these hooks as they are found, to compare before every replay.

        Bound methods are equal if they have the same function and object.
        """
        return _hooks_of_module(self._module), *map(_hooks_of_callback, callbacks_of(self._trainer))

    def around_zero_grad(self) -> str:
        """The names of the hooks around `zero_grad`; empty if there are none."""
        found = self._of_callbacks("on_before_zero_grad") + [
            described_hook(self._module, name)
            for name in ("on_before_zero_grad", "optimizer_zero_grad")
            if is_overridden(name, self._module, pl.LightningModule)
        ]
        return ", ".join(found)

    @property
    def after_backward(self) -> bool:
        """True if `on_after_backward` runs on the host after the replay."""
        return bool(self._overriding("on_after_backward")) or (
            self._steps_eagerly()
            and is_overridden("on_after_backward", self._module, pl.LightningModule)
        )

    def watch(self, closure: GraphClosure, optimizer: Optimizer) -> None:
        """Learn in a step if the hooks around `zero_grad` leave gradients."""
        plain = closure._zero_grad_fn
        if plain is None or not self.around_zero_grad():
            return

        def zero_grad() -> None:
            plain()
            self._zeroed += 1
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.leave_gradients = True

        closure._zero_grad_fn = zero_grad

    def is_settled(self) -> bool:
        """True once it is known if they leave gradients: the first step has none to leave."""
        return self._zeroed > 1 or not self.around_zero_grad()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Detect, in a warm-up step, an `on_before_backward` that uses the loss's autograd graph."""
        with ExitStack() as stack:
            for callback in self._overriding("on_before_backward"):
                stack.enter_context(in_place(callback, "on_before_backward", self._watched(callback)))
            yield

    def _watched(self, callback: Callback) -> Callable[..., None]:
        original = callback.on_before_backward
        whose = described_hook(callback, "on_before_backward")

        def found() -> None:
            self._differentiates = whose

        def watched(trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
            with _AutogradOfLoss(loss, found):
                original(trainer, module, loss)

        return watched

    @contextmanager
    def left_out(
        self,
        closure: GraphClosure,
        optimizer: Optimizer,
        at_break: AtGraphBreak,
        end_backward: Callable[[], None],
    ) -> Iterator[None]:
        """Leave the hooks out of a step, and call `at_break` at each graph break instead.

        Args:
            optimizer: the owner of the gradients that the step drops.
            end_backward: called before `on_after_backward`, if that is captured.
        """
        whose = self.around_zero_grad()
        if whose and closure._zero_grad_fn is not None:
            if self.leave_gradients and not self._steps_eagerly():
                _refuse_gradients_of_frozen(whose, optimizer)

            def zero_grad() -> None:
                at_break(whose, not self.leave_gradients, _drop_gradients)
                if not self.leave_gradients:
                    optimizer.zero_grad()

            closure._zero_grad_fn = zero_grad
        with ExitStack() as stack:
            stand_in = self._before_backward(at_break)
            for callback in self._overriding("on_before_backward"):
                stack.enter_context(in_place(callback, "on_before_backward", stand_in))
                stand_in = do_nothing  # all of them run at the graph break of the first one
            if self.after_backward:
                for owner in (*self._overriding("on_after_backward"), self._module):
                    stack.enter_context(in_place(owner, "on_after_backward", do_nothing))
            elif is_overridden("on_after_backward", self._module, pl.LightningModule):
                original = self._module.on_after_backward

                def after_backward() -> None:
                    end_backward()
                    original()

                stack.enter_context(in_place(self._module, "on_after_backward", after_backward))
            yield

    def run_after_backward(self) -> None:
        """Call all `on_after_backward` hooks after a replay."""
        call._call_callback_hooks(self._trainer, "on_after_backward")
        call._call_lightning_module_hook(self._trainer, "on_after_backward")

    def _before_backward(self, at_break: AtGraphBreak) -> Callable[..., None]:
        whose = ", ".join(self._of_callbacks("on_before_backward"))
        remedy = (
            "Do it in the module's own `on_before_backward`, or in `training_step`: these are captured."
        )
        if self._differentiates:
            raise CaptureError(
                f"{self._differentiates} asks for the autograd of the loss in the middle of the step; in"
                " a replay, no code outside of the graph can go back from it.",
                remedy,
            )

        def found() -> None:
            raise HookError(
                f"{whose} asks for the autograd of the loss in the middle of a step that is replayed; no"
                " code outside of the graph can go back from it.",
                remedy,
            )

        def stand_in(trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
            static = loss.detach()

            def run(closure: GraphClosure) -> None:
                # A copy, because callbacks keep it, and the next replay overwrites the static one.
                given = static.clone()
                with _AutogradOfLoss(given, found):
                    call._call_callback_hooks(self._trainer, "on_before_backward", given)
                if given._version > 0:
                    raise HookError(
                        f"{whose} writes into the loss in the middle of a step that is replayed; the"
                        " backward pass in the graph would not see it.",
                        "Scale the loss in `training_step`.",
                    )

            at_break(whose, False, run)

        return stand_in

    def _overriding(self, name: str) -> list[Callback]:
        return [c for c in callbacks_of(self._trainer) if is_overridden(name, c, Callback)]

    def _of_callbacks(self, name: str) -> list[str]:
        return [described_hook(callback, name) for callback in self._overriding(name)]


def _drop_gradients(closure: GraphClosure) -> None:
    assert closure._zero_grad_fn is not None
    closure._zero_grad_fn()


def _refuse_gradients_of_frozen(whose: str, optimizer: Optimizer) -> None:
    """Refuse gradients of frozen parameters: only hooks know in which steps they are still there."""
    for group_idx, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None and not parameter.requires_grad:
                raise CaptureError(
                    f"{whose} leaves gradients, also that of parameter {index} in param group"
                    f" {group_idx}, which is frozen: the optimizer steps it until the gradient is"
                    " dropped.",
                    "Set `parameter.grad = None` where you freeze it.",
                    in_optimizer=True,
                )
