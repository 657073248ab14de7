"""Fingerprint of Lightning's loop functions, which the fast path between replays reimplements.

The digest of their syntax, without comments, docstrings and annotations, is compared with that of the
releases that the fast path was written for. With any other release, Lightning's own loop runs.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cache
from typing import Any

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
_KNOWN = frozenset({"380acb951acdffb018dc89072a07af81d215c8ba5f27f074599de2268596fd62"})
# Fields of syntax trees that change nothing where the function runs. Some versions of Python lack some.
_NO_MEANING = ("returns", "annotation", "type_comment", "type_params", "kind", "type_ignores")


def is_known() -> bool:
    """True if Lightning's loop does the same as in the releases that the fast path was written for."""
    return digest() in _KNOWN


def digest() -> str:
    """SHA-256 of the syntax of the reimplemented functions; empty if there is no source of one."""
    try:
        syntax = [_syntax(function) for function in _functions()]
    except (AttributeError, ImportError):  # another Lightning
        return ""
    except (OSError, TypeError, SyntaxError):  # one without sources
        return ""
    return hashlib.sha256(repr(syntax).encode()).hexdigest()


def _functions() -> list[Any]:
    values = [found(f"{owner}.{name}") for owner, names in _NAMES.items() for name in names.split()]
    return [value.fget if isinstance(value, property) else value for value in values]


@cache
def _syntax(function: Any) -> Any:
    return _meaning(ast.parse(textwrap.dedent(inspect.getsource(function))))


def _meaning(node: Any) -> Any:
    """Reduce a syntax tree to what its code does, equal for all versions of Python."""
    if isinstance(node, list):
        return [_meaning(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NO_MEANING}
    is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    if is_definition and ast.get_docstring(node) is not None:  # type: ignore[arg-type]
        fields["body"] = fields["body"][1:]
    kept = [(name, _meaning(value)) for name, value in fields.items() if value not in (None, [])]
    return type(node).__name__, kept
