"""Refusals in a step: raised, and raised again if the step catches them; or gathered.

A step may catch exceptions and go on, or raise others instead. The refused op has then not run, and a
graph without it would be another step. So the first refusal is raised again at the end.

Where all that a graph cannot hold is wanted, a step runs once more without a capture. What is refused in
it is gathered then, and the step goes on, for real.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.device.refusals.grouping import grouped
from lightning_cudagraph.errors import CaptureError, Finding, Location, UnsupportedError
from lightning_cudagraph.tensors.host_values import names_a_class

_NOWHERE = ", in code called by torch, with no line of yours in it"


@dataclass
class FirstRefusal:
    """The first refusal in the step that is running."""

    first: UnsupportedError | None = None


class Gathered:
    """The refusals in one step, or in several runs of it, in order, once each."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.after_backward = False  # the backward pass has ended
        self.is_quiet = False
        self._places: dict[Hashable, int] = {}
        self.receivers: list[Any] = []  # of methods that were refused, and have run

    def add(self, error: UnsupportedError) -> None:
        """Add the finding of an error, if it is not known; with a line, it replaces one without."""
        if self.is_quiet:
            return
        key = error.findings[0].key if error.subject is None else error.subject
        first, *others = error.findings
        finding = replace(first, in_optimizer=error.in_optimizer or self.after_backward)
        if key not in self._places:
            self._places[key] = len(self.findings)
            self.findings += [finding, *others]
        elif first.location and self.findings[self._places[key]].location is None:
            self.findings[self._places[key]] = finding

    def has(self, where: Location) -> bool:
        """True if something on the same line of the user's has been found."""
        lines = [finding.location for finding in self.findings if finding.location is not None]
        return (where.path, where.line) in [(at.path, at.line) for at in lines]


_under_way: list[FirstRefusal] = []
_gathered: OfThread[Gathered | None] = OfThread(None)


def is_gathering() -> bool:
    """True if refusals in this thread are gathered instead of raised."""
    return _gathered.value is not None


def refuse(error: UnsupportedError, subject: Hashable = None) -> None:
    """Raise an error; or, where refusals are gathered, add it to them and return.

    Args:
        subject: what is found by several checks, or in several runs, each with other words; None for
            what the text of the error tells from all others.
    """
    error.subject = subject
    if _gathered.value is None:
        raise refused(error)
    _gathered.value.add(error)


def forbid(what: str, remedy: str, location: Location | None, subject: Hashable = None) -> None:
    """Refuse something in a step that a CUDA graph cannot hold; see `refuse`."""
    refuse(forbidden(what, remedy, location), subject)


def forbidden(what: str, remedy: str, location: Location | None) -> CaptureError:
    """The error for something in a step that a CUDA graph cannot hold."""
    where = "" if location else _NOWHERE
    return CaptureError(f"A CUDA graph cannot hold {what}{where}.", remedy, location=location)


def located(error: UnsupportedError, location: Location | None) -> None:
    """Give an error that has no line the one that was found for it, if there is one."""
    if location is not None:
        error.location = location
        error.what = error.what.replace(_NOWHERE, "")


def refused(error: UnsupportedError) -> UnsupportedError:
    """Record an error that is about to be raised, if it is the innermost step's first."""
    if _gathered.value is not None:
        _gathered.value.add(error)
    elif _under_way and _under_way[-1].first is None:
        _under_way[-1].first = error
    return error


def note_receiver(receiver: Any) -> None:
    """Note, where refusals are gathered, the object of a method that has just been refused."""
    if _gathered.value is not None:
        _gathered.value.receivers.append(receiver)


def is_of_receiver(holder: Any) -> bool:
    """True for an object of a refused method, or a param group of one that it works on."""
    receivers = [] if _gathered.value is None else _gathered.value.receivers
    groups = (getattr(getattr(each, "optimizer", None), "param_groups", ()) for each in receivers)
    return any(holder is each for each in (*receivers, *chain.from_iterable(groups)))


@contextmanager
def gathering(found: Gathered) -> Iterator[None]:
    """Gather what this thread refuses inside the `with` block."""
    before, _gathered.value = _gathered.value, found
    try:
        yield
    finally:
        _gathered.value = before
        found.after_backward = False


@contextmanager
def going_on() -> Iterator[None]:
    """Go on after the `with` block if it is refused while refusals are gathered."""
    try:
        yield
    except UnsupportedError as error:
        if not is_gathering():
            raise
        refuse(error, error.subject)


@contextmanager
def one_finding() -> Iterator[None]:
    """Refuse nothing inside the `with` block, which is a part of what has just been gathered."""
    found = _gathered.value
    if found is None or found.is_quiet:
        yield
        return
    with setting(found, is_quiet=True):
        yield


def refuse_together(*checks: Callable[[], object]) -> None:
    """Make all checks, and raise the first error of one, with the findings of the others."""
    errors = [error for check in checks if (error := _error_of(check)) is not None]
    if errors:
        found = (finding for error in errors for finding in error.findings)
        errors[0].add_findings(found, group=grouped)
        raise errors[0]


def _error_of(check: Callable[[], object]) -> UnsupportedError | None:
    try:
        check()
    except UnsupportedError as error:
        return error
    return None


def backward_ended() -> None:
    """Mark all that is gathered from now on as after the backward pass."""
    if _gathered.value is not None:
        _gathered.value.after_backward = True


@contextmanager
def first_refusal_kept() -> Iterator[FirstRefusal]:
    """Record refusals inside the `with` block, and raise the first at the end if code has caught it."""
    noted = FirstRefusal()
    _under_way.append(noted)
    try:
        yield noted
    except Exception as error:
        first, noted.first = noted.first, None  # its traceback refers to frames that refer to `noted`
        if first is not None and first is not error:
            # A read that is refused twice; or C code that got no value, and complains of its type.
            follows = isinstance(error, UnsupportedError) or names_a_class(str(error))
            raise first from (None if follows else error)
        raise
    finally:
        _under_way.pop()
    if noted.first is not None:
        raise noted.first
