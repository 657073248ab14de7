"""Supported optimizers: the tables of classes, the forms in which they are captured, and refusals.

* Optimizers are captured in the user's configuration: the host arithmetic of their step is traced
  (`host_arithmetic/`), and computed again in each replay. Of torch's own, so are host counters.
* Unknown classes are inspected: they must keep nothing on the host that moves from step to step.
* Optimizers that read values back from the device step eagerly after the replay of forward and backward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.checks.walk.scope import Root, Scope
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.errors import UnsupportedError

ANOTHER_OPTIMIZER = "Use another optimizer to have its step in the graph too."


@dataclass(frozen=True)
class Form:
    """The form in which an optimizer class is captured.

    Attributes:
        alpha: its step passes the learning rate as ``alpha`` or ``value``.
        inspected: an unknown class; values that it keeps on the host are guarded.
        lists_on_device: on lists of tensors (foreach), its step only computes with the numbers that it
            reads from its state, which stays where the user has it.
    """

    reads_rate: bool = True
    alpha: bool = True
    inspected: bool = False
    lists_on_device: bool = False


_OWN = Form()
# Rprop reads the learning rate only to make its state, in the first warm-up step.
_FORMS: dict[type[Optimizer], Form] = {
    torch.optim.Rprop: Form(reads_rate=False, alpha=False),
    **dict.fromkeys(
        (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
        Form(alpha=False),
    ),
    # The others read their counters on the host, to compute powers.
    torch.optim.ASGD: Form(alpha=False, lists_on_device=True),
}
_INSPECTED = Form(inspected=True)

# Optimizers without a form, with the reason. Sources: torch/optim, file and function named.
_EAGER: dict[type[Optimizer], str] = {
    # lbfgs.py, `step`: `float(closure())` in a loop
    torch.optim.LBFGS: "calls its closure as often as the loss decides, which it reads on the host"
}


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _known(optimizer: Optimizer, classes: Mapping[type[Optimizer], Any]) -> Any:
    """The value in `classes` for an optimizer's class, or for one that it inherits its step from."""
    for cls, value in classes.items():
        if all(_code(type(optimizer), n) is _code(cls, n) for n in ("step", "_init_group")):
            return value
    return None


def _code(cls: type[Optimizer], name: str) -> Any:
    # `Optimizer.__init__` wraps the `step` of a class when its first object is made.
    return inspect.unwrap(getattr(cls, name, _code))


def _classes_of_torch(optimizer: Optimizer) -> list[type[Optimizer]]:
    return [
        cls
        for cls in type(optimizer).__mro__
        if f"{cls.__module__}.".startswith("torch.optim.") and cls is not Optimizer
    ]


def is_of_torch(optimizer: Optimizer) -> bool:
    """True if an optimizer's step is that of one of torch's own classes."""
    return bool(_known(optimizer, dict.fromkeys(_classes_of_torch(optimizer), True)))


def refuse_own_zero_grad(optimizer: Optimizer) -> None:
    """Refuse a `zero_grad` that is not torch's: it may read gradients, and leave some of them."""
    is_torchs = _code(type(optimizer), "zero_grad") is _code(Optimizer, "zero_grad")
    if not is_torchs or "zero_grad" in vars(optimizer):
        raise UnsupportedError(
            f"`{_name(optimizer)}` has a `zero_grad` of its own; a graph makes new gradients in each"
            " step.",
            "Leave it out.",
        )


def form_of(optimizer: Optimizer) -> Form:
    """The form in which an optimizer is captured; if there is none, it is refused."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "The optimizer is a `SparseAdam`, for gradients whose size depends on values.",
            "Use dense embeddings with `Adam`.",
        )
    refuse_own_zero_grad(optimizer)
    refuse_step_hooks(optimizer)
    reason: str | None = _known(optimizer, _EAGER)
    if reason is not None:
        raise UnsupportedError(
            f"`{_name(optimizer)}` {reason}.",
            ANOTHER_OPTIMIZER,
            in_optimizer=True,
        )
    form: Form | None = _known(optimizer, _FORMS)
    if form is not None:
        return form
    return _OWN if is_of_torch(optimizer) else _INSPECTED


def refuse_step_hooks(optimizer: Optimizer) -> None:
    """Refuse an optimizer with hooks around its step."""
    if step_hooks(optimizer):
        raise UnsupportedError(
            f"`{_name(optimizer)}` has hooks registered with `register_step_pre_hook`,"
            f" `register_step_post_hook` or their global forms, first {_first_hook(optimizer)}: host"
            " code that a replay would not run.",
            "Do the same in `on_train_batch_start` or `on_train_batch_end`.",
            in_optimizer=True,
        )


def step_hooks(optimizer: Optimizer) -> int:
    """The number of hooks around the step of an optimizer."""
    return sum(map(len, _hook_tables(optimizer)))


def _hook_tables(optimizer: Optimizer) -> tuple[Any, ...]:
    everywhere = sys.modules[Optimizer.__module__]
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        getattr(everywhere, "_global_optimizer_pre_hooks", {}),
        getattr(everywhere, "_global_optimizer_post_hooks", {}),
    )


def _first_hook(optimizer: Optimizer) -> str:
    """The first hook in words, with its line if it is written in Python."""
    hook = next(hook for table in _hook_tables(optimizer) for hook in table.values())
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return f"`{name}`" + (f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else "")


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that another one keeps, and may step in its own step."""
    return [member for member in attributes_and_items(optimizer) if isinstance(member, Optimizer)]


def attributes_and_items(owner: Any) -> list[Any]:
    """The attributes of an object, and the items of those that are lists or tuples."""
    return [
        member
        for value in vars(owner).values()
        for member in (value if isinstance(value, (list, tuple)) else [value])
    ]


def refuse_other_groups(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps one with other param groups, of which no value is compared."""
    known = set(map(id, optimizer.param_groups))
    for inner in inner_optimizers(optimizer):
        if not known.issuperset(map(id, inner.param_groups)):
            raise UnsupportedError(
                f"`{_name(optimizer)}` keeps a `{_name(inner)}` with param groups of its own, which a"
                " capture would freeze.",
                "Let both have the same: `self.param_groups = inner.param_groups`.",
                in_optimizer=True,
            )


def host_state_of(optimizer: Optimizer, device: torch.device) -> str | None:
    """The first state tensor of an optimizer that is not on the device, in words; or None."""
    for group_idx, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.device.type != device.type:
                    return (
                        f"the state `{name}` of parameter {index} in param group {group_idx} of"
                        f" `{_name(optimizer)}` is kept on the host"
                    )
    return None


class HostSide:
    """A record of an optimizer's host objects and of the keys of its state, to restore them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._keys = set(optimizer.state)  # tensors among them, by identity
        # The backend handles torch's generators.
        scope = Scope((torch.Generator,), in_capture=True)
        of, methods = f"`{_name(optimizer)}`", frozenset({"step"})  # may be patched
        self._held = Walk([Root(optimizer, "", of, methods, is_entered=True)], scope)

    def changed(self) -> str | None:
        """The first change since the record, in words; None if there is none."""
        change = next(iter(self._held.changes()), None)
        return None if change is None else f"`{change.name}` of {change.of}"

    def restore(self) -> None:
        for key in [key for key in self._optimizer.state if key not in self._keys]:
            del self._optimizer.state[key]
        self._held.put_back()

    def release(self) -> None:
        """Put the iterators back that were replaced for the time of the record."""
        self._held.release()


def roots_of_read(optimizer: Optimizer, is_inspected: bool) -> Iterator[Root]:
    """Roots for what a step can read of an optimizer: attributes, groups, and state that is no tensor.

    Of torch's own classes, whose step reads options and state alone, that is what user code mentions.
    """
    of, by_name = f"the optimizer `{type(optimizer).__qualname__}`", not is_inspected
    yield Root(optimizer, "", of, frozenset({"state", "param_groups"}), True, by_name=by_name)
    left_out = frozenset({"params", "lr"} if is_inspected else {"params", *optimizer.defaults})
    for index, group in enumerate(optimizer.param_groups):
        yield Root(group, f"param_groups[{index}]", of, left_out, True, by_name=by_name)
    state: dict[Any, Any] = optimizer.state
    for index, entries in enumerate(state.values()):
        held = entries if isinstance(entries, dict) else {"": entries}
        tensors = frozenset(name for name, value in held.items() if isinstance(value, Tensor))
        if len(tensors) < len(held):
            yield Root(entries, f"state[{index}]", of, tensors, True, by_name=by_name)
