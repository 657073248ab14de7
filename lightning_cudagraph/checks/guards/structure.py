"""Guard on modules, parameters, buffers, hooks and optimizer state, in a form that is fast to compare.

Parameters, buffers, submodules and optimizer state are compared through the dictionaries that hold them:
another object under the same name invalidates the graph as much as another address. Everything is
compared before each replay, in loops that run in C and give a bool; `described` finds the words when
something has changed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_cudagraph.checks.guards.classes import Classes
from lightning_cudagraph.checks.guards.members import Members
from lightning_cudagraph.checks.walk.versions import Versions
from lightning_cudagraph.compat.attributes import TENSOR_HOOKS
from lightning_cudagraph.tensors.layouts import Layouts
from lightning_cudagraph.tensors.local import local

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# The dictionaries of a module that this guard holds.
TABLES = frozenset({"_parameters", "_buffers", "_modules", *_MODULE_HOOKS})


class Identity:
    """An object compared by identity. Holds it, so that its address is not reused."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other._held is self._held

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"a `{type(self._held).__qualname__}` at {id(self._held):#x}"


class _Tensors:
    """Guard on tensors, and on buffers by name, because code outside the step may rebind one."""

    def __init__(self, tensors: list[Tensor], modules: list[nn.Module]) -> None:
        tables = [module._buffers for module in modules if module._buffers]
        self.versions = Versions(tables)
        self._names = self._names_now()
        self._tensors = tensors
        self._now = self._present()
        self._layouts = Layouts(self._now)

    def _present(self) -> tuple[Any, ...]:
        buffers = chain.from_iterable(table.values() for table in self.versions.dicts)
        tensors = (*self._tensors, *(buffer for buffer in buffers if buffer is not None))
        return (*{id(tensor): tensor for tensor in tensors}.values(),)

    def _names_now(self) -> list[list[tuple[str, bool]]]:
        """The names of the buffers of each module, and which of them are None."""
        return [[(n, each is None) for n, each in table.items()] for table in self.versions.dicts]

    def changed(self) -> bool:
        """True if a buffer was added or removed; others that were rebound are compared from now on."""
        if rebound := self.versions.changed():
            if self._names_now() != self._names:
                return True
            self._now = self._present()
            self.versions.remember(rebound)
        return False

    def have_moved(self) -> bool:
        return self._layouts.changed(self._now)


class _Modes:
    """Guard on `training` of modules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        # An ordinary module has its mode in its dictionary, whose version is read anyway.
        plain = [vars(module) for module in modules if "training" in vars(module)]
        self.versions = Versions(plain, [("training",)] * len(plain))
        self._odd = [(module, module.training) for module in modules if "training" not in vars(module)]

    def are_others(self) -> bool:
        """True if a module that computes its mode has another one."""
        return bool(self._odd) and any(module.training != was for module, was in self._odd)


def hooks_of(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[Any]:
    """The hooks of modules, of parameters and of their autograd nodes, and those of all modules."""
    return [hook for table in _tables_of_hooks(modules, [*parameters]) for hook in table.values()]


def _tables_of_hooks(modules: Iterable[nn.Module], parameters: list[nn.Parameter]) -> list[Any]:
    """The tables that hold `hooks_of`, and hooks of all optimizers."""
    tables = [getattr(m, kind, None) for m in modules for kind in _MODULE_HOOKS]
    tables += _hooks_of_all().values()
    tables += [table for _, _, table in _hooks_of(parameters)]
    tables += [table for p in parameters if p.requires_grad for table in _tables_of_node(p)]
    return [table for table in tables if table]


def _hooks_of(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, str, Any]]:
    found = [(p, kind, getattr(p, kind, None)) for p in parameters for kind in TENSOR_HOOKS]
    return [each for each in found if each[2] is not None]


class Structure:
    """Guard on the structure of models and of the objects that work on them.

    Args:
        models: the model, and modules that are none of its submodules.
        others: views and lists of other objects that must stay the same, such as optimizer state;
            tensors among them with their addresses and layouts.
    """

    def __init__(
        self,
        models: list[nn.Module],
        others: list[Collection[Any]],
        loose: Iterable[nn.Parameter],
        callees: Iterable[object],
    ) -> None:
        modules = list({id(m): m for model in models for m in model.modules()}.values())
        own = [p for model in models for p in model.parameters()]
        parameters = list({id(p): p for p in (*own, *loose)}.values())
        held = {id(m): m for part in others for m in part if isinstance(m, Tensor)}
        self.tensors = _Tensors([*{**{id(p): p for p in parameters}, **held}.values()], modules)
        self.modes = _Modes(modules)
        self.members = Members(
            [
                *(m._modules.values() for m in modules),
                *(m._parameters.values() for m in modules),
                *(m._buffers.values() for m in modules if not m._buffers),
                *others,
                *(table.values() for table in _tables_of_hooks(modules, parameters)),
            ]
        )
        self.hooks = _hooks_of(parameters)
        # torch numbers all hooks in one sequence, so a new one shows in the next number.
        self._next_hook = RemovableHandle.next_id
        one_of_each = {type(parameter): parameter for parameter in parameters}
        callees = [*callees]
        self.classes = Classes([*modules, *one_of_each.values(), *callees], callees)

    @property
    def versions(self) -> list[Versions]:
        """All dictionaries that are compared."""
        classes = self.classes
        own = [self.members.versions, self.tensors.versions, self.modes.versions]
        return [*own, classes.versions, classes.own]

    def changed(self) -> bool:
        """True if anything changed, but for hooks that were registered."""
        return (
            self.members.changed()
            or self.tensors.changed()
            or bool(self.modes.versions.changed())
            or self.classes.changed()
            or self.has_moved()
        )

    def has_moved(self) -> bool:
        """True if anything changed but for dictionaries and the members of lists."""
        return (
            self.modes.are_others()
            or any(self.members.empty)
            or self.tensors.have_moved()
            or self.classes.are_others()
            or (bool(self.hooks) and any(getattr(p, kind) is not table for p, kind, table in self.hooks))
        )

    def registered_hooks(self) -> bool:
        """True if a hook was registered anywhere since the last call."""
        was, self._next_hook = self._next_hook, RemovableHandle.next_id
        return was != self._next_hook


def _hooks_of_all() -> dict[str, Any]:
    """The tables of global hooks for modules and for optimizers, by name."""
    spaces = (torch.nn.modules.module, sys.modules[Optimizer.__module__])
    return {
        name: table
        for space in spaces
        for name, table in [*vars(space).items()]
        if name.startswith("_global_") and isinstance(table, dict)
    }


def described(
    models: dict[str, nn.Module], loose: Mapping[str, nn.Parameter] | None = None
) -> dict[str, Any]:
    """The values that `Structure` compares, labelled for the user."""
    state: dict[str, Any] = {}
    for name, parameter in (loose or {}).items():
        state |= _described(f"the {name}", parameter)
    for before, model in models.items():
        for name, module in model.named_modules(prefix=before):
            where = name or type(module).__qualname__
            state[f"the module `{where}`"] = Identity(module)
            state[f"the class of `{where}`"] = type(module)
            state[f"`training` of `{where}`"] = module.training
            for kind in _MODULE_HOOKS:
                state[f"`{kind}` of `{where}`"] = names_of_hooks(getattr(module, kind, None))
        for name, parameter in model.named_parameters(prefix=before):
            state[f"the parameter `{name}`"] = Identity(parameter)
            state |= _described(f"parameter `{name}`", parameter)
        for name, buffer in model.named_buffers(prefix=before):
            state |= _laid_out(f"buffer `{name}`", buffer)
    for name, hooks in _hooks_of_all().items():
        state[f"`{name}` of torch"] = names_of_hooks(hooks)
    return state


def _laid_out(name: str, tensor: Tensor) -> dict[str, Any]:
    part = local(tensor)
    return {
        f"the address of {name}": part.data_ptr(),
        f"the shape of {name}": tuple(part.shape),
        f"the strides of {name}": part.stride(),
        f"the dtype of {name}": part.dtype,
        f"the class of {name}": type(tensor),
        f"`requires_grad` of {name}": tensor.requires_grad,
    }


def _described(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    state = _laid_out(name, parameter)
    for kind in TENSOR_HOOKS:
        state[f"`{kind}` of {name}"] = names_of_hooks(getattr(parameter, kind, None))
    if parameter.requires_grad:
        hooks = {key: hook for table in _tables_of_node(parameter) for key, hook in table.items()}
        state[f"the hooks of the autograd node of {name}"] = names_of_hooks(hooks)
    return state


def _tables_of_node(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The tables of hooks of the node that accumulates a gradient, but for the tensor's own.

    Only the garbage collector shows them. A node that nothing holds has none, and a weight that
    `fully_shard` has made in inference mode has no node.
    """
    if parameter.is_inference():
        return []
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    own = [getattr(parameter, kind, None) for kind in TENSOR_HOOKS]
    tables = [table for table in gc.get_referents(node) if isinstance(table, dict)]
    return [table for table in tables if all(table is not each for each in own)]


def names_of_hooks(hooks: dict[int, Any] | None) -> str:
    """The hooks in words, with torch's number of each, which tells two hooks of one name apart."""
    if not hooks:
        return "none"
    return ", ".join(f"`{name_of_hook(hook)}` ({number})" for number, hook in hooks.items())


def name_of_hook(hook: Any) -> str:
    """The name of a hook: of a function its own, of another object that of its class."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
