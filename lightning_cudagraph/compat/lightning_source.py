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

from lightning_cudagraph.compat.loop_probe import digest_of_calls
from lightning_cudagraph.compat.probes import found

# By path, as in `names/lightning_names.py`, which has this probe in its table.
_PYTORCH = "lightning.pytorch"
_LOOPS = f"{_PYTORCH}.loops"
_NAMES = {
    f"{_LOOPS}.training_epoch_loop._TrainingEpochLoop": """
        run advance on_advance_end done _is_training_done global_step batch_idx _build_kwargs
        _accumulated_batches_reached _num_ready_batches_reached _should_accumulate update_lr_schedulers
        _update_learning_rates _should_check_val_fx _should_check_val_epoch
        _save_loggers_on_train_batch_end reset_restart_stage
    """,
    f"{_LOOPS}.loop._Loop": "on_iteration_done restarting",
    f"{_LOOPS}.fit_loop._FitLoop": "_results _can_stop_early",
    f"{_LOOPS}.optimization.automatic._AutomaticOptimization": """
        run _make_closure _make_zero_grad_fn _optimizer_step
    """,
    f"{_PYTORCH}.trainer.connectors.logger_connector.logger_connector._LoggerConnector": """
        on_batch_start on_batch_end update_train_step_metrics should_update_logs metrics log_metrics
    """,
    f"{_LOOPS}.progress._Progress": """
        increment_ready increment_started increment_processed increment_completed
    """,
    f"{_PYTORCH}.core.optimizer.LightningOptimizer": "step",
    f"{_PYTORCH}.LightningModule": "optimizer_step",
    f"{_PYTORCH}.Trainer": "_results _active_loop training num_training_batches",
    f"{_PYTORCH}.trainer.call": "_call_callback_hooks _call_lightning_module_hook",
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
        mentioned = [sorted(_mentioned(inspect.unwrap(each).__code__)) for each in _functions()]
    except (AttributeError, ImportError):  # another Lightning
        return ""
    return hashlib.sha256(repr(mentioned).encode()).hexdigest()


def _mentioned(code: CodeType) -> set[str]:
    inner = [_mentioned(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)


def digest() -> str:
    """SHA-256 of the source of the reimplemented functions."""
    try:
        sources = [_source(function) for function in _functions()]
    except (AttributeError, ImportError):  # another Lightning
        return ""
    except (OSError, TypeError):  # one without sources
        return ""
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _functions() -> list[Any]:
    values = [found(f"{owner}.{name}") for owner, names in _NAMES.items() for name in names.split()]
    return [value.fget if isinstance(value, property) else value for value in values]


@cache
def _source(function: Any) -> str:
    return inspect.getsource(function)
