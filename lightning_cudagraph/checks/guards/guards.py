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

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.audit.host_objects import is_users_class, lineage
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.audit.parts import PRIVATE, Moved, in_words, same
from lightning_cudagraph.checks.audit.walker import Namespace, Root, Scope, Walk
from lightning_cudagraph.checks.guards.structure import Structure, described
from lightning_cudagraph.checks.guards.switches import global_switches
from lightning_cudagraph.tensors.recomputed import recomputed_names

__all__ = ["Guards"]

_State = dict[str, Any]

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
        self._stops = stops
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
        self._reads: list[tuple[str, Callable[[], Any], Any]] = []
        self.mentioned: list[MentionedNames] = []
        self.effects = Effects(
            lambda mentioned: self._walk_of(mentioned, self._outside()),
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
        self._take_walk()
        self._reads = [(label, read, read()) for label, read in self.all_mentioned().reads.items()]
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

    def _take_walk(self) -> None:
        irrelevant = {part for part, checks in self._cleared.items() if checks >= _CHECKS_TO_CLEAR}
        self._walk = walk = self._walk_of(self.all_mentioned(), [], frozenset(irrelevant))
        walk.be_quick()
        self._hidden = {p: m for p, m in walk.hidden.items() if not self._stays_on_host(m)}
        self._moved, self.doubt = [], ""

    def clear_doubt(self) -> None:
        """A check has found that the step is what was captured, in spite of the change."""
        if self.doubt:
            self._cleared.update({(moved.of, moved.path) for moved in self._moved})
            self._take_walk()

    def _walk_of(
        self, mentioned: MentionedNames, outside: list[Root], ignored: Collection[tuple[str, str]] = ()
    ) -> Walk:
        """A walk over what the steps can reach: the user's modules, globals, closures and others."""
        users = self._named(mentioned.of_users_objects())
        known = users | self._named(mentioned.names)

        def modules(model: nn.Module, path: str, of: str) -> Iterator[Root]:
            yield from self._roots_of_modules(model, path, users, known)

        omitted = _rates_unless_mentioned(mentioned, users)
        scope = Scope(self._stops, ignored, users, modules, omitted)
        roots = [
            Root(os.environ, "os.environ", "the process"),
            Root(sys.argv, "sys.argv", "the process"),
            *self._roots_of_modules(self._model, "", users, known),
            *self._roots_of_names(mentioned),
            *outside,
        ]
        for name, framework_object in self._around.items():
            if name in users:
                of = f"the `{type(framework_object).__qualname__}`"
                roots.append(Root(framework_object, "", of, is_entered=True, by_name=True))
        for value, name, of in mentioned.roots:
            if all(value is not other for other in self._around.values()):
                roots.append(Root(value, name, of, by_name=True))
        return Walk(roots, scope)

    def _named(self, names: set[str]) -> frozenset[str]:
        """Without those that are not compared, and those like `__doc__`, which no one sets."""
        dunder = {name for name in names if name.startswith("__") and name.endswith("__")}
        return frozenset(names - dunder - self._unwatched)

    def _roots_of_modules(
        self, model: nn.Module, before: str, users: frozenset[str], known: frozenset[str]
    ) -> Iterator[Root]:
        """All modules of a model, and its parameters.

        Args:
            model: the model.
            before: what stands before the names of its parts.
            users: names that the user's code mentions.
            known: names that any code mentions.
        """
        for name, module in model.named_modules(prefix=before):
            kind = type(module)
            of = f"`{name}`" if name else f"the `{kind.__qualname__}`"
            left_out = self._unwatched | recomputed_names(module) | self._host_names(module)
            if self._stays_on_host(module):  # what it keeps for itself, its states too, is its own
                left_out |= {PRIVATE, *getattr(module, "_defaults", ())}
                yield Root(module, "", of, left_out, True, reads=frozenset(), is_read=False)
            elif is_users_class(kind):
                # The code of a framework does not read what a class of the user's own calls by a name.
                yield Root(module, "", of, left_out, True, users if _is_users_alone(kind) else known)
            else:
                yield Root(module, "", of, left_out, True, known, by_name=True)
        for name, parameter in model.named_parameters(prefix=before):
            yield Root(parameter, "", f"parameter `{name}`")

    def _roots_of_names(self, mentioned: MentionedNames) -> Iterator[Root]:
        """Globals, variables of closures, and attributes that were read of what the host keeps."""
        spaces: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        found = [(space, name, f"`{_name_of(space)}`") for space, name in mentioned.user_globals]
        for space, name, of in (*found, *mentioned.attributes):
            spaces.setdefault(id(space), (space, of, set()))[2].add(name)
        for space, of, names in spaces.values():
            yield Root(Namespace(space), "", of, reads=frozenset(names - self._unwatched))
        for cell, name, function in mentioned.cells():
            if name not in self._unwatched:
                yield Root(cell, name, f"the closure of `{function}`")

    def drop(self) -> None:
        """Forget it, with the graph."""
        self._cheap = None
        self._structure = None
        self._reads, self._thorough, self._hidden = [], {}, {}
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
        if self._cheap is None or self._structure is None or self._walk is None:
            return None
        if self._quick_now() != self._quick:
            return self._in_words("the settings of the optimizer changed")
        if self._structure.changed():
            function = self._structure.classes.in_words()
            return self._in_words(
                function or "an object of the model, or an entry of `optimizer.state`, was replaced"
            )
        changes = self._walk.quick_changes(everything=self._suspect)
        moved = [part for part in changes if not part.is_under(self._unwatched)]
        # The step reads what lies under names that it mentions. Of all else a check has to tell.
        if (known := next((part for part in moved if part.is_read), None)) is not None:
            return known.words
        for label, read, was in self._reads:
            if not same(was, now := read()):
                return f"{label} changed{in_words(was, now)}"
        if moved:
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


def _name_of(namespace: Mapping[str, Any]) -> str:
    return str(namespace.get("__name__", "a module"))


def _is_users_alone(kind: type) -> bool:
    """Whether a class of modules has its attributes from the user alone, from no layer of torch."""
    roots = [nn.Module, *(base for base in lineage(kind) if base.__name__ == "LightningModule")]
    allowed = {above for root in roots for above in lineage(root)}
    return all(is_users_class(base) or base in allowed for base in lineage(kind))


def _rates_unless_mentioned(
    mentioned: MentionedNames, users: frozenset[str]
) -> Callable[[dict[Any, Any]], frozenset[str]]:
    """Leave the learning rate out of a param group of which the step wants the parameters alone."""
    texts = mentioned.all_texts()
    wants_all = "lr" in texts or "params" not in texts or not users.isdisjoint(("items", "values"))

    def omitted(value: dict[Any, Any]) -> frozenset[str]:
        return frozenset() if wants_all or "params" not in value else frozenset({"lr", "initial_lr"})

    return omitted
