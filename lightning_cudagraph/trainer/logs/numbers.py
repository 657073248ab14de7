"""Checks that logged Python numbers, values and batch sizes, are constant.

A graph bakes them in. So a number that changes between warm-up steps is refused at the capture, and one
that differs in the eager step of a verified replay is refused then. A change of a guarded source of the
number causes a re-capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid, found_at
from lightning_cudagraph.errors import see

_What = tuple[str, int]  # a description, and an index among numbers of the same description
# A bound on memory, for loaders that yield new shapes in each batch.
_MAX_KINDS = 64
_MAX_STEPS = 16


@dataclass
class _Seen:
    """A number over the pairs of consecutive steps of one warm-up, and in how many it changed."""

    last: Any
    pairs: int = 0
    moves: int = 0
    other: Any = None  # the one before it changed

    def add(self, value: Any) -> None:
        self.pairs += 1
        if not _same(self.last, value):
            self.moves += 1
            self.other = self.last
        self.last = value

    @property
    def changes(self) -> bool:
        """True if it keeps changing. A single change may come with a new epoch, which guards handle."""
        return self.moves > 1 or 0 < self.moves == self.pairs


class LoggedNumbers:
    """The logged numbers of each step; a number that changes is refused."""

    def __init__(self) -> None:
        self._warm_up: dict[Hashable, deque[tuple[Hashable, dict[_What, Any]]]] = {}
        self._captured: dict[Hashable, dict[_What, Any]] = {}
        self._step: dict[_What, Any] = {}
        self._check: Callable[[_What, Any], None] = _no_check
        self._kind: Hashable = None

    def begin_eager(self) -> None:
        self._step = {}
        self._check = _no_check

    def warmed_up(self, kind: Hashable) -> None:
        """Count the last eager step as a warm-up step of this kind."""
        if kind not in self._warm_up and len(self._warm_up) >= _MAX_KINDS:
            self._warm_up.clear()
        self._warm_up.setdefault(kind, deque(maxlen=_MAX_STEPS)).append((kind, self._step))

    def begin_capture(self, kind: Hashable) -> None:
        self._kind = kind
        seen: dict[_What, _Seen] = {}
        # Since a capture has read another host value, steps of one kind may be of several.
        steps = [step for steps in self._warm_up.values() for of, step in steps if of == kind]
        for step in steps:
            for what, value in step.items():
                if what in seen:
                    seen[what].add(value)
                else:
                    seen[what] = _Seen(value)

        def check(what: _What, value: Any) -> None:
            if what in seen:
                before = seen[what].last
                if _same(before, value):
                    before = seen[what].other
                seen[what].add(value)
                if seen[what].changes:
                    _refuse(what, before, value)

        self._step = {}
        self._check = check

    def captured(self, step_kind: Hashable) -> None:
        """Remember the numbers of the captured step, and forget those of its warm-up."""
        self._captured[step_kind] = self._step
        self._warm_up.pop(self._kind, None)

    def begin_rehearsal(self, step_kind: Hashable) -> None:
        """Begin an eager run of a captured step."""
        captured = self._captured.get(step_kind, {})

        def check(what: _What, value: Any) -> None:
            if what in captured and not _same(captured[what], value):
                _refuse(what, captured[what], value)

        self._step = {}
        self._check = check

    def note(self, words: str, value: Any) -> None:
        """Add a number of the step under way; one that changes is refused with the user's line."""
        which = 0
        while (words, which) in self._step:
            which += 1
        self._step[words, which] = value
        self._check((words, which), value)


def _no_check(what: _What, value: Any) -> None:
    pass


def _same(one: Any, other: Any) -> bool:
    # Compared as a tensor would hold them: NaN equals NaN, and 0.0 differs from -0.0.
    return repr(float(one)) == repr(float(other))


def _refuse(what: _What, before: Any, now: Any) -> None:
    where = user_location()
    if found_at(where):
        return  # the read of the number has been refused
    forbid(
        f"{what[0]} that changes ({before!r} before, {now!r} now), and would stay what it is in this"
        " step",
        "If the step computes it from tensors, log the tensor. Else log the number in"
        " `on_train_batch_start`; a duration in `on_train_batch_end`, measured from"
        " `on_train_batch_start` on. A tensor that the step makes of it would stay what it is too."
        + see("logged_values"),
        where,
        subject=what,
    )
