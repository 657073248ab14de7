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

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from lightning_cudagraph.capture.audit.mentions import MentionedNames
from lightning_cudagraph.capture.checks.reads import PythonValues
from lightning_cudagraph.capture.checks.structure import Structure, described
from lightning_cudagraph.capture.checks.switches import global_switches

__all__ = ["Guards"]

_State = dict[str, Any]


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
    ) -> None:
        self._callees_now = callees
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
        mentioned = MentionedNames.union(self.mentioned)
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

    def drop(self) -> None:
        """Forget it, with the graph."""
        self._cheap = None
        self._structure = self._values = None
        self._thorough, self._hidden = {}, {}
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
            return self._in_words(function or "an object of the model or the optimizer was replaced")
        if change := self._values.changed():
            return change
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
