"""The objects that a graph knows by their addresses, as they were: in a form that is quick to compare.

Parameters, buffers, submodules and the optimizer's state are held by the dictionaries in which they are,
and not only as objects: another one in the same place is as stale as another address. Nothing here says
more than yes or no, in loops that run in C; `described` finds the words, when there is a change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_cudagraph.capture.local import address_of, addresses_of

__all__ = ["Identity", "Members", "Structure", "described"]

# C functions that `map` calls without a Python frame for each object.
_data_ptr = Tensor.data_ptr
_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_training = operator.itemgetter("training")

# Each attribute of a parameter costs about 100 ns to read, and nothing reads many at once. Where no code
# of the user's runs between two replays, a share of at least so many is looked at before each.
_SHARE = 8
_MAX_SHARES = 32

_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Identity:
    """An object as a value that equals itself alone. Holds it, so that no other comes at its address."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other._held is self._held

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"a `{type(self._held).__qualname__}` at {id(self._held):#x}"


class Members:
    """The objects in lists and in views of dictionaries: the same ones, in the same order, and no more.

    Args:
        parts: live views or lists. Equality is never asked for, because tensors would compute it.
    """

    def __init__(self, parts: Iterable[Collection[Any]]) -> None:
        parts = [*parts]
        self._filled = [part for part in parts if len(part)]
        self._empty = [part for part in parts if not len(part)]
        self._were = [*chain.from_iterable(self._filled)]

    def changed(self) -> bool:
        now = [*chain.from_iterable(self._filled)]
        same = len(now) == len(self._were) and all(map(operator.is_, now, self._were))
        return not same or any(map(len, self._empty))


class _Parameters:
    """Addresses and `requires_grad` of some parameters as they were."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._address = addresses_of(parameters)
        self._addresses = list(map(self._address, parameters))
        self._trained = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]

    def addresses_changed(self) -> bool:
        return list(map(self._address, self._parameters)) != self._addresses

    def requires_grad_changed(self) -> bool:
        return not all(map(_requires_grad, self._trained)) or any(map(_requires_grad, self._frozen))

    def changed(self) -> bool:
        return self.addresses_changed() or self.requires_grad_changed()


class _Buffers:
    """Addresses of buffers as they were; by name, because code outside the step may rebind one."""

    def __init__(self, modules: list[nn.Module]) -> None:
        buffers = [(module._buffers, name) for module in modules for name in module._buffers]
        held = [(holder, name) for holder, name in buffers if holder[name] is not None]
        self._absent = [(holder, name) for holder, name in buffers if holder[name] is None]
        self._holders = [holder for holder, _ in held]
        self._names = [name for _, name in held]
        self._was = self._addresses()

    def _addresses(self) -> list[int] | None:
        try:
            buffers: Any = map(operator.getitem, self._holders, self._names)
            return list(map(_data_ptr, buffers))
        except (KeyError, TypeError):  # one was deleted, or set to None
            return None

    def changed(self) -> bool:
        if self._names and self._addresses() != self._was:
            return True
        return any(holder.get(name) is not None for holder, name in self._absent)


class _Modes:
    """`training` of modules as it was."""

    def __init__(self, modules: list[nn.Module]) -> None:
        # An ordinary module has its mode in its dictionary, where it is found in half the time.
        plain = [vars(module) for module in modules if "training" in vars(module)]
        self._training = [members for members in plain if members["training"]]
        self._evaluating = [members for members in plain if not members["training"]]
        self._odd = [(module, module.training) for module in modules if "training" not in vars(module)]

    def changed(self) -> bool:
        if not all(map(_training, self._training)) or any(map(_training, self._evaluating)):
            return True
        return any(module.training != was for module, was in self._odd)


class _Hooks:
    """Hooks of modules, parameters and optimizers.

    torch numbers all of them in one sequence, so that a new one is known by the number of the next; what
    is looked at are those that were there.
    """

    def __init__(self, modules: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        tables = [getattr(m, kind, None) for m in modules for kind in _MODULE_HOOKS]
        tables += [getattr(p, kind, None) for p in parameters for kind in _TENSOR_HOOKS]
        self._there = Members([table.values() for table in tables if table])
        self._next = RemovableHandle.next_id

    def removed(self) -> bool:
        return self._there.changed()

    def registered(self) -> bool:
        """Whether any was registered anywhere since the last call."""
        was, self._next = self._next, RemovableHandle.next_id
        return was != self._next


class Structure:
    """The objects of some models, and of what works on them, as they were.

    Args:
        models: the model, and modules that it does not know as its own.
        others: views and lists of other objects that have to stay, such as an optimizer's state.
        loose: parameters that none of the models knows as its own.
    """

    def __init__(
        self,
        models: list[nn.Module],
        others: list[Collection[Any]],
        loose: Iterable[nn.Parameter] = (),
    ) -> None:
        modules = list({id(m): m for model in models for m in model.modules()}.values())
        own = [p for model in models for p in model.parameters()]
        parameters = list({id(p): p for p in (*own, *loose)}.values())
        places = [m._parameters.values() for m in modules] + others
        self.modes, self.buffers = _Modes(modules), _Buffers(modules)
        self.submodules = Members([m._modules.values() for m in modules])
        self.parameters, self.places = _Parameters(parameters), Members(places)
        self.hooks = _Hooks(modules, parameters)
        shares = max(1, min(_MAX_SHARES, len(parameters) // _SHARE))
        self._shares = [
            (_Parameters(parameters[start::shares]), Members(places[start::shares]))
            for start in range(shares)
        ]
        self._turn = 0

    def changed(self, undisturbed: bool) -> bool:
        """Whether anything did; `undisturbed`: nobody can have changed it, so look at a share."""
        if self.modes.changed() or self.buffers.changed() or self.hooks.removed():
            return True
        return self.share_changed() if undisturbed else self.all_changed()

    def share_changed(self) -> bool:
        self._turn = (self._turn + 1) % len(self._shares)
        parameters, places = self._shares[self._turn]
        return parameters.changed() or places.changed()

    def all_changed(self) -> bool:
        return self.submodules.changed() or self.places.changed() or self.parameters.changed()


def described(
    models: dict[str, nn.Module], loose: Mapping[str, nn.Parameter] | None = None
) -> dict[str, Any]:
    """What `Structure` compares, by the user's words.

    Args:
        models: the models, with what stands before the names of their parts.
        loose: parameters that none of them knows as its own.
    """
    state: dict[str, Any] = {}
    for name, parameter in (loose or {}).items():
        state |= _described(f"the {name}", parameter)
    for before, model in models.items():
        for name, module in model.named_modules(prefix=before):
            where = name or type(module).__qualname__
            state[f"the module `{where}`"] = Identity(module)
            state[f"`training` of `{where}`"] = module.training
            for kind in _MODULE_HOOKS:
                state[f"`{kind}` of `{where}`"] = names_of_hooks(getattr(module, kind, None))
        for name, parameter in model.named_parameters(prefix=before):
            state[f"the parameter `{name}`"] = Identity(parameter)
            state |= _described(f"parameter `{name}`", parameter)
        for name, buffer in model.named_buffers(prefix=before):
            state[f"the address of buffer `{name}`"] = address_of(buffer)
    for kind in _MODULE_HOOKS:
        hooks = getattr(torch.nn.modules.module, f"_global{kind}", None)
        state[f"`{kind}` of all modules"] = names_of_hooks(hooks)
    return state


def _described(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"the address of {name}": address_of(parameter),
        f"`requires_grad` of {name}": parameter.requires_grad,
    }
    for kind in _TENSOR_HOOKS:
        state[f"`{kind}` of {name}"] = names_of_hooks(getattr(parameter, kind, None))
    return state


def names_of_hooks(hooks: dict[int, Any] | None) -> str:
    """The hooks in words; the number that torch gives each hook tells two of one name apart."""
    if not hooks:
        return "none"
    return ", ".join(
        f"`{getattr(h, '__qualname__', type(h).__qualname__)}` ({n})" for n, h in hooks.items()
    )
