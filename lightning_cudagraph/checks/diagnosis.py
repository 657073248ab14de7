"""All that keeps a step from being captured, found by running it without a capture.

A capture ends at the first thing that a graph cannot hold. So when an error of it is about to be raised,
the step runs once more: eagerly, on a copy of the batch, under the checks of a capture, which gather
what they refuse. All that this run does to tensors and to watched Python objects is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_cudagraph.checks.audit.calls_without_tensors import in_one
from lightning_cudagraph.checks.guards import recurring
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.checks.walk.parts import Moved
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.cuda.capture_errors import clear_frames
from lightning_cudagraph.device.host_work import HostWork, host_work_of
from lightning_cudagraph.device.lines.user_lines import location_of
from lightning_cudagraph.device.refusals.consumers import LOGS, consumers
from lightning_cudagraph.device.refusals.first_refusal import Gathered, gathering
from lightning_cudagraph.device.refusals.grouping import grouped
from lightning_cudagraph.device.saved_memory import undone
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.tensors.host_values import in_words
from lightning_cudagraph.tensors.static import BatchChange, StaticBatch


class _ExaminedStep(Protocol):
    """The parts of a step that are needed here."""

    @property
    def batch(self) -> Any: ...

    def record(self, batch: Any, cut: Callable[[str, bool], None], timed: bool) -> Any: ...

    def transaction(self) -> AbstractContextManager[None]: ...

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]: ...

    def all_state(self, written: Iterable[Tensor]) -> dict[str, Tensor]: ...


class Diagnosis:
    """Search for all that keeps the steps of an engine from being captured.

    Args:
        looks_twice: look at the next step, too, and at what has changed between the two, before
            the error is raised.

    Attributes:
        error: the error to be raised after the next step; None if there is none.
    """

    def __init__(
        self,
        backend: Backend,
        carried: ReboundAttributes,
        guards: Guards,
        compiled: CompiledCode,
        looks_twice: bool,
    ) -> None:
        self._backend = backend
        self._carried = carried
        self._guards = guards
        self._compiled = compiled
        self._looks_twice = looks_twice
        self._found = Gathered()
        self._changes: Callable[[], list[Moved]] | None = None
        self.error: UnsupportedError | None = None

    def examine(self, step: _ExaminedStep, error: UnsupportedError) -> bool:
        """Add to an error what else is found in a step, and leave the step undone.

        Returns:
            True if the error is complete; False if the next step is wanted.
        """
        self._found.add(error)
        if self._changes is not None:
            self._carried.take_out()  # the static tensors, which are not the user's change
            for moved in self._changes():
                change = Change.of(moved, self._guards.all_mentioned().users_code)
                if not self._is_logged_alone(change, moved):
                    self._found.add(_moving(change, moved))
        ended_by = self._run_through(step)
        if self._looks_twice and self.error is None:
            self.error = error
            return False
        calls = self._guards.all_mentioned().calls_without_tensors
        error.add_findings(self._found.findings, ended_by, lambda found: grouped(in_one(found, calls)))
        self._found, self._changes, self.error = Gathered(), None, None
        return True

    def step_ended(self) -> None:
        """Record what the next step is compared with: what a step itself changes is found in it."""
        if self.error is not None and self._changes is None:
            self._changes = self._guards.changes_from_now()

    def _run_through(self, step: _ExaminedStep) -> str:
        """Run the step, and gather what a capture would refuse.

        Returns:
            What has ended it early, in words; empty if it came to its end.
        """
        dropped, added = step.parameters()
        gradients = [(parameter, parameter.grad) for parameter in (*dropped, *added)]

        def record() -> None:
            aliased = StaticBatch(step.batch).aliased()
            with aliased.watched():
                step.record(aliased.batch, _leave_out, False)
            aliased.refuse_changes()

        try:
            with ExitStack() as stack:
                stack.enter_context(gathering(self._found))
                stack.enter_context(self._guards.effects.refused(self._guards.all_mentioned))
                stack.enter_context(step.transaction())
                self._carried.place()
                stack.enter_context(self._backend.on_side_stream())
                stack.enter_context(undone(self._backend, step.all_state(()).values()))
                stack.enter_context(host_work_of([HostWork()]))
                for parameter in dropped:
                    parameter.grad = None
                stack.enter_context(self._backend.checked())
                if self._compiled.is_called:
                    self._compiled.left_out(record)
                else:
                    record()
        except UnsupportedError as error:
            self._found.add(error)
            clear_frames(error)
            return "" if isinstance(error.subject, BatchChange) else error.reason  # at the end of it
        except Exception as error:  # code that cannot go on behind what was refused
            where = location_of(error)
            clear_frames(error)
            return f"{type(error).__name__}: {in_words(str(error))}" + (f", at {where}" if where else "")
        finally:
            self._carried.take_out()
            for parameter, gradient in gradients:
                parameter.grad = gradient
        return ""

    def _is_logged_alone(self, change: Change, moved: Moved) -> bool:
        """True if a line only logs what has changed, and was found to do so."""
        where = change.location
        if where is None or not consumers(where, moved.attribute) <= LOGS:
            return False
        return self._found.has(where)


def _moving(change: Change, moved: Moved) -> UnsupportedError:
    when = "for each new value" if recurring.can_recur(moved) else "each time"
    error = CaptureError(
        f"Between two steps, {change}, which the step reads: a graph would be captured again {when}.",
        change.remedy,
        location=change.location,
    )
    error.subject = moved.subject
    return error


def _leave_out(hooks: str, drops: bool) -> None:
    """A graph break: its hooks run behind a replay, and not in a capture."""
