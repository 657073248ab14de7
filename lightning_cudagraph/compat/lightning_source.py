"""Fingerprints of Lightning's loop functions, which the fast path between replays reimplements.

The digest of their source is compared with that of the releases that the fast path was written for. For
any other release, two batches of the loop are run. The loop counts as unchanged if they make the same
calls in the same order, and if the functions mention the same names, so that there is no new condition
that two batches do not show. Otherwise Lightning's own loop runs.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from types import CodeType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer import call

from lightning_cudagraph.compat.loop_probe import digest_of_calls
from lightning_cudagraph.compat.names.lightning_names import (
    _AutomaticOptimization,
    _FitLoop,
    _LoggerConnector,
    _Loop,
    _Progress,
    _TrainingEpochLoop,
)

_NAMES: dict[Any, str] = {
    _TrainingEpochLoop: """
        run advance on_advance_end done _is_training_done global_step batch_idx _build_kwargs
        _accumulated_batches_reached _num_ready_batches_reached _should_accumulate update_lr_schedulers
        _update_learning_rates _should_check_val_fx _should_check_val_epoch
        _save_loggers_on_train_batch_end reset_restart_stage
    """,
    _Loop: "on_iteration_done restarting",
    _FitLoop: "_results _can_stop_early",
    _AutomaticOptimization: "run _make_closure _make_zero_grad_fn _optimizer_step",
    _LoggerConnector: """
        on_batch_start on_batch_end update_train_step_metrics should_update_logs metrics log_metrics
    """,
    _Progress: "increment_ready increment_started increment_processed increment_completed",
    LightningOptimizer: "step",
    pl.LightningModule: "optimizer_step",
    pl.Trainer: "_results _active_loop training num_training_batches",
    call: "_call_callback_hooks _call_lightning_module_hook",
}
# The value of `digest`: the same in lightning 2.6.0 to 2.6.6.
_KNOWN = frozenset({"3fa88ff282bb2af5b670aa3bc0f9b8b74bbc702b9069cdfd300eb1c59280380b"})
# The values of `digest_of_calls` and `digest_of_names` for the same releases.
_CALLS = "1285d4f582a9a406eceafedcd34369b7f0412a520220491db023808a37c3d72a"
_MENTIONED = "66d9eb69cde20f322125373bf312cc96b49139752848f005103135c15949b78e"


def is_known() -> bool:
    """True if Lightning's loop does the same as in the releases that the fast path was written for."""
    return digest() in _KNOWN or (digest_of_names() == _MENTIONED and digest_of_calls() == _CALLS)


def digest_of_names() -> str:
    """SHA-256 of the names that the reimplemented functions mention, function by function."""
    try:
        functions = [_function(owner, n) for owner, names in _NAMES.items() for n in names.split()]
        mentioned = [sorted(_mentioned(inspect.unwrap(function).__code__)) for function in functions]
    except AttributeError:  # another Lightning
        return ""
    return hashlib.sha256(repr(mentioned).encode()).hexdigest()


def _mentioned(code: CodeType) -> set[str]:
    inner = [_mentioned(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)


def digest() -> str:
    """SHA-256 of the source of the reimplemented functions."""
    try:
        sources = [
            _source(_function(owner, n)) for owner, names in _NAMES.items() for n in names.split()
        ]
    except (AttributeError, OSError, TypeError):  # another Lightning, or one without sources
        return ""
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _function(owner: type, name: str) -> Any:
    found = getattr(owner, name)
    return found.fget if isinstance(found, property) else found


@cache
def _source(function: Any) -> str:
    return inspect.getsource(function)
