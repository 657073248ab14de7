"""What a graph has baked in besides the batch, and whether it still holds.

Addresses of parameters, buffers and optimizer state, `requires_grad`, module modes, hyperparameters, the
Python values that the step mentions and a few global switches are frozen by a capture. Before every
replay are compared: hyperparameters, Python values, and of the parameters, buffers and modules that were
there at the capture the addresses, `requires_grad` and modes. The rest (the optimizer's state, other
objects under the same names, global switches) is compared at the start of an epoch, after validation,
and after a checkpoint; a loaded optimizer state says so itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_cudagraph.capture.reads import MentionedNames, PythonValues

__all__ = ["Guards"]

_State = dict[str, Any]


def _global_switches() -> _State:
    return {
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cuda.matmul.fp32_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.is_autocast_enabled()": torch.is_autocast_enabled(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
    }


class _Objects:
    """The objects of a model as they were, in a form that is quick to compare."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._modules = list(model.modules())
        # By name and not by object: code outside the step may rebind a buffer.
        self._buffers = [(module._buffers, name) for module in self._modules for name in module._buffers]
        self._was = self._now()

    def _now(self) -> tuple[list[int], list[bool], list[bool]]:
        return (
            [parameter.data_ptr() for parameter in self._parameters]
            + [0 if (b := held.get(name)) is None else b.data_ptr() for held, name in self._buffers],
            [parameter.requires_grad for parameter in self._parameters],
            [module.training for module in self._modules],
        )

    def changed(self) -> bool:
        return self._now() != self._was


class Guards:
    """Compares what a graph has baked in with what is there now.

    Args:
        model: the model that is trained.
        cheap: values by name that are compared before every replay (hyperparameters, settings).
        thorough: more of them, compared only when something can have changed.
        frameworks_own: attributes that torch and Lightning keep for themselves in every module.
    """

    def __init__(
        self,
        model: nn.Module,
        cheap: Callable[[], _State],
        thorough: Callable[[], _State],
        frameworks_own: frozenset[str],
    ) -> None:
        self._frameworks_own = frameworks_own
        self._model = model
        self._cheap_now = cheap
        self._thorough_now = thorough
        self._cheap: _State | None = None
        self._thorough: _State = {}
        self._suspect = False
        self._objects: _Objects | None = None
        self._values: PythonValues | None = None
        # What the step last captured mentions; set before `take`.
        self.mentioned = MentionedNames()
        self._watched: _State | None = None
        self._moves: list[str | None] = []

    def watch(self) -> None:
        """Note what moves from one warm-up step to the next."""
        now = self._cheap_now()
        if self._watched is not None:
            self._moves.append(_first_difference(self._watched, now))
        self._watched = now

    def moving(self) -> str | None:
        """What has moved in every step since `watch` was first called, in words, or None."""
        return self._moves[-1] if self._moves and all(self._moves) else None

    def take(self) -> None:
        """Remember what is there now, at a capture."""
        self._cheap = self._cheap_now()
        self._thorough = self._thorough_state()
        self._objects = _Objects(self._model)
        self._values = PythonValues(self._model, self.mentioned, self._frameworks_own)
        self._suspect = False

    def drop(self) -> None:
        """Forget it, with the graph."""
        self._cheap = None
        self._watched = None
        self._moves.clear()

    def suspect(self) -> None:
        """Look at everything before the next replay, because something can have changed."""
        self._suspect = True

    def changed(self) -> str | None:
        """The first thing that is not as at the capture, in words, or None."""
        if self._cheap is None:
            return None
        now = self._cheap_now()
        if now != self._cheap:
            return _first_difference(self._cheap, now)
        if self._objects is not None and self._objects.changed():
            # Rarely, and then in words.
            return _first_difference(self._thorough, self._thorough_state()) or "a module changed"
        if self._values is not None and (change := self._values.changed()):
            return change
        if self._suspect:
            self._suspect = False
            return _first_difference(self._thorough, self._thorough_state())
        return None

    def _thorough_state(self) -> _State:
        state: _State = {**_global_switches(), **self._thorough_now()}
        for name, parameter in self._model.named_parameters():
            state[f"the address of parameter `{name}`"] = parameter.data_ptr()
            state[f"`requires_grad` of parameter `{name}`"] = parameter.requires_grad
        for name, buffer in self._model.named_buffers():
            state[f"the address of buffer `{name}`"] = buffer.data_ptr()
        for name, module in self._model.named_modules():
            state[f"the module `{name}`"] = id(module)
            state[f"`training` of `{name or type(module).__qualname__}`"] = module.training
        return state


def _first_difference(before: _State, now: _State) -> str | None:
    for name in {**before, **now}:
        was, is_now = before.get(name), now.get(name)
        if was != is_now:
            return f"{name} changed from {was} to {is_now}"
    return None
