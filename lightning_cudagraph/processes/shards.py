"""Sharded weights (`fully_shard`) in a captured step: refusals, and the hooks' state on the host.

Its hooks work with ops, on streams that wait for each other, so that a capture holds them. A replay does
not see the state that they keep on the host between steps. So a step runs eagerly if

- it finds gathered weights, from an evaluation, which leaves those of the outermost module gathered, or
  from user code. An eager step uses them unchanged, with all writes since.
- settings let it leave weights gathered, or gradients that wait to be reduced.
- user code gathers its weights or reduces its gradients.

Batches of an evaluation find what the first one has gathered, and use it unchanged, in memory that the
next training step lets go of. A graph of such a batch reads a copy, which each replay fills.

Settings, such as the divisor of gradients, are compared before each replay; a step that changes one is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.features import SHARDS
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.tensors.writes import storage_id

_PLAIN = (bool, int, float, str)
# Attributes with custom code that gathers weights or reduces gradients; and the classes of torch's own.
_WAYS = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
_TORCHS = ("DefaultAllGather", "DefaultReduceScatter", "NoneType")
_STAYS_GATHERED = "weights are gathered in the first batch of an evaluation, and stay so"
# If one of these is off, gradients are not reduced, or not waited for.
_REDUCING = ("reduce_grads", "all_reduce_grads", "is_last_backward")


def sharded_modules(model: nn.Module | None) -> list[Any]:
    """The modules in a model that `fully_shard` has been called on."""
    # The package is slow to import; without it there is no such module.
    package: Any = sys.modules.get("torch.distributed.fsdp")
    if model is None or package is None:
        return []
    return [module for module in model.modules() if isinstance(module, package.FSDPModule)]


def _groups(module: Any) -> list[Any]:
    """The parameter groups of a sharded module: weights that it gathers together."""
    state = module._get_fsdp_state()
    # Since torch 2.13 there can be several.
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def _states(module: Any) -> list[Any]:
    """The state objects of a sharded module and of its parameter groups."""
    state = module._get_fsdp_state()
    return [state, state._state_ctx, *_groups(module)]


def _is_reducing(group: Any) -> bool:
    """True if gradients of a group wait to be reduced, or were not waited for."""
    if group._post_reduce_event is not None or group._partial_reduce_output is not None:
        return True
    weights = [(weight, getattr(weight, "_unsharded_param", None)) for weight in group.fsdp_params]
    return any(
        weight.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
        for weight, whole in weights
    )


def _is_moved(weight: Any, is_sharded: bool) -> bool:
    """True if later gathers of a weight go into other memory than its parameter has."""
    whole = getattr(weight, "_unsharded_param", None)
    if whole is None:
        return False
    if is_sharded:
        return bool(whole.data_ptr())  # it has none of its own then
    return storage_id(whole) not in map(storage_id, weight.all_gather_outputs)


def check_shards(model: nn.Module) -> None:
    """Refuse host memory for weights, and custom Python that gathers weights or reduces gradients."""
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
    """The sharded modules of a run, possibly none."""

    def __init__(self, model: nn.Module | None) -> None:
        self._modules = sharded_modules(model)
        self._find()
        # The last step has left gradients not reduced, or not waited for. The state of the hooks shows
        # that too, but not on a CPU, where nothing is asynchronous.
        self._is_unreduced = False
        # Weights that the last eager batch of an evaluation left gathered, and copies that graphs read.
        self._left_gathered: list[Any] | None = None
        self._places: tuple[tuple[int, ...], list[Tensor]] | None = None

    def __bool__(self) -> bool:
        return bool(self._modules)

    def _find(self) -> None:
        """Find the state objects of the hooks. The first forward pass gives modules some in common."""
        states = [state for module in self._modules for state in _states(module)]
        self._states = [*{id(state): state for state in states}.values()]
        self._groups = [group for module in self._modules for group in _groups(module)]

    def settings(self) -> tuple[Any, ...]:
        """All plain values in the state of the hooks, in a form that is fast to compare."""
        return tuple(
            value for state in self._states for value in vars(state).values() if type(value) in _PLAIN
        )

    def described(self) -> dict[str, Any]:
        return {
            f"`{name}` of `fully_shard` ({index})": value
            for index, state in enumerate(self._states)
            for name, value in vars(state).items()
            if type(value) in _PLAIN
        }

    def ran(self) -> None:
        """Note that an eager step has run."""
        self._find()
        self._is_unreduced = self._is_off(*_REDUCING)

    def eager_reason(self) -> str:
        """The reason why the next step reads or changes state on the host; empty if it does not."""
        if not self._modules:
            return ""
        if reason := self._reason_of_users():
            return reason
        if self._is_under_way() or self._gathered():
            return (
                "weights are gathered before it (by an evaluation, a call of the module between two"
                " steps, or `unshard()`)"
            )
        return self.reason_in_backward()

    def reason_in_backward(self) -> str:
        """The reason why a backward pass leaves something on the host; empty if it does not."""
        if self._is_off("reshard_after_backward"):
            return "weights stay gathered behind the backward pass (`set_reshard_after_backward(False)`)"
        is_off = self._is_unreduced or self._is_off(*_REDUCING)
        if is_off or any(map(_is_reducing, self._groups)):
            return "gradients wait to be reduced (`set_requires_gradient_sync(False)` or the like)"
        return ""

    def reason_in_evaluation(self) -> str:
        """The reason why the next batch must gather weights for all later ones; empty if it need not."""
        if not self._modules:
            return ""
        if reason := self._reason_of_users():
            return reason
        if self._is_under_way():
            return "weights for it are being gathered already (`set_modules_to_forward_prefetch`)"
        return "" if self._gathered() == self._left_gathered else _STAYS_GATHERED

    def note_gathered(self) -> None:
        """Note the weights that an eager batch of an evaluation leaves gathered."""
        self._find()
        self._left_gathered = self._gathered()

    def _is_under_way(self) -> bool:
        return any(group._all_gather_result is not None for group in self._groups)

    def _gathered(self) -> list[Any]:
        """The weights that are gathered now."""
        return [w for group in self._groups if not group.is_sharded for w in group.fsdp_params]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Keep weights that are gathered where graphs use them, and copy them back afterwards."""
        weights = [weight._unsharded_param for weight in self._gathered()]
        gathered = [weight.detach() for weight in weights]
        key = tuple(map(id, weights))
        if self._places is None or self._places[0] != key:
            self._places = key, [torch.empty_like(value) for value in gathered]
        _, places = self._places
        if places:
            torch._foreach_copy_(places, gathered)
        try:
            for weight, place in zip(weights, places, strict=True):
                weight.data = place
            yield
            # An eager batch may have let go of some.
            kept = [bool(value.untyped_storage().nbytes()) for value in gathered]
            if any(kept):
                torch._foreach_copy_([*compress(gathered, kept)], [*compress(places, kept)])
        finally:
            for weight, value in zip(weights, gathered, strict=True):
                weight.data = value

    def _reason_of_users(self) -> str:
        """The reason why user code leaves no step to a graph; empty if it does not."""
        for group in self._groups:
            if any(kind not in _TORCHS for kind in _ways(group).values()):
                return "weights are gathered, or gradients reduced, by code of the user's"
            if any(_is_moved(weight, group.is_sharded) for weight in group.fsdp_params):
                return "a weight was given other memory (`.data = ...`) while it was gathered"
        return ""

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the changes of a step on the host, after an error too; refuse changes of settings."""
        self._find()
        parts = [_Remembered(part) for part in self._parts()]
        sharded = [group for group in self._groups if group.is_sharded]
        before = self.described()
        try:
            yield
            self._check_settings(before)
        except BaseException:
            for remembered in parts:
                remembered.end_training()  # otherwise some would stay gathered
            for group in sharded:
                group.reshard()
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

    def _parts(self) -> list[Any]:
        """All state objects of the hooks, without duplicates."""
        found: dict[int, Any] = {}
        for state in self._states:
            around = [getattr(state, name, None) for name in ("_comm_ctx", "comm_ctx")]
            for part in (state, *around, *getattr(state, "fsdp_params", ())):
                if part is not None:
                    found[id(part)] = part
        return [*found.values()]

    def _is_off(self, *switches: str) -> bool:
        return any(getattr(state, name, True) is False for state in self._states for name in switches)


class _Remembered:
    """A snapshot of a state object: its attributes, and the contents of its containers."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._values = dict(vars(part))
        self._contents = [
            (value, value.copy()) for value in self._values.values() if type(value) in (dict, list, set)
        ]
        weight = self._values.get("_unsharded_param")
        self._gradient = (weight, None if weight is None else weight.grad)

    def end_training(self) -> None:
        """Restore its training state: outside of a step."""
        if "_training_state" in self._values:
            self._part._training_state = self._values["_training_state"]

    def put_back(self) -> None:
        vars(self._part).clear()
        vars(self._part).update(self._values)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        weight, gradient = self._gradient
        if weight is not None:
            weight.grad = gradient
