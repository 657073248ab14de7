"""Weights that are split between processes, and gathered when a step needs them (`fully_shard`).

Its hooks do all of that with ops, on streams that wait for one another, so that a capture holds it. What
they remember on the host from one step to the next, a replay does not see. So a step is left to run
eagerly that

- finds weights gathered, or about to be: by an evaluation, which leaves those of the outermost module
  so, or by the user. An eager step uses them as they are, whatever was written into them since.
- leaves something behind: weights that stay gathered, gradients that wait to be reduced.
- gathers weights or reduces gradients by code of the user's.

Its settings, such as what gradients are divided by, are compared before each replay; a step
that changes one is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_cudagraph.compat.features import SHARDS
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import CaptureError, UnsupportedError

__all__ = ["Shards", "check_shards", "sharded_modules"]

_PLAIN = (bool, int, float, str)
# How weights are gathered and gradients reduced: torch's own way, or another.
_WAYS = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
_TORCHS = ("DefaultAllGather", "DefaultReduceScatter", "NoneType")
# Unless all of these are on, gradients are not reduced, or nothing waits until they are.
_REDUCING = ("reduce_grads", "all_reduce_grads", "is_last_backward")


def sharded_modules(model: nn.Module | None) -> list[Any]:
    """The modules in a model that `fully_shard` has been called on."""
    # Its package takes long to import; who has not imported it has no such module.
    package: Any = sys.modules.get("torch.distributed.fsdp")
    if model is None or package is None:
        return []
    return [module for module in model.modules() if isinstance(module, package.FSDPModule)]


def _groups(module: Any) -> list[Any]:
    """The state that hooks keep of each set of weights that such a module gathers together."""
    state = module._get_fsdp_state()
    # There can be more than one since torch 2.13.
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def _states(module: Any) -> list[Any]:
    """The state that the hooks of such a module keep: of itself, and of its weights."""
    state = module._get_fsdp_state()
    return [state, state._state_ctx, *_groups(module)]


def _is_reducing(group: Any) -> bool:
    """Tell if gradients of these weights wait to be reduced, or were not waited for."""
    if group._post_reduce_event is not None or group._partial_reduce_output is not None:
        return True
    weights = [(weight, getattr(weight, "_unsharded_param", None)) for weight in group.fsdp_params]
    return any(
        weight.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
        for weight, whole in weights
    )


def check_shards(model: nn.Module) -> None:
    """Refuse what runs Python, or works on the host, when weights are gathered or gradients reduced.

    Raises:
        UnsupportedError: naming it.
        CUDAGraphError: if torch has lost private names that captures of sharded weights are built on.
    """
    if modules := sharded_modules(model):
        require(SHARDS)
    for module in modules:
        for group in _groups(module):
            policy = getattr(group, "offload_policy", None)
            if type(policy).__name__ == "CPUOffloadPolicy":
                raise UnsupportedError(
                    "`fully_shard(offload_policy=CPUOffloadPolicy())` keeps weights in host memory, and"
                    " the optimizer steps there.",
                    "Leave it out.",
                )
            own = [name for name, kind in _ways(group).items() if kind not in _TORCHS]
            if own:
                raise UnsupportedError(
                    f"`{type(module).__qualname__}` gathers weights, or reduces gradients, by code of"
                    f" its own ({own[0].strip('_')}), which may keep something from step to step.",
                    "Leave out `set_custom_all_gather`, `set_custom_reduce_scatter` and"
                    " `set_all_reduce_hook`.",
                )


def _ways(group: Any) -> dict[str, str]:
    return {name: type(vars(group)[name]).__name__ for name in _WAYS if name in vars(group)}


class Shards:
    """The sharded modules of a run; there may be none.

    Args:
        model: the model that is trained, or None.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._modules = sharded_modules(model)
        # The step before has left gradients that are not reduced, or not waited for. What
        # their hooks keep shows that too, but not on a CPU, where nothing is under way.
        self._is_unreduced = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def settings(self) -> tuple[Any, ...]:
        """All numbers, switches and words that the hooks go by, in a form that is quick to compare."""
        return tuple(
            value for state in self._states() for value in vars(state).values() if type(value) in _PLAIN
        )

    def described(self) -> dict[str, Any]:
        """The same by name."""
        return {
            f"`{name}` of `fully_shard` ({index})": value
            for index, state in enumerate(self._states())
            for name, value in vars(state).items()
            if type(value) in _PLAIN
        }

    def ran(self) -> None:
        """An eager step went through."""
        self._is_unreduced = self._is_off(*_REDUCING)

    def unlike_others(self) -> str:
        """Return why the next step depends on the host, or leaves something there; or nothing."""
        if not self._modules:
            return ""
        groups = [group for module in self._modules for group in _groups(module)]
        if not all(group.is_sharded and group._all_gather_result is None for group in groups):
            return (
                "weights are gathered before it (by an evaluation, a call of the module between two"
                " steps, or `unshard()`)"
            )
        if self._is_off("reshard_after_backward"):
            return "weights stay gathered behind the backward pass (`set_reshard_after_backward(False)`)"
        is_off = self._is_unreduced or self._is_off(*_REDUCING)
        if is_off or any(map(_is_reducing, groups)):
            return "gradients wait to be reduced (`set_requires_gradient_sync(False)` or the like)"
        if any(kind not in _TORCHS for group in groups for kind in _ways(group).values()):
            return "weights are gathered, or gradients reduced, by code of the user's"
        return ""

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a step does on the host, also where it ends in the middle, by an error.

        Raises:
            CaptureError: if it changes what the hooks go by, which no replay would do.
        """
        parts = [_Remembered(part) for part in self._parts()]
        before = self.described()
        try:
            yield
            self._check_settings(before)
        except BaseException:
            for remembered in parts:
                remembered.end_training()  # else some would stay gathered
            for module in self._modules:
                module.reshard()
            raise
        finally:
            for remembered in parts:
                remembered.put_back()

    def _check_settings(self, before: dict[str, Any]) -> None:
        now = self.described()
        for name in {**before, **now}:
            was, is_now = before.get(name), now.get(name)
            if was != is_now:
                raise CaptureError(
                    f"The step changes {name} from {was!r} to {is_now!r}; expected no change, because a"
                    " replay would make none.",
                    "Change it between two steps, in `on_train_batch_start`.",
                )

    def _states(self) -> Iterator[Any]:
        for module in self._modules:
            yield from _states(module)

    def _parts(self) -> list[Any]:
        """All that the hooks keep, each once."""
        found: dict[int, Any] = {}
        for state in self._states():
            around = [getattr(state, name, None) for name in ("_comm_ctx", "comm_ctx")]
            for part in (state, *around, *getattr(state, "fsdp_params", ())):
                if part is not None:
                    found[id(part)] = part
        return [*found.values()]

    def _is_off(self, *switches: str) -> bool:
        return any(getattr(state, name, True) is False for state in self._states() for name in switches)


class _Remembered:
    """An object of the hooks', with all that it refers to, and what is in its own containers."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._values = dict(vars(part))
        self._contents = [
            (value, value.copy()) for value in self._values.values() if type(value) in (dict, list, set)
        ]
        weight = self._values.get("_unsharded_param")
        self._gradient = (weight, None if weight is None else weight.grad)

    def end_training(self) -> None:
        """Put back in what part of a step it is: in none."""
        if "_training_state" in self._values:
            self._part._training_state = self._values["_training_state"]

    def put_back(self) -> None:
        """Put back everything."""
        vars(self._part).clear()
        vars(self._part).update(self._values)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        weight, gradient = self._gradient
        if weight is not None:
            weight.grad = gradient
