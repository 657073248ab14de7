"""Hooks that Lightning calls in the middle of a step, and that run on the host in every replay.

Those around the dropping of gradients, and those of callbacks. Host code lives in them (moving averages,
statistics, records), and callbacks keep state of their own. So a step is captured in parts around them:
in a capture they are left out, and in a replay they run between two parts, where they run in an eager
step, by Lightning's own functions. The module's hooks after that (`on_before_backward`, `backward`,
`on_after_backward`, `on_before_optimizer_step`, `configure_gradient_clipping`) are captured with its
`training_step`.

Where the optimizer steps behind the graph, `on_after_backward` runs on the host before it, and so do
`on_before_optimizer_step` and `configure_gradient_clipping`. If a callback has one of these, or if what
the module does in them cannot be captured, the optimizer does step there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.method_patches import in_place
from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from lightning_cudagraph.errors import CaptureError, HookError
from lightning_cudagraph.trainer.config.support import callbacks_of, described_hook, is_overridden
from lightning_cudagraph.trainer.training.closures import GraphClosure

__all__ = ["InnerHooks", "TakeTurn"]

# Called by a step that is captured: whose turn it is, in words, whether gradients are dropped in it, and
# what runs then, given the closure of the step.
TakeTurn = Callable[[str, bool, Callable[[GraphClosure], None]], None]

_OF_MODULES = frozenset({"on_before_zero_grad", "optimizer_zero_grad"})
_OF_CALLBACKS = frozenset(
    {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
)


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
    """Notices who asks for the autograd of the loss, which a replay has only in its graph.

    Args:
        loss: what a hook is given.
        found: called when it asks.
    """

    def __init__(self, loss: Tensor, found: Callable[[], None]) -> None:
        super().__init__()
        self._loss = loss
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_AUTOGRAD and any(leaf is self._loss for leaf in tree_iter((args, kwargs))):
            self._found()
        return func(*args, **(kwargs or {}))


def _nothing(*args: Any) -> None:
    """In the place of a hook during a capture."""


class InnerHooks:
    """The hooks of one run.

    Attributes:
        leave_gradients: True if those around `zero_grad` leave gradients (`set_to_none=False`), to which
            the backward pass then adds.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, is_behind: Callable[[], bool]
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._is_behind = is_behind  # the optimizer steps behind the graph
        self._zeroed = 0  # steps in which user hooks ran around `zero_grad`
        self.leave_gradients = False
        self._differentiates = ""

    def named(self) -> list[str]:
        """All of them in words; a capture leaves them out, and is stale when there are others."""
        module = [
            described_hook(self._module, name)
            for name in sorted(_OF_MODULES)
            if is_overridden(name, self._module, pl.LightningModule)
        ]
        return module + [text for name in sorted(_OF_CALLBACKS) for text in self._of_callbacks(name)]

    def quick(self) -> tuple[Any, ...]:
        """What changes when there are others, at the price of every replay."""
        callbacks = callbacks_of(self._trainer)
        return (
            _OF_MODULES.isdisjoint(vars(self._module)),
            *map(id, callbacks),
            *map(_OF_CALLBACKS.isdisjoint, map(vars, callbacks)),
        )

    def around_zero_grad(self) -> str:
        """Those that are called when gradients are dropped, in words; empty if there are none."""
        found = self._of_callbacks("on_before_zero_grad") + [
            described_hook(self._module, name)
            for name in ("on_before_zero_grad", "optimizer_zero_grad")
            if is_overridden(name, self._module, pl.LightningModule)
        ]
        return ", ".join(found)

    @property
    def after_backward(self) -> bool:
        """Whether `on_after_backward` runs behind the replay."""
        return bool(self._overriding("on_after_backward")) or (
            self._is_behind() and is_overridden("on_after_backward", self._module, pl.LightningModule)
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
        """Around a warm-up step: note which `on_before_backward` asks for the autograd of the loss."""
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
        turn: TakeTurn,
        end_backward: Callable[[], None],
    ) -> Iterator[None]:
        """Leave them out of a step, and say where they would have run.

        Args:
            closure: the closure of the step, which is changed.
            optimizer: whose gradients it drops.
            turn: told where the host has a turn.
            end_backward: called before `on_after_backward`, if that is captured.
        """
        whose = self.around_zero_grad()
        if whose and closure._zero_grad_fn is not None:

            def zero_grad() -> None:
                turn(whose, not self.leave_gradients, _drop_gradients)
                if not self.leave_gradients:
                    optimizer.zero_grad()

            closure._zero_grad_fn = zero_grad
        with ExitStack() as stack:
            stand_in = self._before_backward(turn)
            for callback in self._overriding("on_before_backward"):
                stack.enter_context(in_place(callback, "on_before_backward", stand_in))
                stand_in = _nothing  # all of them take their turn where the first one is called
            if self.after_backward:
                for owner in (*self._overriding("on_after_backward"), self._module):
                    stack.enter_context(in_place(owner, "on_after_backward", _nothing))
            elif is_overridden("on_after_backward", self._module, pl.LightningModule):
                original = self._module.on_after_backward

                def after_backward() -> None:
                    end_backward()
                    original()

                stack.enter_context(in_place(self._module, "on_after_backward", after_backward))
            yield

    def run_after_backward(self) -> None:
        """Call all `on_after_backward`, behind a replay."""
        call._call_callback_hooks(self._trainer, "on_after_backward")
        call._call_lightning_module_hook(self._trainer, "on_after_backward")

    def _before_backward(self, turn: TakeTurn) -> Callable[..., None]:
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

            turn(whose, False, run)

        return stand_in

    def _overriding(self, name: str) -> list[Callback]:
        return [c for c in callbacks_of(self._trainer) if is_overridden(name, c, Callback)]

    def _of_callbacks(self, name: str) -> list[str]:
        return [described_hook(callback, name) for callback in self._overriding(name)]


def _drop_gradients(closure: GraphClosure) -> None:
    assert closure._zero_grad_fn is not None
    closure._zero_grad_fn()
