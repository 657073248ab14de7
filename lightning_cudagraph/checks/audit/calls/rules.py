"""The rules of the audit for a framework's functions, and the errors for calls that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from lightning_cudagraph.checks.audit.read_remedies import Remedy, is_logged
from lightning_cudagraph.device.refusals.consumers import flows_on
from lightning_cudagraph.errors import CaptureError, Location, see


@dataclass(frozen=True)
class HostRules:
    """The meaning of a training framework's functions for the audit.

    Attributes:
        moving: getters of values that move from step to step, with their public names.
        seldom: getters of values that move seldom, with their public names and a function to read them.
        passing_on: files with functions that act for their callers.
        records: True for an object that writes records, as a logger does.
        stays_on_host: True for a module that is only called on the host, such as a metric.
        hands_out: True for a framework object with getters of values that move seldom.
        refused: functions with effects that a replay would not repeat, with their public names and a
            remedy.
        other_in_captures: C functions that give another result during a capture; likewise.
        stops: classes that are not entered, because the framework changes their objects in every step.
        remedies: what to do instead of a read, with the page of docs/recipes, by its public name, where
            there is better advice than for all.
        noted: public names of getters with reads that are noted elsewhere.
    """

    moving: Mapping[CodeType, str] = field(default_factory=dict)
    seldom: Mapping[CodeType, tuple[str, Callable[[], Any]]] = field(default_factory=dict)
    effects: Mapping[CodeType, str] = field(default_factory=dict)
    passing_on: frozenset[str] = frozenset()
    records: Callable[[Any], bool] = lambda value: False
    stays_on_host: Callable[[Any], bool] = lambda module: False
    harmless: frozenset[str] = frozenset()
    hands_out: Callable[[Any], bool] = lambda value: False
    refused: Mapping[CodeType, tuple[str, str]] = field(default_factory=dict)
    other_in_captures: Mapping[Any, tuple[str, str]] = field(default_factory=dict)
    stops: tuple[type, ...] = ()
    remedies: Mapping[str, Remedy] = field(default_factory=dict)
    noted: frozenset[str] = frozenset()


def allowance(name: str, also: str = "") -> str:
    """The end of a remedy: the argument that allows `name`; `also` is a further condition."""
    return (
        f" If nothing depends on it, no hook or callback either{also}, allow it:"
        f' `CUDAGraphCallback(harmless=["{name}"])`.'
    )


def frozen_read(name: str, where: Location | None, remedy: Remedy, computed: str = "") -> CaptureError:
    """The error for a read of a value that would be frozen, or of a number computed from it."""
    what = f"`{computed}`, computed from `{name}`" if computed else f"`{name}`"
    may_be_allowed = remedy.may_be_allowed and not is_logged(where)
    if where is not None and flows_on(where):
        may_be_allowed = False
    return CaptureError(
        f"A CUDA graph cannot hold a read of {what}, which would stay what it is in this step.",
        remedy.text + allowance(short_name(name)) * may_be_allowed + see(remedy.recipe),
        location=where,
    )


def lost_effect(name: str, where: Location | None, remedy: str, recipe: str = "") -> CaptureError:
    """The error for an effect that a replay would not repeat."""
    error = CaptureError(
        f"A CUDA graph cannot hold a use of `{name}`, which a replay would not repeat.",
        remedy + allowance(name) + (recipe and see(recipe)),
        location=where,
    )
    error.is_effect = True
    return error


def short_name(name: str) -> str:
    """The name without its owner, as users may write it."""
    return name.removeprefix("self.").removeprefix("trainer.")
