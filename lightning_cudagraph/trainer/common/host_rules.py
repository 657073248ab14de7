"""The audit's rules for names of Lightning.

They list the getters that change in every step and those that change seldom, and the calls that print or
write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core import rank_zero
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_cudagraph.checks.audit.calls.known_calls import SEEDED
from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.effects import optimizer_roots
from lightning_cudagraph.checks.audit.read_remedies import Remedy
from lightning_cudagraph.checks.walk.host_objects import VALUES, attributes_of, is_users_class
from lightning_cudagraph.checks.walk.scope import Root
from lightning_cudagraph.compat.names.lightning_names import _FitLoop, _Loop, _TrainingEpochLoop
from lightning_cudagraph.graphed_step.framework import moving_rates
from lightning_cudagraph.trainer.logs.silent import Silent
from lightning_cudagraph.trainer.metrics.model_metrics import is_metric

# Attributes of every module that belong to torch and Lightning, but for settings of the user's.
OWN_ATTRIBUTES = frozenset(vars(pl.LightningModule())) - {
    f"_{name}"
    for name, found in vars(pl.LightningModule).items()
    if isinstance(found, property) and found.fset is not None and name not in ("trainer", "fabric")
}


def _getters(owner: type, label: str, *names: str) -> dict[CodeType, str]:
    return {vars(owner)[name].fget.__code__: f"{label}.{name}" for name in names}


@cache
def _moving() -> dict[CodeType, str]:
    """Return the getters of numbers that change from step to step."""
    return {
        **_getters(pl.LightningModule, "self", "global_step"),
        **_getters(
            pl.Trainer,
            "trainer",
            "global_step",
            "is_last_batch",
            "callback_metrics",
            "logged_metrics",
            "progress_bar_metrics",
        ),
        **_getters(_FitLoop, "trainer.fit_loop", "batch_idx", "total_batch_idx"),
        **_getters(
            _TrainingEpochLoop,
            "trainer.fit_loop.epoch_loop",
            "batch_idx",
            "total_batch_idx",
            "global_step",
        ),
        CombinedLoader.__next__.__code__: "next(CombinedLoader)",
    }


# Classes with getters for other objects, and for numbers that no guard watches.
_HANDS_OUT = (
    *(pl.Trainer, pl.LightningModule, pl.LightningDataModule, Strategy, Callback, Logger, _Loop),
    *(Optimizer, LightningOptimizer, LRScheduler, DataLoader, CombinedLoader),
)
_LOG_THE_RATE = Remedy(
    "Log it with Lightning's `LearningRateMonitor`, or in `on_train_batch_start`, which has the rate of"
    " this step.",
    "logged_values",
)
_ASK_THE_INDEX = Remedy(
    "Ask the `batch_idx` that the step is given instead: each outcome of a comparison has a graph.",
    "paths",
    may_be_allowed=False,
)
_ASK_IF_LAST = Remedy(
    "Ask `batch_idx + 1 == self.trainer.num_training_batches` instead: each outcome has a graph.",
    "paths",
    may_be_allowed=False,
)
_SCHEDULED = (
    "Call it in `on_train_batch_start`, or return it from `configure_optimizers`: Lightning calls it."
)
SCHEDULED_BY_LOSS = (
    'Return the loss from the step, and call it in `on_train_batch_end`, with `outputs["loss"]`: the'
    " rate moves for the next step."
)
# Objects that Lightning itself changes in every step.
RUN_STATE = (pl.Trainer, Strategy, _Loop, LightningOptimizer, CombinedLoader)
_EFFECTS: dict[CodeType, str] = {
    pl.LightningModule.print.__code__: "self.print",
    pl.Trainer.print.__code__: "trainer.print",
    pl.Trainer.save_checkpoint.__code__: "trainer.save_checkpoint",
}


@cache
def _seeds() -> dict[CodeType, tuple[str, str]]:
    """Return Lightning's functions that set the generators of a step."""
    named: dict[str, Any] = {"seed_everything": pl.seed_everything, "isolate_rng": isolate_rng}
    return {unwrap(function).__code__: (name, SEEDED) for name, function in named.items()}


def _scheduled(step: FunctionType) -> tuple[str, str]:
    """The name and the remedy for the `step` of a class of schedulers."""
    takes_a_loss = step.__code__.co_argcount - len(step.__defaults__ or ()) > 1
    return (step.__qualname__, SCHEDULED_BY_LOSS) if takes_a_loss else ("LRScheduler.step", _SCHEDULED)


def host_rules(
    trainer: pl.Trainer, harmless: frozenset[str], stays_on_host: Callable[[Any], bool] = is_metric
) -> HostRules:
    """Return the rules for one run."""
    schedulers = {
        LRScheduler,
        ReduceLROnPlateau,
        *(type(c.scheduler) for c in trainer.lr_scheduler_configs),
    }
    steps = [unwrap(scheduler.step) for scheduler in schedulers if hasattr(scheduler, "step")]
    scheduled = {step.__code__: _scheduled(step) for step in steps if isinstance(step, FunctionType)}
    remedies = dict.fromkeys(("LRScheduler.get_last_lr", "LRScheduler.get_lr"), _LOG_THE_RATE)
    remedies["trainer.is_last_batch"] = _ASK_IF_LAST
    for loop in ("trainer.fit_loop", "trainer.fit_loop.epoch_loop"):
        remedies[f"{loop}.batch_idx"] = _ASK_THE_INDEX

    def epoch() -> int:
        return trainer.current_epoch

    seldom: dict[CodeType, tuple[str, Callable[[], Any]]] = {
        vars(owner)["current_epoch"].fget.__code__: ("current_epoch", epoch)
        for owner in (pl.LightningModule, pl.Trainer)
    }

    def records(value: Any) -> bool:
        # Read from `vars`, because the getter `experiment` would make one.
        return isinstance(value, (Logger, Silent)) or any(
            value is not None and value is vars(logger).get("_experiment") for logger in trainer.loggers
        )

    passing_on = frozenset({str(rank_zero.__file__)})
    return HostRules(
        {**_moving(), **moving_rates(schedulers)},
        seldom,
        _EFFECTS,
        passing_on,
        records,
        stays_on_host,
        harmless,
        refused={**_seeds(), **scheduled},
        hands_out=lambda value: issubclass(type(value), _HANDS_OUT),
        stops=RUN_STATE,
        remedies=remedies,
    )


def outside_of_model(trainer: pl.Trainer) -> list[Root]:
    """Return the user's objects outside the model that a step may change."""
    trainers: Any = trainer  # some attributes are not declared
    loader = trainer.train_dataloader
    # Not by the getter, which would make one.
    experiments = [vars(logger).get("_experiment") for logger in trainer.loggers]
    found = [
        *trainers.callbacks,
        trainers.datamodule,
        *trainer.loggers,
        *experiments,
        getattr(loader, "dataset", None),
    ]
    sampler = getattr(loader, "batch_sampler", None)
    found += [
        *(loader, sampler, getattr(sampler, "sampler", None), getattr(loader, "sampler", None)),
        *(getattr(loader, "collate_fn", None), trainers.strategy, trainers.precision_plugin),
        trainers.accelerator,
        *(config.scheduler for config in trainer.lr_scheduler_configs),
        *trainers.strategy._lightning_optimizers,
    ]
    roots = []
    for value in found:
        attributes = None if value is None else attributes_of(value)
        if attributes is None or type(value).__module__.startswith("lightning_cudagraph."):
            continue
        left_out: set[str] = set()
        if not is_users_class(type(value)):  # plain values only: the rest belongs to the library
            # Containers of a logger's experiment lead to its queues and threads.
            of_user = VALUES if any(value is each for each in experiments) else (*VALUES, list, dict)
            left_out = {n for n, part in attributes.items() if type(part) not in of_user}
        of = f"the `{type(value).__qualname__}`"
        roots.append(Root(value, "", of, frozenset(left_out), is_entered=True))
    return [*roots, *optimizer_roots(trainer.optimizers, with_options=True)]
