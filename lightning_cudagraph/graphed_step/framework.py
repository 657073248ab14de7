"""The interface to the training framework around a captured function; the default is a plain loop.

A framework wraps optimizers, counts their steps, has its own gradient scaler, and offers methods that a
graph cannot hold. `trainer/manual/frameworks.py` implements the interface for Lightning and Fabric.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.tensors.host_values import HostReads

_STEP_OUTSIDE = "Call the scheduler after the step, outside of it."
_WITH_SCALER = "Pass the scaler: `GraphedStep(step, modules=..., optimizers=..., scaler=scaler)`."


class PlainLoop:
    """A training loop without a framework.

    Attributes:
        around: objects of the framework, by name, that the step can read; guards compare their values.
        unwatched: attributes that guards ignore, because they belong to the framework.
        host_reads: what captured steps read of host values; None if all are part of the signature.
    """

    around: Mapping[str, Any] = {}
    unwatched: frozenset[str] = frozenset(vars(nn.Module()))
    host_reads: HostReads | None = None

    def optimizer_in(self, optimizer: Any) -> Any:
        """Return the torch optimizer inside an optimizer of the framework."""
        return optimizer

    def scaler(self) -> GradScaler | None:
        """Return the gradient scaler of the framework, if the step uses it."""
        return None

    def check(self) -> None:
        """Raise `UnsupportedError` if no step in this framework setup can be captured, as it is now."""

    def parts(self) -> list[object]:
        """Return the objects of the framework that steps use; others invalidate graphs."""
        return []

    def callees(self) -> list[object]:
        """Return the objects of the framework with methods that steps call."""
        return []

    def rules(self, harmless: frozenset[str], scaler: GradScaler | None) -> HostRules:
        return HostRules(
            moving=moving_rates(),
            refused={**scheduler_steps(), **scaler_calls(scaler)},
            harmless=harmless,
        )

    def stays_on_host(self, module: Any) -> bool:
        """True if a module is called on the host only, such as a metric."""
        return False

    @contextmanager
    def noted(self, notes: list[Callable[[], object]]) -> Iterator[None]:
        """Defer the framework's host work in a step: `notes` receives the calls for after replays."""
        yield

    @contextmanager
    def reads(self, mentioned: MentionedNames) -> Iterator[None]:
        """Add reads from modules that are called on the host only to `mentioned`."""
        yield


# Detectors of frameworks, given the owner of the function, its modules and its optimizers.
FRAMEWORKS: list[Callable[[list[Any]], PlainLoop | None]] = []


def framework_of(owners: list[Any]) -> PlainLoop:
    """Detect the framework of the owner of a bound method, of modules, or of optimizers."""
    return next((found for known in FRAMEWORKS if (found := known(owners)) is not None), PlainLoop())


def moving_rates(schedulers: Iterable[type] = (LRScheduler,)) -> dict[CodeType, str]:
    """Return the getters of classes of schedulers: their values change from step to step."""
    return {
        method.__code__: f"LRScheduler.{name}"
        for name in ("get_last_lr", "get_lr")
        for scheduler in schedulers
        if isinstance(method := getattr(scheduler, name, None), FunctionType)
    }


def scheduler_steps() -> dict[CodeType, tuple[str, str]]:
    """Return the `step` methods of torch's schedulers: a replay would not call them."""
    found: dict[CodeType, tuple[str, str]] = {}
    for name, cls in vars(lr_scheduler).items():
        if inspect.isclass(cls) and isinstance(step := vars(cls).get("step"), FunctionType):
            found[inspect.unwrap(step).__code__] = (f"{name}.step", _STEP_OUTSIDE)
    return found


def scaler_calls(scaler: GradScaler | None) -> dict[CodeType, tuple[str, str]]:
    """Return the methods of `GradScaler` if the step was given no scaler: they are refused."""
    if scaler is not None:
        return {}
    return {
        inspect.unwrap(getattr(GradScaler, name)).__code__: (f"GradScaler.{name}", _WITH_SCALER)
        for name in ("scale", "unscale_", "step", "update")
    }


def optimizer_inside(optimizer: Any) -> Any:
    """Unwrap the torch optimizer that a wrapper keeps as `_optimizer`."""
    while isinstance(inner := vars(optimizer).get("_optimizer"), Optimizer):
        optimizer = inner
    return optimizer
