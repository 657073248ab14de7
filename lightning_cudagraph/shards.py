"""Weights that are split between processes, and gathered when a step needs them (`fully_shard`).

Its hooks do all of that with ops, on streams that wait for one another, so that a capture holds it. What
they remember on the host, a replay does not see:

- Weights that are still gathered. After an evaluation those of the outermost module are, and the next
  step would use them as they are; one that is replayed gathers for itself, and would leave those that
  are gathered behind, as they were before it, for the next evaluation.
- Gradients that a step has not reduced, because the user said so; the next one adds to them.
- Settings, such as what gradients are divided by, which may change at any time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from lightning_cudagraph.errors import CUDAGraphError, UnsupportedError

__all__ = ["Shards", "check_shards", "sharded_modules"]

_PLAIN = (bool, int, float, str)
# How weights are gathered and gradients reduced: torch's own way, or somebody else's.
_WAYS = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
_TORCHS = ("DefaultAllGather", "DefaultReduceScatter", "NoneType")


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules in a model that `fully_shard` has been called on."""
    # Its package takes long to import; who has not imported it has no such module.
    package: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if package is None else [m for m in model.modules() if isinstance(m, package.FSDPModule)]


def _states(module: Any) -> list[Any]:
    """What the hooks of such a module keep: of itself, and of the weights that it gathers together."""
    try:
        state = module._get_fsdp_state()
        # There can be more than one since torch 2.13.
        groups = getattr(state, "_fsdp_param_groups", None)
        found = [state._fsdp_param_group] if groups is None else [*groups]
        return [state, state._state_ctx, *(group for group in found if group is not None)]
    except AttributeError as error:
        raise CUDAGraphError(
            f"`{error.name}` of `fully_shard` is gone from torch {torch.__version__}, and captures of"
            " sharded weights are built on it. Use a version of torch that this package names as"
            ' supported, or pass `CUDAGraphCallback(backend="off")`.'
        ) from error


def check_shards(model: nn.Module) -> None:
    """Refuse what runs Python, or works on the host, when weights are gathered or gradients reduced.

    Raises:
        UnsupportedError: naming it.
    """
    for module in sharded_modules(model):
        for state in _states(module)[2:]:
            policy = getattr(state, "offload_policy", None)
            if type(policy).__name__ == "CPUOffloadPolicy":
                raise UnsupportedError(
                    "`fully_shard(offload_policy=CPUOffloadPolicy())` keeps weights in host memory, and"
                    " the optimizer steps there.",
                    "Leave it out.",
                )
            own = [name for name, kind in _ways(state).items() if kind not in _TORCHS]
            if own:
                raise UnsupportedError(
                    f"`{type(module).__qualname__}` gathers weights, or reduces gradients, by code of"
                    f" its own ({own[0].strip('_')}), which may keep something from step to step.",
                    "Leave out `set_custom_all_gather`, `set_custom_reduce_scatter` and"
                    " `set_all_reduce_hook`.",
                )


def _ways(state: Any) -> dict[str, str]:
    return {name: type(vars(state)[name]).__name__ for name in _WAYS if name in vars(state)}


class Shards:
    """The sharded modules of a run; there may be none.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = sharded_modules(model)
        self._states = [state for module in self._modules for state in _states(module)]
        # What the step before has left on the host, because the user said so.
        self._is_unreduced = False
        self._is_gathered = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def scatter(self) -> None:
        """Before a step: let go of weights that are still gathered, as an evaluation leaves them."""
        if not self.unlike_others():
            for module in self._modules:
                module.reshard()

    def settings(self) -> tuple[Any, ...]:
        """All numbers, switches and words that the hooks go by, in a form that is quick to compare."""
        return tuple(
            value if (kind := type(value)) in _PLAIN else kind
            for state in self._states
            for name, value in vars(state).items()
            if type(value) in _PLAIN or name in _WAYS
        )

    def described(self) -> dict[str, Any]:
        """The same by name."""
        return {
            f"`{name}` of `fully_shard` ({index})": value
            for index, state in enumerate(self._states)
            for name, value in (vars(state) | _ways(state)).items()
            if type(value) in _PLAIN
        }

    def ran(self) -> None:
        """An eager step went through."""
        self._is_unreduced = self._is_off("reduce_grads", "all_reduce_grads")
        self._is_gathered = self._is_off("reshard_after_backward")

    def unlike_others(self) -> str:
        """Why the step that is about to run keeps something on the host, or nothing."""
        if self._is_gathered or self._is_off("reshard_after_backward"):
            return "weights stay gathered behind the backward pass (`set_reshard_after_backward(False)`)"
        if self._is_unreduced or self._is_off("reduce_grads", "all_reduce_grads"):
            return "gradients wait to be reduced (`set_requires_gradient_sync(False)`)"
        return ""

    def _is_off(self, *switches: str) -> bool:
        return any(getattr(state, name, True) is False for state in self._states for name in switches)
