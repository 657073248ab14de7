"""Calls in a step that are given no tensors, such as of an environment: what is in one goes with it.

All that a graph cannot hold in such a call is one finding, if much of it are effects on Python objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType

from torch import Tensor

from lightning_cudagraph.compat.frames import frames
from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.lines.user_lines import (
    is_in_between,
    is_installed,
    is_users,
    location_in,
)
from lightning_cudagraph.errors import Finding, Location, first_of, see

# Lines, and those with effects; a few are changed one by one.
_FEWEST, _FEWEST_EFFECTS = 3, 2
_MOST_NAMED = 5
_NAME = re.compile(r"`[^`]*`")
# Of training alone.
MODULES_ALONE = (
    " Or let it be, and capture modules alone: `CUDAGraphCallback(modules=[...])`, with their names."
)
_REMEDY = (
    "If it needs nothing that the step computes, call it in a hook that runs on the host at every step,"
    f" such as `on_train_batch_start`, and log there what it returns.{MODULES_ALONE}"
    f"{see('environments')}"
)


@dataclass(frozen=True)
class CallWithoutTensors:
    """The line of a call, and the name of the function."""

    location: Location
    function: str


@dataclass
class CallsWithoutTensors:
    """The outermost calls without tensors in which user code ran first."""

    # By file and function.
    _calls: dict[tuple[str, str], CallWithoutTensors] = field(default_factory=dict)
    _without_tensors: set[int] = field(default_factory=set)  # ids of code

    def note(self, frame: FrameType) -> None:
        """Note the call that begins with a frame of user code, which runs for the first time."""
        code = frame.f_code
        if not code.co_name.startswith("<") and not _has_tensors(frame):
            self._without_tensors.add(id(code))
        for inner, outer in pairwise(_users_frames(frame)):
            if id(inner.f_code) in self._without_tensors:
                line = location_in(outer.f_code, outer.f_lineno)
                self._calls[_key(location_in(code, 0))] = CallWithoutTensors(line, inner.f_code.co_name)

    def add(self, others: CallsWithoutTensors) -> None:
        self._calls |= others._calls

    def of(self, finding: Finding) -> CallWithoutTensors | None:
        """The call in which the line of a finding ran."""
        if finding.location is None or finding.in_optimizer:
            return None
        return self._calls.get(_key(finding.location))


def _key(at: Location) -> tuple[str, str]:
    return at.path, at.function


def _users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's own files in a step, outwards."""
    for caller in frames(frame):
        code = caller.f_code
        if code.co_filename.startswith(PACKAGE_DIR) and not is_in_between(code):
            return
        if is_users(code, caller.f_globals) and not is_installed(code.co_filename):
            yield caller


def _has_tensors(frame: FrameType) -> bool:
    """True for a function that is given a tensor, by an argument or a closure."""
    # Of a call that begins there are no other variables. Those of one under way would live longer.
    return any(isinstance(leaf, Tensor) for leaf in tree_iter(dict(frame.f_locals)))


def in_one(findings: Iterable[Finding], calls: CallsWithoutTensors) -> list[Finding]:
    """Put all findings in a call without tensors into one, if many of them are effects."""
    findings = [*findings]
    inside: dict[CallWithoutTensors, list[Finding]] = {}
    for each in findings:
        if (call := calls.of(each)) is not None:
            inside.setdefault(call, []).append(each)
    found = {id(each): each for each in findings}
    for call, group in inside.items():
        lines = {each.place for each in group}
        effects = {each.place for each in group if each.is_effect}
        if len(lines) >= _FEWEST and len(effects) >= _FEWEST_EFFECTS:
            first, *others = group
            found[id(first)] = _as_one(call, group)
            for each in others:
                del found[id(each)]
    return [*found.values()]


def _as_one(call: CallWithoutTensors, group: list[Finding]) -> Finding:
    names = [*dict.fromkeys(name for each in group for name in _NAME.findall(each.what)[:1])]
    return Finding(
        f"The training step calls `{call.function}`, which uses or changes what no graph can hold:"
        f" {first_of(names, _MOST_NAMED)}.",
        _REMEDY,
        call.location,
        is_effect=True,
    )
