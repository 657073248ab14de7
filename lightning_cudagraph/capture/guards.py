"""What a graph has baked in besides the batch, and whether it still holds.

Addresses of parameters, buffers and optimizer state, `requires_grad`, module modes, hyperparameters,
Python values that the step mentions, hooks and a few global switches are frozen by a capture. Before
every replay are compared: hyperparameters, Python values, and of parameters, buffers and modules that
were there at the capture the addresses, `requires_grad` and modes; of parameters a share in turns, if no
code of the user's runs between two replays that could change them. The rest (the optimizer's state,
other objects under the same names, hooks, global switches) is compared at the start of an epoch, after
validation, and after a checkpoint, and then all parameters too; a loaded optimizer state says so itself.

What is compared before every replay is prepared at the capture and says no more than yes or no; the
words for a change are made only when there is one. `benchmarks/guards.py` measures the price.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.reads import MentionedNames, PythonValues
from lightning_cudagraph.capture.switches import global_switches

__all__ = ["Guards"]

_State = dict[str, Any]

# C functions that `map` calls without a Python frame for each object.
_data_ptr = Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
_training = operator.itemgetter("training")

# Each attribute of a parameter costs about 50 ns to read, and nothing reads many at once. Where nobody's
# code runs between two replays, one parameter in so many is looked at before each.
_SHARES = 4

_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Parameters:
    """Addresses and `requires_grad` of some parameters as they were."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._addresses = list(map(_data_ptr, parameters))
        self._trained = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]

    def addresses_changed(self) -> bool:
        return list(map(_data_ptr, self._parameters)) != self._addresses

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


class _Objects:
    """The objects of a model as they were, in a form that is quick to compare."""

    def __init__(self, model: nn.Module) -> None:
        modules, parameters = list(model.modules()), list(model.parameters())
        self.modes, self.buffers = _Modes(modules), _Buffers(modules)
        self.parameters = _Parameters(parameters)
        self.shares = [_Parameters(parameters[start::_SHARES]) for start in range(_SHARES)]
        self._turn = 0

    def changed(self, undisturbed: bool) -> bool:
        if self.modes.changed() or self.buffers.changed():
            return True
        if not undisturbed:
            return self.parameters.changed()
        self._turn = (self._turn + 1) % _SHARES
        return self.shares[self._turn].changed()


class Guards:
    """Compares what a graph has baked in with what is there now.

    Args:
        model: the model that is trained.
        cheap: values by name that are compared before every replay (hyperparameters, settings).
        thorough: more of them, compared only when something can have changed.
        frameworks_own: attributes that torch and Lightning keep for themselves in every module.
        quick: the values of `cheap`, and whatever else, without names: what is compared in its place
            before every replay. Words come from `cheap` and `thorough`. None: `cheap` itself.
        undisturbed: whether no code of the user's runs between two replays. Parameters, which only such
            code can change, are then compared in turns, a share before each replay. Asked at a capture.
        stays_on_host: whether a module is only called on the host, such as a metric.
    """

    def __init__(
        self,
        model: nn.Module,
        cheap: Callable[[], _State],
        thorough: Callable[[], _State],
        frameworks_own: frozenset[str],
        quick: Callable[[], tuple[Any, ...]] | None = None,
        undisturbed: Callable[[], bool] = lambda: False,
        stays_on_host: Callable[[nn.Module], bool] = lambda module: False,
    ) -> None:
        self._stays_on_host = stays_on_host
        self._undisturbed_now = undisturbed
        self._undisturbed = False
        self._frameworks_own = frameworks_own
        self._model = model
        self._cheap_now = cheap
        self._thorough_now = thorough
        self._quick_now: Callable[[], object] = cheap if quick is None else quick
        self._cheap: _State | None = None
        self._quick: object = None
        self._thorough: _State = {}
        self._suspect = False
        self._objects: _Objects | None = None
        self._values: PythonValues | None = None
        # What the captured steps mention; each adds its own before `take`.
        self.mentioned: list[MentionedNames] = []
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
        self._quick = self._quick_now()
        self._thorough = self._thorough_state()
        self._objects = _Objects(self._model)
        mentioned = MentionedNames.union(self.mentioned)
        self._values = PythonValues(self._model, mentioned, self._frameworks_own, self._stays_on_host)
        self._undisturbed = self._undisturbed_now()
        self._suspect = False

    def drop(self) -> None:
        """Forget it, with the graph."""
        self._cheap = None
        self._watched = None
        self._moves.clear()
        self.mentioned.clear()

    def suspect(self) -> None:
        """Look at everything before the next replay, because something can have changed."""
        self._suspect = True

    def changed(self) -> str | None:
        """The first thing that is not as at the capture, in words, or None."""
        if self._cheap is None:
            return None
        if self._quick_now() != self._quick:
            return self._in_words("the settings of the optimizer changed")
        if self._objects is not None and self._objects.changed(self._undisturbed):
            return self._in_words("a module changed")
        if self._values is not None and (change := self._values.changed()):
            return change
        if self._suspect:
            self._suspect = False
            return _first_difference(self._thorough, self._thorough_state())
        return None

    def _in_words(self, otherwise: str) -> str:
        assert self._cheap is not None
        return (
            _first_difference(self._cheap, self._cheap_now())
            or _first_difference(self._thorough, self._thorough_state())
            or otherwise
        )

    def _thorough_state(self) -> _State:
        state: _State = {**global_switches(), **self._thorough_now()}
        for name, parameter in self._model.named_parameters():
            state[f"the address of parameter `{name}`"] = parameter.data_ptr()
            state[f"`requires_grad` of parameter `{name}`"] = parameter.requires_grad
            for kind in _TENSOR_HOOKS:
                state[f"`{kind}` of parameter `{name}`"] = _names_of(getattr(parameter, kind, None))
        for name, buffer in self._model.named_buffers():
            state[f"the address of buffer `{name}`"] = buffer.data_ptr()
        for name, module in self._model.named_modules():
            where = name or type(module).__qualname__
            state[f"the module `{where}`"] = id(module)
            state[f"`training` of `{where}`"] = module.training
            for kind in _MODULE_HOOKS:
                state[f"`{kind}` of `{where}`"] = _names_of(getattr(module, kind, None))
        for kind in _MODULE_HOOKS:
            hooks = getattr(torch.nn.modules.module, f"_global{kind}", None)
            state[f"`{kind}` of all modules"] = _names_of(hooks)
        return state


def _names_of(hooks: dict[int, Any] | None) -> str:
    """The hooks in words; the number that torch gives each hook tells two of one name apart."""
    if not hooks:
        return "none"
    return ", ".join(
        f"`{getattr(h, '__qualname__', type(h).__qualname__)}` ({n})" for n, h in hooks.items()
    )


def _first_difference(before: _State, now: _State) -> str | None:
    for name in {**before, **now}:
        was, is_now = before.get(name), now.get(name)
        if was != is_now:
            return f"{name} changed from {was} to {is_now}"
    return None
