"""Private names of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cudagraph.compat.features import FABRIC, FAST_PATH, LOOPS, REPLICAS, TIMES
from lightning_cudagraph.compat.lightning_source import is_known
from lightning_cudagraph.compat.probes import (
    PrivateName,
    accepts,
    imported,
    members,
    named,
)

if TYPE_CHECKING:
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
    from lightning.pytorch.core.optimizer import _MockOptimizer
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
    from lightning.pytorch.loops.progress import _Progress
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _get_default_dtype,
        _ResultCollection,
        _ResultMetric,
    )
else:

    def __getattr__(name: str) -> Any:
        return imported(LIGHTNING, name)


_PYTORCH = "lightning.pytorch"
_LOOPS = f"{_PYTORCH}.loops"
_EPOCH_LOOP = f"{_LOOPS}.training_epoch_loop._TrainingEpochLoop"
_AUTOMATIC = f"{_LOOPS}.optimization.automatic"
_CONNECTOR = f"{_PYTORCH}.trainer.connectors.logger_connector"
_CALL = f"{_PYTORCH}.trainer.call"
_WRAPPERS = "lightning.fabric.wrappers"


def _reads_a_number(getter: Any) -> bool:
    return callable(getter.fget)


_TRAINER = (
    members(
        f"{_PYTORCH}.Trainer",
        "_logger_connector _signal_connector _detect_anomaly _evaluation_loop _results",
        LOOPS,
    ),
    members(
        f"{_PYTORCH}.trainer.connectors.signal_connector._SignalConnector",
        "received_sigterm _sigterm_notifier_fn",
        LOOPS,
    ),
    members(
        f"{_PYTORCH}.LightningModule",
        "_current_fx_name _compiler_ctx _param_requires_grad_state _trainer",
        LOOPS,
    ),
    # Name-mangled: `LightningModule.log` turns its value into a tensor with it.
    PrivateName(
        f"{_PYTORCH}.LightningModule._LightningModule__to_tensor",
        (LOOPS,),
        accepts("self", "value", "name"),
    ),
    members(f"{_PYTORCH}.loggers.TensorBoardLogger", "_experiment", LOOPS),
    PrivateName(f"{_PYTORCH}.core.optimizer._MockOptimizer", (LOOPS,)),
    members(
        f"{_PYTORCH}.core.optimizer.LightningOptimizer",
        "_on_before_step _on_after_step _optimizer",
        LOOPS,
    ),
    *named(_CALL, "_call_callback_hooks", LOOPS, probe=accepts("trainer", "hook", "batch", "batch_idx")),
    *named(_CALL, "_call_lightning_module_hook", LOOPS, probe=accepts("trainer", "hook", "loss")),
)
_TRAINING_LOOP = (
    members(
        _EPOCH_LOOP,
        "automatic_optimization _results _batches_that_stepped batch_progress val_loop",
        LOOPS,
        TIMES,
    ),
    *named(_EPOCH_LOOP, "_broadcast_sigterm_tensor", LOOPS, probe=accepts("self")),
    # Counters, which move from step to step.
    *named(_EPOCH_LOOP, "batch_idx total_batch_idx global_step", LOOPS, probe=_reads_a_number),
    *named(f"{_LOOPS}.fit_loop._FitLoop", "batch_idx total_batch_idx", LOOPS, probe=_reads_a_number),
    PrivateName(f"{_LOOPS}.loop._Loop", (LOOPS,)),
    *named(f"{_LOOPS}.fit_loop._FitLoop", "_should_accumulate", LOOPS, TIMES, probe=accepts("self")),
    *named(
        f"{_AUTOMATIC}._AutomaticOptimization",
        "_make_closure",
        LOOPS,
        probe=accepts("self", "kwargs", "optimizer", "batch_idx"),
    ),
    members(
        f"{_AUTOMATIC}._AutomaticOptimization", "_optimizer_step _skip_backward optim_progress", LOOPS
    ),
    PrivateName(
        f"{_AUTOMATIC}.Closure",
        (LOOPS,),
        accepts("step_fn", "backward_fn", "zero_grad_fn"),
        fields=("_step_fn", "_backward_fn", "_zero_grad_fn", "_result"),
    ),
)
_LOGS = (
    members(
        f"{_CONNECTOR}.logger_connector._LoggerConnector",
        "should_reset_tensors _current_fx _first_loop_iter _progress_bar_metrics",
        LOOPS,
    ),
    members(
        f"{_CONNECTOR}.result._ResultCollection",
        "log reset metrics update_metrics batch batch_size dataloader_idx",
        LOOPS,
    ),
    *named(
        f"{_CONNECTOR}.result._ResultCollection",
        "_extract_batch_size",
        LOOPS,
        probe=accepts("self", "value", "batch_size", "meta"),
    ),
    # Attributes that this package sets.
    members(
        f"{_CONNECTOR}.result._ResultMetric",
        "value cumulated_batch_size _forward_cache _update_count _computed _defaults has_reset",
        LOOPS,
    ),
    *named(f"{_CONNECTOR}.result", "_get_default_dtype", LOOPS, probe=accepts()),
    members(f"{_LOOPS}.evaluation_loop._EvaluationLoop", "_results", LOOPS),
)
_FAST_PATH = (
    members(
        f"{_CONNECTOR}.logger_connector._LoggerConnector", "_callback_metrics _logged_metrics", FAST_PATH
    ),
    PrivateName(f"{_EPOCH_LOOP}.advance", (FAST_PATH,), lambda advance: is_known()),
    members(_EPOCH_LOOP, "_skip_next_val _warning_cache", FAST_PATH),
    *named(_EPOCH_LOOP, "_should_check_val_epoch", FAST_PATH, probe=accepts("self")),
    *named(_EPOCH_LOOP, "_should_check_val_fx", FAST_PATH, probe=accepts("self", "data_fetcher")),
    *named(
        _EPOCH_LOOP, "_build_kwargs", FAST_PATH, probe=accepts("self", "kwargs", "batch", "batch_idx")
    ),
    *named(
        f"{_PYTORCH}.LightningModule",
        "_on_before_batch_transfer",
        FAST_PATH,
        probe=accepts("self", "batch", "dataloader_idx"),
    ),
    PrivateName(f"{_LOOPS}.fetchers._DataLoaderIterDataFetcher", (FAST_PATH,)),
    PrivateName(f"{_LOOPS}.progress._Progress", (FAST_PATH,)),
)
_STRATEGIES = (
    members(f"{_PYTORCH}.strategies.Strategy", "_lightning_optimizers", LOOPS),
    members(
        f"{_PYTORCH}.strategies.DDPStrategy",
        "_ddp_kwargs _ddp_comm_hook _ddp_comm_wrapper _timeout",
        REPLICAS,
    ),
    *named(
        f"{_PYTORCH}.strategies.DDPStrategy", "_setup_model", REPLICAS, probe=accepts("self", "model")
    ),
    members(f"{_PYTORCH}.strategies.ModelParallelStrategy", "_device_mesh", LOOPS),
    members(f"{_WRAPPERS}._FabricOptimizer", "_optimizer _strategy _callbacks", FABRIC),
    members(f"{_WRAPPERS}._FabricModule", "_strategy", FABRIC),
)

LIGHTNING = (*_TRAINER, *_TRAINING_LOOP, *_LOGS, *_FAST_PATH, *_STRATEGIES)
