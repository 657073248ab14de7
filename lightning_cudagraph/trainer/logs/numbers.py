"""Python numbers among what a step logs: values, and batch sizes.

A graph holds them as constants. So they have to be constant: what changes from one step of the warm-up
to the next is refused at the capture, and what is another number in the eager step of a verified replay
is refused then. A number that comes from something that is guarded is captured again when that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from lightning_cudagraph.device.sentry.sentry import forbid, user_location

__all__ = ["LoggedNumbers"]

_What = tuple[str, int]  # in the user's words, and which of several that are called so
# A loader whose batches never look alike would otherwise fill the memory with them.
_MAX_KINDS = 64


@dataclass
class _Seen:
    """A number in the steps of one warm-up.

    Attributes:
        last: the number in the last of them.
        pairs: how many pairs of neighbouring steps there were.
        moves: in how many of these it changed.
    """

    last: Any
    pairs: int = 0
    moves: int = 0

    def add(self, value: Any) -> None:
        self.pairs += 1
        self.moves += not _same(self.last, value)
        self.last = value

    @property
    def changes(self) -> bool:
        """Tell if it goes on changing; once may be because of a new epoch, and guards see to that."""
        return self.moves > 1 or 0 < self.moves == self.pairs


class LoggedNumbers:
    """The numbers of each step; those that change are refused."""

    def __init__(self) -> None:
        self._warm_up: dict[Hashable, dict[_What, _Seen]] = {}
        self._captured: dict[Hashable, dict[_What, Any]] = {}
        self._step: dict[_What, Any] = {}
        self._check: Callable[[_What, Any], None] = _no_check
        self._kind: Hashable = None

    def begin_eager(self) -> None:
        """An eager step begins."""
        self._step = {}
        self._check = _no_check

    def warmed_up(self, kind: Hashable) -> None:
        """The eager step just done was one of the warm-up, of this kind of batch."""
        if kind not in self._warm_up and len(self._warm_up) >= _MAX_KINDS:
            self._warm_up.clear()
        seen = self._warm_up.setdefault(kind, {})
        for what, value in self._step.items():
            if what in seen:
                seen[what].add(value)
            else:
                seen[what] = _Seen(value)

    def begin_capture(self, kind: Hashable) -> None:
        """A step of this kind begins in a capture."""
        self._kind = kind
        seen = self._warm_up.get(kind, {})

        def check(what: _What, value: Any) -> None:
            if what in seen:
                before = seen[what].last
                seen[what].add(value)
                if seen[what].changes:
                    _refuse(what, before, value)

        self._step = {}
        self._check = check

    def captured(self, place: Hashable) -> None:
        """The step has been captured; its warm-up is over, and another one may come."""
        self._captured[place] = self._step
        self._warm_up.pop(self._kind, None)

    def begin_rehearsal(self, place: Hashable) -> None:
        """A captured step begins once more, eagerly."""
        captured = self._captured.get(place, {})

        def check(what: _What, value: Any) -> None:
            if what in captured and not _same(captured[what], value):
                _refuse(what, captured[what], value)

        self._step = {}
        self._check = check

    def note(self, words: str, value: Any) -> None:
        """Take a number of the step that is under way.

        Args:
            words: what it is to the user.
            value: the number.

        Raises:
            CaptureError: if it changes, naming the user's line.
        """
        which = 0
        while (words, which) in self._step:
            which += 1
        self._step[words, which] = value
        self._check((words, which), value)


def _no_check(what: _What, value: Any) -> None:
    pass


def _same(one: Any, other: Any) -> bool:
    # By what a tensor made of it would hold: one NaN is like another, and nought has a sign.
    return repr(float(one)) == repr(float(other))


def _refuse(what: _What, before: Any, now: Any) -> None:
    forbid(
        f"{what[0]} that changes ({before!r} before, {now!r} now), and would stay what it is in this"
        " step",
        "Log the number in `on_train_batch_end`, which runs on the host after every step; a tensor that"
        " the step makes of it would stay what it is too.",
        user_location(),
    )
