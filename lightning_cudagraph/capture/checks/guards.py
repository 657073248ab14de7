"""What a graph has baked in besides the batch, and whether it still holds.

Parameters, buffers, their addresses and layouts, optimizer state, submodules and their modes, classes
and the functions in them, hyperparameters, Python values that the step mentions, hooks and a few global
switches are frozen by a capture. Before every replay all of them but the switches are compared. The
switches and the words for all else are compared at the start of an epoch, after validation, after a
checkpoint, and after a hook was registered anywhere; a loaded optimizer state says so itself.

What is compared before every replay is prepared at the capture and says no more than yes or no; the
words for a change are made only when there is one. `benchmarks/guards.py` measures the price.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from io import FileIO, TextIOWrapper
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_cudagraph.capture.audit.effects import Effects
from lightning_cudagraph.capture.audit.host_objects import is_users_class
from lightning_cudagraph.capture.audit.mentions import MentionedNames
from lightning_cudagraph.capture.audit.walker import PRIVATE, Moved, Root, Walk
from lightning_cudagraph.capture.checks.reads import PythonValues
from lightning_cudagraph.capture.checks.structure import Structure, described
from lightning_cudagraph.capture.checks.switches import global_switches
from lightning_cudagraph.capture.recomputed import recomputed_names
from lightning_cudagraph.compat.torch_names import _BaseDataLoaderIter

__all__ = ["Guards"]

_State = dict[str, Any]

# They change in every step by themselves; records and files are refused where they are written.
_STOPS = (
    Optimizer,
    LRScheduler,
    DataLoader,
    _BaseDataLoaderIter,
    DistributedDataParallel,
    logging.Handler,
    FileIO,
    TextIOWrapper,
)
# A part that has changed so often, with checks that found the step the same, is not compared any more.
_CHECKS_TO_CLEAR = 3


class Guards:
    """Compares what a graph has baked in with what is there now.

    Args:
        model: the model that is trained.
        cheap: values by name that are compared before every replay (hyperparameters, settings).
        thorough: more of them, compared only when something can have changed.
        unwatched: names of attributes that are not compared: those that torch and Lightning keep for
            themselves in every module, and those that the user says are harmless.
        quick: the values of `cheap`, and whatever else, without names: what is compared in its place
            before every replay. Words come from `cheap` and `thorough`. None: `cheap` itself.
        stays_on_host: whether a module is only called on the host, such as a metric.
        others: lists, and views of dictionaries, whose members have to stay the same objects, such as
            an optimizer's state. Asked at a capture.
        around: objects of a framework, by name, whose attributes are compared under the names that the
            user's code mentions, if it mentions the object's own.
        host_names: attributes of a module that are not compared, because the host keeps them.
        stepped: the parameters of optimizers by name, some of which no module may know. Asked anew.
        callees: other objects with methods that the steps call. Asked at a capture.
        stops: classes of objects that a framework changes in every step, and that are not looked into.
        outside: objects of the user's outside of the model, in which a step may leave something.

    Attributes:
        mentioned: what the captured steps mention; each adds its own before `take`.
        effects: what warm-up steps change on the host.
        doubt: a change, in words, of which only a check can say whether the step depends on it.
    """

    def __init__(
        self,
        model: nn.Module,
        cheap: Callable[[], _State],
        thorough: Callable[[], _State],
        unwatched: frozenset[str],
        quick: Callable[[], tuple[Any, ...]] | None = None,
        stays_on_host: Callable[[nn.Module], bool] = lambda module: False,
        others: Callable[[], list[Collection[Any]]] = list,
        around: Mapping[str, Any] | None = None,
        host_names: Callable[[nn.Module], frozenset[str]] = lambda module: frozenset(),
        stepped: Callable[[], dict[str, nn.Parameter]] = dict,
        callees: Callable[[], list[object]] = list,
        stops: tuple[type, ...] = (),
        outside: Callable[[], list[Root]] = list,
    ) -> None:
        self._callees_now = callees
        self._stops = (*_STOPS, *stops)
        self._outside = outside
        self._walk: Walk | None = None
        self._moved: list[Moved] = []
        self._cleared: Counter[tuple[str, str]] = Counter()
        self.doubt = ""
        self._stepped_now = stepped
        self._others_now = others
        self._around = around or {}
        self._host_names = host_names
        self._stays_on_host = stays_on_host
        self._unwatched = unwatched
        self._model = model
        self._cheap_now = cheap
        self._thorough_now = thorough
        self._quick_now: Callable[[], object] = cheap if quick is None else quick
        self._cheap: _State | None = None
        self._quick: object = None
        self._thorough: _State = {}
        self._suspect = False
        self._structure: Structure | None = None
        self._hidden: dict[str, nn.Module] = {}
        self._values: PythonValues | None = None
        self.mentioned: list[MentionedNames] = []
        self.effects = Effects(
            lambda mentioned: [*self._roots(mentioned), *self._outside()],
            self._stops,
            unwatched,
            lambda holder: any(holder is module for module in model.modules()),
        )
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

    def all_mentioned(self) -> MentionedNames:
        """What the captured steps mention together."""
        return MentionedNames.union(self.mentioned)

    def take(self) -> None:
        """Remember what is there now, at a capture."""
        mentioned = self.all_mentioned()
        self._values = PythonValues(
            self._model,
            mentioned,
            self._unwatched,
            self._stays_on_host,
            self._around,
            self._host_names,
        )
        self._hidden = self._values.hidden
        self._structure = Structure(
            [self._model, *self._hidden.values()],
            self._others_now(),
            self._loose().values(),
            self._callees_now(),
        )
        self._cheap = self._cheap_now()
        self._quick = self._quick_now()
        self._thorough = self._thorough_state()
        self._suspect = False
        self._take_walk()

    def _take_walk(self) -> None:
        mentioned = self.all_mentioned()
        irrelevant = [part for part, checks in self._cleared.items() if checks >= _CHECKS_TO_CLEAR]
        self._walk = Walk(self._roots(mentioned), self._stops, frozenset(irrelevant))
        self._moved, self.doubt = [], ""

    def clear_doubt(self) -> None:
        """A check has found that the step is what was captured, in spite of the change."""
        if self.doubt:
            self._cleared.update({(moved.of, moved.path) for moved in self._moved})
            self._take_walk()

    def _roots(self, mentioned: MentionedNames) -> list[Root]:
        """What the steps can reach: the user's modules, globals and closures."""
        roots = [
            Root(os.environ, "os.environ", "the process"),
            Root(sys.argv, "sys.argv", "the process"),
        ]
        for before, model in {"": self._model, **self._hidden}.items():
            for name, module in model.named_modules(prefix=before):
                of = f"`{name}`" if name else f"the `{type(module).__qualname__}`"
                left_out = self._unwatched | recomputed_names(module) | self._host_names(module)
                if self._stays_on_host(module):  # what it keeps for itself is its own
                    roots.append(Root(module, "", of, left_out | {PRIVATE}, is_entered=True))
                elif is_users_class(type(module)):
                    roots.append(Root(module, "", of, left_out))
            roots += [
                Root(parameter, "", f"parameter `{name}`")
                for name, parameter in model.named_parameters(prefix=before)
            ]
        for namespace, name in mentioned.user_globals:
            if name in namespace and name not in self._unwatched:
                of = f"`{namespace.get('__name__', 'a module')}`"
                roots.append(Root(namespace[name], name, of))
        for cell, name, function in mentioned.cells():
            if name not in self._unwatched:
                roots.append(Root(cell, name, f"the closure of `{function}`"))
        return roots

    def drop(self) -> None:
        """Forget it, with the graph."""
        self._cheap = None
        self._structure = self._values = None
        self._thorough, self._hidden = {}, {}
        self._walk, self._moved, self.doubt = None, [], ""
        self.effects.forget()
        self._watched = None
        self._moves.clear()
        self.mentioned.clear()

    def suspect(self) -> None:
        """Look at everything before the next replay, because something can have changed."""
        self._suspect = True

    def changed(self) -> str | None:
        """The first thing that is not as at the capture, in words, or None."""
        if self._cheap is None or self._structure is None or self._values is None:
            return None
        if self._quick_now() != self._quick:
            return self._in_words("the settings of the optimizer changed")
        if self._structure.changed():
            function = self._structure.classes.in_words()
            return self._in_words(
                function or "an object of the model, or an entry of `optimizer.state`, was replaced"
            )
        if change := self._values.changed():
            return change
        if self._walk is not None and (moved := self._walk.changes(everything=self._suspect)):
            self._moved, self.doubt = moved, moved[0].words
        if self._structure.hooks.registered() or self._suspect:
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
        return {
            **global_switches(),
            **described({"": self._model, **self._hidden}, self._loose()),
            **self._thorough_now(),
        }

    def _loose(self) -> dict[str, nn.Parameter]:
        """The parameters of optimizers that no module knows as its own."""
        models = (self._model, *self._hidden.values())
        own = {id(parameter) for model in models for parameter in model.parameters()}
        return {name: p for name, p in self._stepped_now().items() if id(p) not in own}


def _first_difference(before: _State, now: _State) -> str | None:
    for name in {**before, **now}:
        was, is_now = before.get(name), now.get(name)
        if was != is_now:
            return f"{name} changed from {was} to {is_now}"
    return None
