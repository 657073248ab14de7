"""What steps change on the host, found in warm-up steps, which are real ones.

An object that a warm-up step has left other than it found it is changed by each step, and a replay would
not change it. So such a step is refused before it is captured: before its Python has run a second time
for the same batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.capture.audit.frozen import effect_error
from lightning_cudagraph.capture.audit.host_lines import line_that_sets
from lightning_cudagraph.capture.audit.host_objects import VALUES, is_users_module
from lightning_cudagraph.capture.audit.host_state import Change
from lightning_cudagraph.capture.audit.mentions import MentionedNames
from lightning_cudagraph.capture.audit.walker import Moved, Root, Walk
from lightning_cudagraph.capture.sentry import is_users

__all__ = ["Effects"]


class Effects:
    """The effects of the steps of one run on objects of the user's.

    Args:
        roots: where to look for them, given what the steps mention.
        stops: classes whose objects are not entered.
        harmless: paths at which anything may change.
    """

    def __init__(
        self,
        roots: Callable[[MentionedNames], list[Root]],
        stops: tuple[type, ...],
        harmless: frozenset[str],
    ) -> None:
        self._roots = roots
        self._stops = stops
        self._harmless = harmless
        self._mentioned = MentionedNames()
        self._found: list[Moved] = []

    def forget(self) -> None:
        """Forget what was found. Only the last warm-up step counts: what is lazy is made before it."""
        self._found = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a warm-up step: find what it changes."""
        self.forget()
        with self.watched_part():
            yield

    @contextmanager
    def watched_part(self) -> Iterator[None]:
        """Around a part of a warm-up step, where hooks that are not captured run between the parts."""
        walk = Walk(self._roots(self._mentioned), self._stops)
        with _code_noted(self._mentioned):
            yield
        self._found += [moved for moved in walk.changes(everything=True) if self._is_effect(moved)]

    def refuse(self) -> None:
        """Refuse a step with effects.

        Raises:
            CaptureError: naming the first effect, with the user's line.
        """
        if not self._found:
            return
        moved = self._found[0]
        change = Change(moved.path, moved.of, moved.holder, draws=False)
        raise effect_error(change, line_that_sets(change, self._mentioned.users_code))

    def _is_effect(self, moved: Moved) -> bool:
        if moved.path in self._harmless:
            return False
        # A tensor in an attribute of a module: such attributes are carried over from step to step in the
        # graph, or refused by the capture.
        return not (isinstance(moved.holder, nn.Module) and _is_of_tensors(moved.now))


def _is_of_tensors(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_of_tensors(part) or type(part) in VALUES for part in value)
    return isinstance(value, Tensor)


@contextmanager
def _code_noted(mentioned: MentionedNames) -> Iterator[None]:
    """Note the code of the user's that runs in this thread, and what it mentions."""
    if sys.getprofile() is not None:  # a profiler of the user's
        yield
        return
    seen: dict[int, Any] = {id(code): code for code in mentioned.users_code}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in seen:
            seen[id(code)] = code  # keeps it, so that no number comes twice
            if is_users(code, frame.f_globals) and is_users_module(str(frame.f_globals.get("__name__"))):
                mentioned.note(frame)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
