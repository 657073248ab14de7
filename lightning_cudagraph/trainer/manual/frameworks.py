"""`GraphedStep` in Lightning's manual optimization and in Fabric.

Lightning's optimizer wrapper counts steps on the host, for `trainer.global_step`. In a captured function
the count is after-replay work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch.amp import GradScaler

from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.compat.features import FABRIC, LOOPS
from lightning_cudagraph.compat.method_patches import in_place
from lightning_cudagraph.compat.names.lightning_names import _FabricModule, _FabricOptimizer
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.graphed_step.framework import (
    FRAMEWORKS,
    PlainLoop,
    optimizer_inside,
    scaler_calls,
    scheduler_steps,
)
from lightning_cudagraph.trainer.callbacks.layer_timings_monitor import LayerTimingsMonitor
from lightning_cudagraph.trainer.common.host_rules import OWN_ATTRIBUTES, host_rules
from lightning_cudagraph.trainer.config.strategies import refuse_strategy
from lightning_cudagraph.trainer.config.support import callbacks_of, scaler_of
from lightning_cudagraph.trainer.metrics.model_metrics import is_metric
from lightning_cudagraph.trainer.metrics.reads import MetricReads, metric_reads

# Hooks that Lightning calls from `manual_backward` and from the step of an optimizer.
_CALLBACK_HOOKS_INSIDE = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_COUNTERS = ("_on_before_step", "_on_after_step")
# The attribute with which `untoggle_optimizer` undoes `toggle_optimizer`.
OWN_OF_TOGGLING = frozenset({"_param_requires_grad_state"})
_RETURN_AND_LOG = "Return the value from the step, and log it after the call."


class ManualOptimization(PlainLoop):
    """A `training_step` with manual optimization."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.around: Mapping[str, Any] = {"trainer": trainer}
        self.unwatched = PlainLoop.unwatched | OWN_ATTRIBUTES
        # Optimizers and scaler, for which a run prepares after the first check.
        self._prepared: list[object] = []

    def optimizer_in(self, optimizer: Any) -> Any:
        return optimizer_inside(optimizer)

    def scaler(self) -> GradScaler | None:
        return scaler_of(self.trainer)

    def check(self) -> None:
        require(LOOPS)
        strategy = self.trainer.strategy
        refuse_strategy(strategy)
        if self.trainer.world_size > 1 or isinstance(strategy, DDPStrategy):
            # The DDP wrapper's forward pass is outside of the function, its backward pass inside.
            raise UnsupportedError(
                f"The run has {self.trainer.world_size} process(es), with"
                f" `{type(strategy).__qualname__}`; captured so far is manual optimization on a"
                " single device.",
                "Pass `Trainer(devices=1)`; or write the loop with Fabric, where `GraphedStep` knows"
                " `DistributedDataParallel`.",
            )
        found: list[object] = [*strategy.optimizers, scaler_of(self.trainer)]
        self._prepared = self._prepared or found
        if found != self._prepared:
            raise UnsupportedError(
                "The trainer has other optimizers, or another gradient scaler, than when the run began.",
                "Change options of those that it had, such as the learning rate, instead.",
            )
        for callback in callbacks_of(self.trainer):
            if isinstance(callback, LayerTimingsMonitor):
                raise UnsupportedError(
                    "The trainer has a `LayerTimingsMonitor`, which times eager steps by hooks in"
                    " them, and calls of a `GraphedStep` are replayed.",
                    "Leave it out, and time blocks of the function with `Profiler`.",
                )
            for hook in _CALLBACK_HOOKS_INSIDE:
                method = getattr(callback, hook)
                if getattr(method, "__func__", method) is not getattr(Callback, hook):
                    raise UnsupportedError(
                        f"`{type(callback).__qualname__}.{hook}` is called between the forward pass and"
                        " the optimizer's step: in a graph, its host code would run once, at the"
                        " capture.",
                        "Move it to `on_train_batch_end`, or leave that callback out.",
                    )

    def rules(self, harmless: frozenset[str], scaler: GradScaler | None) -> HostRules:
        # No code logs or updates a metric after a replay.
        logs = {
            vars(pl.LightningModule)[name].__code__: (f"self.{name}", _RETURN_AND_LOG)
            for name in ("log", "log_dict")
        }
        return replace(
            host_rules(self.trainer, harmless | OWN_OF_TOGGLING, stays_on_host=lambda module: False),
            refused={**logs, **scheduler_steps(), **scaler_calls(scaler)},
        )

    def stays_on_host(self, module: Any) -> bool:
        return is_metric(module)

    @contextmanager
    def reads(self, mentioned: MentionedNames) -> Iterator[None]:
        read = MetricReads()
        with metric_reads(read.note):
            yield
        read.tell(mentioned, lambda metric, name: False)

    def parts(self) -> list[object]:
        trainer = self.trainer
        optimizers = trainer.strategy._lightning_optimizers
        return [trainer.strategy, scaler_of(trainer), *callbacks_of(trainer), *optimizers]

    def callees(self) -> list[object]:
        return [self.trainer.precision_plugin, *(part for part in self.parts() if part is not None)]

    def _wrappers(self) -> list[LightningOptimizer]:
        return list(self.trainer.strategy._lightning_optimizers)

    @contextmanager
    def noted(self, notes: list[Callable[[], object]]) -> Iterator[None]:
        with ExitStack() as stack:
            for wrapper in self._wrappers():
                for name in _COUNTERS:
                    stack.enter_context(in_place(wrapper, name, _noting(notes, wrapper, name)))
            yield


class FabricLoop(PlainLoop):
    """A loop with modules and optimizers of the step that Fabric has wrapped."""

    def __init__(self, optimizers: list[_FabricOptimizer], modules: list[_FabricModule]) -> None:
        self._wrapped = optimizers
        self._modules = modules

    def optimizer_in(self, optimizer: Any) -> Any:
        return optimizer_inside(optimizer)

    def scaler(self) -> GradScaler | None:
        for optimizer in self._wrapped:
            scaler: GradScaler | None = getattr(optimizer._strategy.precision, "scaler", None)
            if scaler is not None and scaler.is_enabled():
                return scaler
        return None

    def check(self) -> None:
        require(FABRIC)
        for module in self._modules:
            refuse_strategy(module._strategy)
        for optimizer in self._wrapped:
            refuse_strategy(optimizer._strategy)
            for callback in optimizer._callbacks:
                if hasattr(callback, "on_after_optimizer_step"):
                    raise UnsupportedError(
                        f"`{type(callback).__qualname__}.on_after_optimizer_step` is called in the step:"
                        " in a graph, its host code would run once, at the capture.",
                        "Leave that callback out of `Fabric(callbacks=...)`.",
                    )


def _noting(notes: list[Callable[[], object]], wrapper: Any, name: str) -> Callable[[], None]:
    def note() -> None:
        # By name: Lightning replaces these functions for every batch.
        notes.append(lambda: getattr(wrapper, name)())

    return note


def _lightning(owners: list[Any]) -> PlainLoop | None:
    """Detect Lightning or Fabric around a function."""
    for owner in owners:
        trainer = vars(owner).get("_trainer") if isinstance(owner, pl.LightningModule) else None
        if trainer is not None:
            return ManualOptimization(trainer)
    wrapped = [owner for owner in owners if isinstance(owner, _FabricOptimizer)]
    modules = [owner for owner in owners if isinstance(owner, _FabricModule)]
    if wrapped or modules:
        return FabricLoop(wrapped, modules)
    return None


FRAMEWORKS.append(_lightning)
