"""What surrounds a captured function: a plain loop, or the code of a training framework.

A framework wraps optimizers, counts their steps, has a gradient scaler of its own, and offers methods
that a graph cannot hold. `GraphedStep` asks what is declared here; `manual.py` answers for Lightning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lightning_cudagraph.checks.audit.host_calls import HostRules
from lightning_cudagraph.checks.audit.mentions import MentionedNames

__all__ = ["SURROUNDINGS", "PlainLoop", "surroundings_of"]

_STEP_OUTSIDE = "Call the scheduler after the step, outside of it."
_WITH_SCALER = "Pass the scaler: `GraphedStep(step, modules=..., optimizers=..., scaler=scaler)`."


class PlainLoop:
    """A training loop without a framework.

    Attributes:
        around: objects of the framework by name, whose numbers and switches the step can read.
        unwatched: names of attributes that are the framework's own affair.
    """

    around: Mapping[str, Any] = {}
    unwatched: frozenset[str] = frozenset(vars(nn.Module()))

    def optimizer_in(self, optimizer: Any) -> Any:
        """The optimizer of torch's in what the user calls one."""
        return optimizer

    def scaler(self) -> GradScaler | None:
        """The gradient scaler of the framework, if it is used in the step."""
        return None

    def check(self) -> None:
        """Refuse what no captured function of this framework can hold.

        Raises:
            UnsupportedError: saying what.
        """

    def rules(self, harmless: frozenset[str], scaler: GradScaler | None) -> HostRules:
        """What the names of the framework mean to the audit."""
        return HostRules(
            moving=moving_rates(),
            refused={**scheduler_steps(), **scaler_calls(scaler)},
            harmless=harmless,
        )

    def stays_on_host(self, module: Any) -> bool:
        """Whether a module is only called on the host, such as a metric."""
        return False

    @contextmanager
    def noted(self, notes: list[Callable[[], object]]) -> Iterator[None]:
        """Inside, what the framework does on the host in each step is noted, instead of being done.

        Args:
            notes: are added to; called after every replay, in this order, they do it.
        """
        yield

    @contextmanager
    def reads(self, mentioned: MentionedNames) -> Iterator[None]:
        """Inside, what the step reads of modules that are only called on the host is noted.

        Args:
            mentioned: is told of it.
        """
        yield


# Each says of a function's owner and its modules whether they are its framework's.
SURROUNDINGS: list[Callable[[list[Any]], PlainLoop | None]] = []


def surroundings_of(owners: list[Any]) -> PlainLoop:
    """The surroundings of a function.

    Args:
        owners: the object that the function is a method of, the modules, and the optimizers.
    """
    return next((found for known in SURROUNDINGS if (found := known(owners)) is not None), PlainLoop())


def moving_rates() -> dict[CodeType, str]:
    """Getters of schedulers, whose values move from step to step."""
    return {
        method.__code__: f"LRScheduler.{name}"
        for name in ("get_last_lr", "get_lr")
        if isinstance(method := getattr(LRScheduler, name, None), FunctionType)
    }


def scheduler_steps() -> dict[CodeType, tuple[str, str]]:
    """The steps of torch's schedulers, which a replay would not take."""
    found: dict[CodeType, tuple[str, str]] = {}
    for name, cls in vars(lr_scheduler).items():
        if inspect.isclass(cls) and isinstance(step := vars(cls).get("step"), FunctionType):
            found[inspect.unwrap(step).__code__] = (f"{name}.step", _STEP_OUTSIDE)
    return found


def scaler_calls(scaler: GradScaler | None) -> dict[CodeType, tuple[str, str]]:
    """The methods of a gradient scaler that the step was not given."""
    if scaler is not None:
        return {}
    return {
        inspect.unwrap(getattr(GradScaler, name)).__code__: (f"GradScaler.{name}", _WITH_SCALER)
        for name in ("scale", "unscale_", "step", "update")
    }


def optimizer_inside(optimizer: Any) -> Any:
    """The optimizer of torch's inside a wrapper that keeps it as `_optimizer`."""
    while isinstance(inner := vars(optimizer).get("_optimizer"), Optimizer):
        optimizer = inner
    return optimizer
