"""Checks in a step that raise an exception on the host: they pass in a capture, and are examined late.

A bool or a number that decides between going on and raising alone (`raising_branches.py`) need not come
to the host before the next op. In a capture the host gets a value with which the step goes on. The graph
keeps the value that each replay finds, and after the replay all of a step go to the host in one copy,
for which nothing waits. They are examined before later replays, and in each pause.

`torch.normal` makes such a check in its kernel, of which no mode sees the read. In a capture it becomes
the ops that it consists of, and the check one of these.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.device.host_work import LateValue, work_under_capture
from lightning_cudagraph.device.lines.raising_branches import (
    RaisingBranch,
    leaves_step,
    passes_on,
    raising_branch,
)
from lightning_cudagraph.device.lines.user_lines import is_in_between, is_of_libraries, user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.device.sentry.known import WRAPPERS
from lightning_cudagraph.errors import CheckError, Location

_ORDERS = frozenset(f"aten::{name}" for name in ("lt", "le", "gt", "ge"))
# The callers of captured steps.
_OUTSIDE = tuple(
    f"lightning_cudagraph.{name}"
    for name in ("capture.graph", "checks.diagnosis", "device.cuda.", "device.emulator.")
)
_LOOPS = ("lightning.pytorch.loops", "pytorch_lightning.loops")
_MOST_OPEN = 16
_ATEN = torch.ops.aten
# aten/src/ATen/native/DistributionTemplates.h, `normal_impl`: the smallest `std` is read on the host.
DRAWS = (_ATEN.normal.Tensor_Tensor, _ATEN.normal.float_Tensor)
_MUST_BE_TRUE = RaisingBranch((bool,), (), raises_if=False)
_CAUGHT = (
    "`torch.normal`, which checks `std` on the host, in code that catches its exception",
    "Draw `mean + std * torch.randn_like(std)`, which checks nothing.",
)


@dataclass(frozen=True)
class _Check:
    branch: RaisingBranch
    kind: type
    location: Location | None


@dataclass
class LateChecks:
    """The checks of replayed steps, which the host examines late.

    Once one has failed, its error is raised again and again: steps behind it are wrong, and a handler
    around a later step, of another purpose, must not hide it.

    Attributes:
        step: the number of replays before the next one, and numbers beside its batch, by name.
        are_left_out: replays are trials, of which nothing stays.
    """

    step: tuple[int, Mapping[str, int]] = 0, {}
    are_left_out: bool = False
    _open: deque[tuple[LateValue, list[_Check], tuple[int, Mapping[str, int]]]] = field(
        init=False, default_factory=deque
    )
    _failed: tuple[int, Mapping[str, int], Location | None] | None = field(init=False, default=None)

    def launched(self, values: Tensor, checks: list[_Check]) -> None:
        """Note a replay that has been launched, with the values that it will find."""
        if not self.are_left_out:
            self._open.append((LateValue(values), checks, self.step))

    def look(self) -> None:
        """Raise a `CheckError` if a check has failed, of those that the host has."""
        self._raise_if_failed()
        while self._open and (len(self._open) > _MOST_OPEN or self._open[0][0].is_known()):
            self._examine()

    def settle(self) -> None:
        """Wait for all replays, and raise a `CheckError` if a check of one has failed."""
        self._raise_if_failed()
        while self._open:
            self._examine()

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise CheckError(*self._failed)

    def _examine(self) -> None:
        values, checks, step = self._open.popleft()
        for value, check in zip(values.read().tolist(), checks, strict=True):
            if check.branch.raises(check.kind(value)):
                self._open.clear()
                self._failed = (*step, check.location)
                self._raise_if_failed()


class HostChecks:
    """The checks of one capture.

    Args:
        late: examines them after replays; None if the step runs for real, and is no capture.
    """

    def __init__(self, late: LateChecks | None) -> None:
        self._late = late
        self._values: list[Tensor] = []
        self._checks: list[_Check] = []
        self._ordered: ref[Tensor] | None = None

    def note(self, func: Any, result: Any) -> None:
        """Note the result of an op, as that of the last one."""
        self._ordered = ref(result) if func._schema.name in _ORDERS else None

    def passes(self, func: Any, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        """The value of a read that the host gets for a check; None if it is for anything else.

        Args:
            run: runs an op, and makes it part of the graph.
        """
        value: Tensor = args[0]
        if value.is_complex() or (frame := _asking()) is None:
            return None
        is_comparison = self._ordered is not None and self._ordered() is value
        branch = raising_branch(frame, is_comparison, _is_outside, _suppresses_nothing)
        if branch is None or _is_caught_around(frame):
            return None
        if self._late is None:
            return func(value)
        kind = float if value.is_floating_point() else bool if value.dtype is torch.bool else int
        if (passing := branch.passing(kind)) is None:
            return None
        self._values.append(run(torch.ops.aten.clone.default, (value,), {}))
        self._checks.append(_Check(branch, kind, user_location()))
        return bool(passing) if func._schema.name == "aten::is_nonzero" else passing

    def draw(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Tensor | None:
        """The result of one of `DRAWS` without a read; None if it cannot do without, or need not.

        Args:
            run: as for `passes`.
        """
        if self._late is None:
            return None
        frame = _asking()
        leaves = frame is not None and leaves_step(frame, _is_outside, _suppresses_nothing)
        if frame is None or not leaves or _is_caught_around(frame):
            forbid(*_CAUGHT, user_location())
            return None
        mean, std = args
        if std.numel():
            smallest = run(_ATEN.min.default, (std,), {})
            self._values.append(run(_ATEN.ge.Scalar, (smallest, 0), {}))
            self._checks.append(_Check(_MUST_BE_TRUE, bool, user_location()))
        like = mean if isinstance(mean, Tensor) else std
        made = {"dtype": like.dtype, "device": like.device}
        shape = torch.broadcast_shapes(like.shape, std.shape)
        found: Tensor = run(_ATEN.empty.memory_format, (shape,), made)
        if like is std:
            mean = run(_ATEN.full.default, ((), mean), made)
        run(_ATEN.normal_.default, (found,), kwargs)
        run(_ATEN.mul_.Tensor, (found, std), {})
        return run(_ATEN.add_.Tensor, (found, mean), {})  # type: ignore[no-any-return]

    def end(self) -> None:
        """Put all values into one tensor, at the end of a capture, and examine it after each launch."""
        late, checks = self._late, self._checks
        if late is None or not checks:
            return
        with torch.no_grad():
            values = torch.stack([each.reshape(()).double() for each in self._values])
        self._values = []
        work_under_capture().add(late.look, lambda: late.launched(values, checks))


def _asking() -> FrameType | None:
    """The frame whose read a mode sees."""
    callers = frames(sys._getframe(2))
    return next(
        (f for f in callers if not (is_in_between(f.f_code) or module_of(f).startswith(WRAPPERS))), None
    )


def _is_outside(frame: FrameType) -> bool:
    return module_of(frame).startswith(_OUTSIDE) and not is_in_between(frame.f_code)


def _is_caught_around(frame: FrameType) -> bool:
    """True if user code between Lightning's loop and the step may catch what a check raises.

    This is `optimizer_step` of the module. A replay raises it some steps later, or behind the loop.
    """
    around = [*dropwhile(lambda caller: not _is_outside(caller), frames(frame))]
    loop = next((n for n, each in enumerate(around) if module_of(each).startswith(_LOOPS)), 0)
    users = (f for f in around[:loop] if not (is_in_between(f.f_code) or _suppresses_nothing(f)))
    return not all(map(passes_on, users))


def _suppresses_nothing(frame: FrameType) -> bool:
    """True for frames of torch, Lightning and this package, in which no `with` ends an exception."""
    path = frame.f_code.co_filename
    return path.startswith(PACKAGE_DIR) or is_of_libraries(path)
