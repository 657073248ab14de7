"""Guards: the comparison of what a graph bakes in, besides the batch, with the present.

`capture/decisions/invalidation.py` decides by it which graphs are stale.

A capture bakes in parameters, buffers, their addresses and layouts, optimizer state, submodules and
their modes, classes and their functions, hyperparameters, Python values that the step mentions, hooks
and global switches. They are compared before every replay; a few switches, and all else in its labelled
form, at the start of an epoch, after validation, after a checkpoint, before a further capture, and after
a hook was registered anywhere. Loading an optimizer state invalidates the graph by a hook.

The comparison before every replay is prepared at the capture and gives a bool; the words for a change
are made only when there is one. `benchmarks/guards.py` measures the price.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import current_thread
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import container

from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.audit.host_lines import first_line
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.checks.guards.hooks import HookRoots
from lightning_cudagraph.checks.guards.one_pass import OnePass
from lightning_cudagraph.checks.guards.recurring import RecurringValues, form
from lightning_cudagraph.checks.guards.structure import TABLES, Structure, described
from lightning_cudagraph.checks.guards.suspicions import Suspicions
from lightning_cudagraph.checks.guards.switches import Contexts, global_switches
from lightning_cudagraph.checks.walk.host_objects import is_users_class, lineage, namespace_of
from lightning_cudagraph.checks.walk.parts import PRIVATE, Moved, in_words, same
from lightning_cudagraph.checks.walk.scope import Namespace, Root, Scope
from lightning_cudagraph.checks.walk.versions import OwnWrites
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.errors import without_addresses
from lightning_cudagraph.tensors.host_values import HostAttribute
from lightning_cudagraph.tensors.recomputed import recomputed_names

_State = dict[str, Any]

_MAX_NAMED = 3  # in a note
# Steps in a row with a check each of what hooks read. More are not worth it: the graph is stale then.
_MAX_CHECKED_STEPS = 8


@dataclass(frozen=True)
class GuardedValues:
    """Values by label that graphs bake in; each function returns the present ones.

    Attributes:
        cheap: compared before every replay (hyperparameters, settings).
        thorough: compared only when something can have changed.
        quick: an unlabelled form of `cheap`, with anything more, compared before every replay instead of
            it. The words for a change come from `cheap` and `thorough`. None for `cheap` itself.
    """

    cheap: Callable[[], _State]
    thorough: Callable[[], _State]
    quick: Callable[[], tuple[Any, ...]] | None = None


@dataclass(frozen=True)
class Unguarded:
    """The parts of modules and frameworks that are not compared.

    Attributes:
        names: attributes that torch and Lightning keep in every module for themselves, and those that
            the user declares harmless.
        host_names: names of a module's attributes that the host keeps.
        stops: classes that are not entered, because a framework changes their objects in every step.
        known: objects that are not entered, because their values are compared by themselves.
    """

    names: frozenset[str] = frozenset()
    stays_on_host: Callable[[nn.Module], bool] = lambda module: False
    host_names: Callable[[nn.Module], frozenset[str]] = lambda module: frozenset()
    stops: tuple[type, ...] = ()
    known: tuple[object, ...] = ()


@dataclass(frozen=True)
class OutsideModel:
    """Objects outside the model that steps use; the functions are called at a capture.

    Attributes:
        around: framework objects by name. If the user's code mentions the name, the attributes that it
            mentions are compared.
        parameters: the parameters of optimizers by name, which may belong to no module.
        containers: lists and dictionary views with members that must stay the same objects, such as
            optimizer state.
        callees: objects with methods that steps call, of their own or of their classes.
        roots: the user's objects that a step may change.
        read: those of which a step may read what it mentions.
    """

    around: Mapping[str, Any] = field(default_factory=dict)
    parameters: Callable[[], dict[str, nn.Parameter]] = dict
    containers: Callable[[], list[Collection[Any]]] = list
    callees: Callable[[], Sequence[object]] = list
    roots: Callable[[], list[Root]] = list
    read: Callable[[], list[Root]] = list


class Guards:
    """Guards on everything that the graphs of one run bake in.

    Attributes:
        mentioned: names that the captured steps mention; each adds its own before `take`.
        suspicions: changes that only checks against eager steps can judge.
        recurring: attributes that are part of the signature; their changes are none here.
    """

    def __init__(
        self, model: nn.Module, values: GuardedValues, unguarded: Unguarded, external: OutsideModel
    ) -> None:
        self._model = model
        self._values = values
        self._unguarded = unguarded
        self._external = external
        self._quick_now: Callable[[], object] = values.quick or values.cheap
        self._walk: Walk | None = None
        self.suspicions = Suspicions()
        self.recurring = RecurringValues()
        self._unseen: list[Moved] = []  # changes that the walk has recorded already
        self._moved: Moved | None = None  # the last change, if it is one of a part of an object
        self._cheap: _State | None = None
        self._quick: object = None
        self._contexts: Contexts | None = None
        self._thorough: _State = {}
        self._suspect = False
        self._checked_steps = 0
        self._structure: Structure | None = None
        self._one_pass: OnePass | None = None
        self._hidden: dict[str, nn.Module] = {}
        self._reads: list[tuple[str, Callable[[], Any], Any]] = []
        self.mentioned: list[MentionedNames] = []
        self.effects = Effects(
            lambda mentioned: self._walk_of(mentioned, external.roots()),
            unguarded.names,
            lambda holder: any(holder is module for module in model.modules()),
        )
        self._watched: tuple[_State, Walk] | None = None
        self._moves: list[str | None] = []

    def watch(self) -> None:
        """Record the values that move from one warm-up step to the next."""
        now = self._values.cheap()
        if self._watched is not None:
            was, walk = self._watched
            moved = next((part.words for part in walk.changes() if part.is_read), None)
            self._moves.append(_first_difference(was, now) or moved)
        users = self._named(self.effects.mentioned.of_users_objects())
        scope = Scope(self._unguarded.stops, reads=users)
        # Optimizers with a step of their own: what moves there leaves the rest of the step to a graph.
        held = [r for r in self._external.read() if not (r.by_name or isinstance(r.value, FunctionType))]
        self._watched = now, Walk(held, scope)

    def moving(self) -> str | None:
        """A value that has moved in every warm-up step, in words; None if there is none."""
        return self._moves[-1] if self._moves and all(self._moves) else None

    def all_mentioned(self) -> MentionedNames:
        return MentionedNames.union(self.mentioned)

    def changes_from_now(self) -> Callable[[], list[Moved]]:
        """A function that finds what the examined step reads and what has changed since this call."""
        walk = self._walk_of(self.all_mentioned(), [])

        def changes() -> list[Moved]:
            moved = [m for m in walk.changes() if m.is_read and not m.is_under(self._unguarded.names)]
            walk.release()
            return moved

        return changes

    def take(self, graph: object) -> None:
        """Record what a new graph has baked in.

        For older graphs, too, this is the record from now on: everything must have been compared before.
        """
        self.suspicions.begin(graph)
        ignored = frozenset(self.suspicions.ignored)
        self._walk = walk = self._walk_of(self.all_mentioned(), [], ignored, self.recurring.has)
        walk.be_quick()
        self._hidden = {p: m for p, m in walk.hidden.items() if not self._unguarded.stays_on_host(m)}
        self._reads = [(label, read, read()) for label, read in self.all_mentioned().reads.items()]
        self._structure = Structure(
            [self._model, *self._hidden.values()],
            self._external.containers(),
            self._loose().values(),
            self._external.callees(),
        )
        self._one_pass = None
        self._cheap = self._values.cheap()
        self._quick = self._quick_now()
        self._contexts = Contexts()
        self._thorough = self._thorough_state()
        self._suspect = False

    def clear_suspicion(self, graph: object) -> None:
        """Clear the suspicion against a graph: a check has found it unchanged."""
        if self.suspicions.clear(graph) and self._walk is not None:
            self._unseen += self._walk.renew(frozenset(self.suspicions.ignored))

    def _walk_of(
        self,
        mentioned: MentionedNames,
        outside: list[Root],
        ignored: Collection[tuple[str, str]] = (),
        is_ignored: Callable[[Moved], bool] = lambda moved: False,
    ) -> Walk:
        """A walk over the objects that the steps can reach: modules, globals, closures and others."""
        users = self._named(mentioned.of_users_objects())
        reads = self._readable(mentioned)

        parameters = {
            id(p): p for p in (*self._model.parameters(), *self._external.parameters().values())
        }
        hooks = HookRoots(mentioned, self._model.modules(), parameters.values())

        def modules(model: nn.Module, path: str, of: str) -> Iterator[Root]:
            yield from self._roots_of_modules(model, path, reads)
            yield from HookRoots(mentioned, model.modules(), model.parameters())

        omitted = _rates_unless_mentioned(mentioned, users)
        stops, known = self._unguarded.stops, self._unguarded.known
        own = {id(each) for each in self._external.callees()}
        scope = Scope(
            stops,
            ignored,
            users,
            modules,
            omitted,
            by_identity=TABLES,
            closed=known,
            is_foreign=lambda optimizer: id(optimizer) not in own,
        )
        roots = [
            Root(os.environ, "os.environ", "the process"),
            Root(sys.argv, "sys.argv", "the process"),
            Root(current_thread(), "", "the running thread", by_name=True),
            *self._roots_of_modules(self._model, "", reads),
            *self._roots_of_names(mentioned, hooks),
            *self._external.read(),
            *hooks,
            *outside,
        ]
        for name, framework_object in self._external.around.items():
            if name in users:
                of = f"the `{type(framework_object).__qualname__}`"
                roots.append(Root(framework_object, "", of, is_entered=True, by_name=True))
        for value, name, of in mentioned.roots:
            if all(value is not other for other in self._external.around.values()):
                roots.append(Root(value, name, of, by_name=True))
        return Walk(roots, scope, is_ignored)

    def _named(self, names: set[str]) -> frozenset[str]:
        """The names that are compared: without unwatched ones and dunder names."""
        dunder = {name for name in names if name.startswith("__") and name.endswith("__")}
        return frozenset(names - dunder - self._unguarded.names)

    def readable(self) -> Callable[[nn.Module], frozenset[str]]:
        """A function of a module: the names of its attributes that the captured steps can have read."""
        return self._readable(self.all_mentioned())

    def _readable(self, mentioned: MentionedNames) -> Callable[[nn.Module], frozenset[str]]:
        users = self._named(mentioned.of_users_objects())
        known = users | self._named(mentioned.names)
        found: dict[type, frozenset[str]] = {}

        def reads(module: nn.Module) -> frozenset[str]:
            kind = type(module)
            if kind not in found:
                # Framework code does not read attributes that only the user's class defines.
                names = users if _is_users_alone(kind) else known
                # The setter of a framework's property `x` keeps the value as `_x`.
                found[kind] = names | TABLES | {f"_{name}" for name in names & _properties_of(kind)}
            return found[kind]

        return reads

    def _roots_of_modules(
        self, model: nn.Module, before: str, reads: Callable[[nn.Module], frozenset[str]]
    ) -> Iterator[Root]:
        unguarded = self._unguarded
        names = unguarded.names - TABLES
        for name, module in model.named_modules(prefix=before):
            kind = type(module)
            of = f"`{name}`" if name else f"the `{kind.__qualname__}`"
            left_out = names | recomputed_names(module) | unguarded.host_names(module)
            if unguarded.stays_on_host(module):  # private attributes and states are its own affair
                left_out |= {PRIVATE, *getattr(module, "_defaults", ())}
                yield Root(module, "", of, left_out, True, reads=frozenset(), is_read=False)
            else:
                by_name = not is_users_class(kind)
                named = reads(module)
                if _has_items(kind):
                    named |= vars(module).keys()
                yield Root(module, "", of, left_out, True, named, by_name=by_name)
        for name, parameter in model.named_parameters(prefix=before):
            yield Root(parameter, "", f"parameter `{name}`")
        for name, buffer in model.named_buffers(prefix=before):
            yield Root(buffer, "", f"buffer `{name}`")

    def _roots_of_names(self, mentioned: MentionedNames, hooks: HookRoots) -> Iterator[Root]:
        """Roots for globals, closure variables, and attributes that were read of host objects."""
        spaces: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        found = [(space, name, f"`{_name_of(space)}`") for space, name in mentioned.user_globals]
        for space, name, of in (*found, *mentioned.attributes):
            spaces.setdefault(id(space), (space, of, set()))[2].add(name)
        for space, of, names in spaces.values():
            named = frozenset(names - self._unguarded.names)
            yield Root(Namespace(space), "", of, reads=named - hooks.only_in_hooks)
            yield Root(Namespace(space), "", of, reads=named & hooks.only_in_hooks, behind=hooks.names)
        for cell, name, function in mentioned.cells(hooks.functions):
            if name not in self._unguarded.names:
                yield Root(cell, name, f"the closure of `{function}`")

    @property
    def notes(self) -> list[str]:
        """Parts that are not compared before each replay, for the report."""
        if self._walk is None:
            return []
        parts, notes = self._walk.between_pauses, []
        more = f" and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else ""
        if named := ", ".join(parts[:_MAX_NAMED]):
            when = "in pauses only (the start of an epoch, validation)"
            notes = [f"large, so compared {when}: {named}{more}"]
        if end := self._walk.end:
            notes.append(f"of the objects that the step reaches, {end} alone are compared")
        return notes

    def drop(self) -> None:
        """Forget the record, when the graph is released."""
        self._cheap = None
        self._structure = self._one_pass = None
        self._contexts = None
        self._reads, self._thorough, self._hidden = [], {}, {}
        self._walk, self._unseen, self._moved = None, [], None
        self.suspicions.forget()
        self.recurring.forget()
        self.effects.forget()
        self._watched = None
        self._moves.clear()
        self.mentioned.clear()

    def suspect(self) -> None:
        """Compare everything before the next replay, because something can have changed."""
        self._suspect = True

    def pass_over(self, writes: OwnWrites) -> None:
        """Do not compare a dictionary for writes of this package that it has taken back."""
        if self._one_pass is not None:
            self._one_pass.pass_over(writes)

    def changed(self) -> str | None:
        """The first change since the capture, in words; None if there is none."""
        if self._cheap is None or self._structure is None or self._walk is None:
            return None
        self._moved = None
        if self._quick_now() != self._quick:
            return self._in_words("the settings of the optimizer changed")
        if self._contexts is not None and self._contexts.changed():
            return self._in_words("a mode of torch, or hooks on saved tensors, were entered or left")
        has_new_hooks = self._structure.registered_hooks()
        has_others = bool(self._unseen) or any(not same(was, read()) for _, read, was in self._reads)
        is_whole = has_new_hooks or self._suspect or has_others
        one_pass = self._one_pass
        if one_pass is None or one_pass.quick is not self._walk.quick:
            one_pass = OnePass(self._structure, self._walk.quick)
        elif not is_whole and one_pass.is_same():
            self._checked_steps = 0
            return None
        if self._structure.changed():
            function = self._structure.classes.in_words()
            return self._in_words(
                function or "an object of the model, or an entry of `optimizer.state`, was replaced"
            )
        changes = [*self._unseen, *self._walk.quick_changes(everything=self._suspect)]
        moved = [part for part in changes if not part.is_under(self._unguarded.names - TABLES)]
        # The step reads what lies under names that it mentions; a check has to judge all other changes,
        # and those behind hooks unless they come in each step.
        are_read = [part for part in moved if part.is_read]
        self._checked_steps = self._checked_steps + 1 if are_read else 0
        is_worth_it = self._checked_steps <= _MAX_CHECKED_STEPS
        if (known := next((p for p in are_read if p.is_stale or not is_worth_it), None)) is not None:
            self._unseen = are_read  # until the graphs are dropped
            self._moved = known
            return Change.of(known, self.all_mentioned().users_code)
        self._unseen = []
        if moved:
            self.suspicions.add(moved)
        for part in moved:
            if part.node.is_large:  # else `Walk.renew` would find it once more
                part.node.parts = part.node.read()
        for label, read, was in self._reads:
            if not same(was, now := read()):
                change = Change(f"{label} changed{in_words(was, now)}")
                name = label.strip("`").rpartition(".")[2]
                change.location = first_line(name, False, self.all_mentioned().users_code)
                return change
        if has_new_hooks or self._suspect:
            self._suspect = False
            if difference := _first_difference(self._thorough, self._thorough_state()):
                return difference
        if not changes and one_pass.quick is self._walk.quick:
            one_pass.accept()
            self._one_pass = one_pass
        return None

    def add_to_signature(self) -> HostAttribute | None:
        """Make the attribute of the last change part of the signature, if its value recurs."""
        moved, self._moved = self._moved, None
        attribute = None if moved is None else self.recurring.add(moved)
        if attribute is not None:
            self._unseen = [other for other in self._unseen if not self.recurring.has(other)]
        return attribute

    def are_taken_before(self, attributes: Iterable[tuple[int, Any]]) -> bool:
        """True if graphs were captured with the values that attributes had before they counted."""
        walk, known = self._walk, self.recurring.attributes
        return walk is not None and all(
            form(was) == known[place].before for place in attributes for was in walk.recorded(*place)
        )

    def _in_words(self, otherwise: str) -> str:
        assert self._cheap is not None
        return (
            _first_difference(self._cheap, self._values.cheap())
            or _first_difference(self._thorough, self._thorough_state())
            or otherwise
        )

    def _thorough_state(self) -> _State:
        return {
            **{f"`{name}`": value for name, value in global_switches().items()},
            **described({"": self._model, **self._hidden}, self._loose()),
            **self._values.thorough(),
        }

    def _loose(self) -> dict[str, nn.Parameter]:
        """The parameters of optimizers that belong to no module."""
        models = (self._model, *self._hidden.values())
        own = {id(parameter) for model in models for parameter in model.parameters()}
        return {name: p for name, p in self._external.parameters().items() if id(p) not in own}


def _first_difference(before: _State, now: _State) -> str | None:
    for name in {**before, **now}:
        if name not in before:
            return f"{name} was set"
        if name not in now:
            return f"{name} was removed"
        if before[name] != now[name]:
            if name.startswith("the address of "):
                return f"{name} changed"
            was, is_now = (without_addresses(str(state[name])) for state in (before, now))
            return f"{name} changed from {was} to {is_now if is_now != was else 'another one'}"
    return None


def _name_of(namespace: Mapping[str, Any]) -> str:
    return str(namespace.get("__name__", "a module"))


def _is_users_alone(kind: type) -> bool:
    """True if a module class gets its attributes from user code alone, and from no layer of torch."""
    roots = [nn.Module, *(base for base in lineage(kind) if base.__name__ == "LightningModule")]
    allowed = {above for root in roots for above in lineage(root)}
    return is_users_class(kind) and all(
        is_users_class(base) or base in allowed for base in lineage(kind)
    )


def _properties_of(kind: type) -> set[str]:
    return {
        name
        for base in lineage(kind)
        for name, value in [*namespace_of(base).items()]
        if isinstance(value, property) and value.fset is not None
    }


def _has_items(kind: type) -> bool:
    """True for a container of torch, such as `nn.ParameterList`: its attributes are read by a key."""
    getter = getattr(kind, "__getitem__", None)
    return getattr(getter, "__module__", "") == container.__name__


def _rates_unless_mentioned(
    mentioned: MentionedNames, users: frozenset[str]
) -> Callable[[dict[Any, Any]], frozenset[str]]:
    """Omit the learning rate from a param group if the step mentions only its parameters."""
    texts = set().union(*mentioned.texts.values())
    wants_all = "lr" in texts or "params" not in texts or not users.isdisjoint(("items", "values"))

    def omitted(value: dict[Any, Any]) -> frozenset[str]:
        return frozenset() if wants_all or "params" not in value else frozenset({"lr", "initial_lr"})

    return omitted
