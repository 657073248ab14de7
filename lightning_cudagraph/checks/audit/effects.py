"""Effects of a step on Python objects, found by comparing them before and after a warm-up step.

A replay would not repeat such an effect. If captured code has it, the step is refused, and the object is
restored to its state before the capture. Effects of other code remain in replays: of hooks that run on
the host, and of methods that Lightning calls around the step.
"""

from __future__ import annotations

import _queue
import _thread
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.checks.audit.calls.host_calls import uses_refused
from lightning_cudagraph.checks.audit.host_lines import (
    first_line,
    is_set_elsewhere,
    line_that_changes,
    line_that_sets,
    nearest_line,
)
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.audit.step_audit import SetOption, effect_error
from lightning_cudagraph.checks.walk.host_objects import VALUES, is_users_module
from lightning_cudagraph.checks.walk.kinds import hides_state
from lightning_cudagraph.checks.walk.parts import PRIVATE, Moved
from lightning_cudagraph.checks.walk.scope import Root
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.compat.attributes import do_nothing
from lightning_cudagraph.compat.garbage import garbage_kept
from lightning_cudagraph.device.lines.user_lines import is_users
from lightning_cudagraph.device.refusals.first_refusal import is_of_receiver, located, refuse
from lightning_cudagraph.device.sentry.own_modes import not_compiled
from lightning_cudagraph.errors import AskedFor, CaptureError
from lightning_cudagraph.tensors.signatures import make_room
from lightning_cudagraph.tensors.static import BatchChange

# The start of paths in an optimizer: a step without the optimizer can still be captured.
_OF_OPTIMIZER = "the optimizer"
# What hands objects to other threads, or waits for them, is built on the functions and classes of these.
_OF_THREADS = (_thread, _queue)
_HANDOVERS = frozenset(
    kind
    for module in _OF_THREADS
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__module__ == module.__name__
)


def optimizer_roots(optimizers: Iterable[Optimizer], with_options: bool) -> Iterator[Root]:
    """Roots for what a step may change of optimizers: attributes, groups, and values in their state."""
    for optimizer in optimizers:
        of = f"{_OF_OPTIMIZER} `{type(optimizer).__qualname__}`"
        left_out = frozenset({"state", "param_groups", PRIVATE})
        yield Root(optimizer, "", of, left_out, True)
        for index, group in enumerate(optimizer.param_groups):
            left_out = frozenset({"params"} if with_options else {"params", *optimizer.defaults})
            yield Root(group, f"param_groups[{index}]", of, left_out, True)
        for index, entries in enumerate(optimizer.state.values()):
            if isinstance(entries, dict):
                tensors = (name for name, value in entries.items() if isinstance(value, Tensor))
                yield Root(entries, f"state[{index}]", of, frozenset(tensors), True)


class Effects:
    """The effects of the steps of one run on the user's objects.

    Args:
        walk: makes a walk over the objects that the steps can change, given the names they mention.
        is_carried: True for a module whose rebound attributes can be carried by the graph.

    Attributes:
        kind: batch signature and accumulation phase of the step at hand; steps of another kind may have
            other effects.
        mentioned: names that the watched steps mention.
        hands_over: True once a watched step may have handed objects to another thread.
    """

    def __init__(
        self,
        walk: Callable[[MentionedNames], Walk],
        harmless: frozenset[str],
        is_carried: Callable[[Any], bool],
    ) -> None:
        self._is_carried = is_carried
        self._walk = walk
        self._harmless = harmless
        self.mentioned = MentionedNames()
        self._found: dict[Hashable, dict[Hashable, list[Moved]]] = {}
        self._hiding: dict[int, Any] = {}  # by id: objects that steps use, and that hide their state
        self.kind: tuple[Hashable, Hashable] = (None, None)
        self.hands_over = False

    def forget(self) -> None:
        self._found.clear()
        self._hiding.clear()

    @contextmanager
    def watched(self, at_handover: Callable[[], object] = do_nothing) -> Iterator[None]:
        """Record the effects of the enclosed warm-up step, in which no garbage is collected.

        Only the last warm-up step of each kind counts: lazy initialisation is done before it.

        Args:
            at_handover: called before and after each call that may hand objects to another thread.
        """
        used: dict[int, Any] = {}

        def handed_over() -> None:
            self.hands_over = True
            at_handover()

        with garbage_kept():
            walk = self._walk(self.mentioned)
            with _code_noted(self.mentioned, walk, used, handed_over):
                yield
            changes = walk.changes()
        signature, phase = self.kind
        if signature not in self._found:
            make_room(self._found)  # in the order in which warm-ups are forgotten
        seen = {id(moved.node.owner) for moved in changes}
        self._hiding |= {key: value for key, value in used.items() if key not in seen}
        found = [moved for moved in changes if self._is_effect(moved)]
        self._found.setdefault(signature, {})[phase] = found

    @contextmanager
    def refused(self, captured: Callable[[], MentionedNames]) -> Iterator[None]:
        """Refuse the step of the enclosed capture if it has effects, and undo them."""
        signature, phase = self.kind
        found = self._found.get(signature, {}).get(phase, [])
        lasting = [moved for moved in found if moved.is_lasting]
        walk = self._walk(self.mentioned)  # of all: a step on another path may have other effects
        self._refuse(lasting, self.mentioned.users_code, walk)
        try:
            with uses_refused(lambda receiver: id(receiver) in self._hiding):
                yield
            self._refuse(found, captured().users_code, walk)
        except BaseException as error:
            self._put_back(walk)
            if isinstance(error, CaptureError) and error.location is None:
                self._refuse(found, captured().users_code, walk)  # an effect has a line
                codes = captured().users_code
                if isinstance(error.subject, BatchChange):
                    error.location = line_that_changes(error.subject.paths, codes)
                elif isinstance(error.subject, SetOption):
                    error.location = line_that_changes((error.subject.item,), codes)
                elif isinstance(error.subject, AskedFor):
                    located(error, first_line(error.subject.name, False, codes))
            raise
        self._put_back(walk)  # the graph may not be kept: a step on another path runs again, eagerly

    @contextmanager
    def begun_later(self) -> Iterator[None]:
        """Refuse effects of the enclosed eager step, which repeats a replay for a check, and undo them.

        The captured step had none, so they have begun since.
        """
        walk = self._walk(self.mentioned)
        found: list[Moved] = []
        try:
            with uses_refused(_hiding(walk)):
                yield
        finally:
            found += self._put_back(walk)
        for moved in found:
            refuse(effect_error(moved, line_that_sets(moved, self.mentioned.users_code)), moved.subject)

    def _put_back(self, walk: Walk) -> list[Moved]:
        """Undo the effects since a walk; returns them."""
        found = [moved for moved in walk.changes() if self._is_effect(moved)]
        for moved in found:
            moved.node.put_back(moved.node.parts)
        return found

    def _refuse(self, found: Sequence[Moved], captured: Sequence[CodeType], walk: Walk) -> None:
        for moved in found:
            if is_of_receiver(moved.holder):
                continue
            if is_set_elsewhere(moved, captured, self.mentioned.users_code) and all(
                moved.subject != inside.subject for inside in walk.changes()
            ):
                continue  # that code runs on the host in replays too, and not in the capture
            error = effect_error(moved, line_that_sets(moved, captured) or nearest_line(moved, captured))
            error.in_optimizer = moved.of.startswith(_OF_OPTIMIZER)
            refuse(error, moved.subject)

    def _is_effect(self, moved: Moved) -> bool:
        if moved.is_harmless(self._harmless):
            return False
        # Rebound attributes of modules are carried by the graph, or refused by the capture.
        return not (_is_of_tensors(moved.now) and self._is_carried(moved.holder))


def _is_of_tensors(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_of_tensors(part) or type(part) in VALUES for part in value)
    return isinstance(value, Tensor)


def _hiding(walk: Walk) -> Callable[[Any], bool]:
    """A function that is True for an object of the walk with state that the walk cannot see."""
    hiding: dict[type, bool] = {}

    def is_hiding(receiver: Any) -> bool:
        if not walk.watches(receiver):
            return False
        kind = type(receiver)
        if kind not in hiding:
            hiding[kind] = hides_state(receiver)
        return hiding[kind]

    return is_hiding


@contextmanager
def _code_noted(
    mentioned: MentionedNames, walk: Walk, used: dict[int, Any], at_handover: Callable[[], object]
) -> Iterator[None]:
    """Add user code that runs in this thread, and its names, to `mentioned`.

    Add receivers of C calls to `used` if the walk cannot see their state.
    """
    if sys.getprofile() is not None:  # the user's own profiler
        yield
        return
    seen: dict[int, Any] = {id(code): code for code in mentioned.users_code}
    is_hiding, watched = _hiding(walk), walk.owners.get
    modules = frozenset(map(id, _OF_THREADS))

    # Called twice for each call in the step, so it seldom calls a function of Python.
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("c_call", "c_return"):
            receiver = argument.__self__
            is_start = id(receiver) in modules and argument.__name__.startswith("start_")
            if is_start or type(receiver) in _HANDOVERS:
                at_handover()
            elif watched(id(receiver)) is receiver is not None and is_hiding(receiver):
                used[id(receiver)] = receiver
        elif event == "call" and id(code := frame.f_code) not in seen:
            seen[id(code)] = code  # holds it, so that no id is reused
            if is_users(code, frame.f_globals) and is_users_module(str(frame.f_globals.get("__name__"))):
                mentioned.note(frame)

    not_compiled(note, with_what_it_calls=True)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
