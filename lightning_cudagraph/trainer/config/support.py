"""Checks of a run's configuration before its first step.

A problem that only the step itself can show, such as a host value in `forward`, is found by the capture.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch.amp import GradScaler
from torch.cuda.amp import GradScaler as CudaGradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_cudagraph.checks.rebound_methods import refuse_rebound_methods
from lightning_cudagraph.checks.unsupported_modules import refuse_unsupported_modules
from lightning_cudagraph.compat.features import CAPTURES, LOOPS
from lightning_cudagraph.compat.method_patches import MethodPatch
from lightning_cudagraph.compat.names.lightning_names import _MockOptimizer
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.refusals.first_refusal import refuse_together
from lightning_cudagraph.errors import UnsupportedError, see
from lightning_cudagraph.optim.compiled import is_compiled
from lightning_cudagraph.processes.ddp import check_comm_hook, check_wrapper, is_stateless
from lightning_cudagraph.processes.shards import check_shards
from lightning_cudagraph.trainer.config.strategies import refuse_strategy, supported_base

# An evaluation, as in the names of its step and hooks.
Stage = Literal["validation", "test", "predict"]

# Methods of a strategy that take part in steps.
_STEP_METHODS = (
    *("training_step", "validation_step", "test_step", "predict_step", "post_training_step"),
    *("pre_backward", "backward", "post_backward", "optimizer_step", "batch_to_device", "reduce"),
)

# For collectives of a run with a single-process strategy in a group of several processes.
ALONE = "a run that is one process to Lightning"
TELL_LIGHTNING = (
    'Pass `Trainer(strategy="ddp", devices=..., num_nodes=...)`, and Lightning averages gradients; or'
    " keep collectives out of the step."
)

# Arguments of `DistributedDataParallel` that are constant over steps.
_DDP_ARGUMENTS = frozenset(
    {
        *("bucket_cap_mb", "broadcast_buffers", "forward_sync_buffers", "check_reduction", "init_sync"),
        *("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "dim"),
    }
)
# Wrappers of communication hooks without state.
_COMM_WRAPPERS = (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper)

# Hooks of callbacks that may change gradients before the optimizer step
# (plugins/precision/precision.py). They run on the host, and the optimizer step after them.
_CALLBACK_HOOKS_BEHIND = ("on_after_backward", "on_before_optimizer_step")


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """Return all callbacks of a trainer; Lightning does not declare the attribute."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def is_overridden(name: str, instance: Any, base: type) -> bool:
    """True if a hook is not that of its base class.

    Compared by identity: Lightning's own check fails on partials, mocks and wrapped functions.
    """
    method = getattr(instance, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def described_hook(owner: Any, name: str) -> str:
    """Describe a hook, with its file and line if it is written in Python."""
    code = getattr(inspect.unwrap(getattr(owner, name)), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"`{type(owner).__qualname__}.{name}`{where}"


def check_run(trainer: pl.Trainer, module: pl.LightningModule, is_whole: bool = True) -> None:
    """Raise `UnsupportedError` for a run that is not known to have the same numbers with a graph.

    Args:
        is_whole: whole steps are captured, with all modules and a `DistributedDataParallel` around them.
    """
    _check_placement(trainer, is_whole)  # alone: of another strategy nothing else is known
    refuse_together(
        lambda: _check_precision(trainer),
        lambda: _check_loop(trainer, module),
        lambda: _check_modules(trainer, module) if is_whole else None,
    )


def check_evaluation(trainer: pl.Trainer, module: pl.LightningModule, stage: Stage) -> None:
    """Raise `UnsupportedError` for evaluations not known to have the same numbers with a graph."""
    require(CAPTURES, LOOPS)
    _check_placement(trainer)
    _check_precision(trainer)
    _check_batches(module, f"{stage}_step")
    _check_modules(trainer, module)


def _check_placement(trainer: pl.Trainer, is_whole: bool = True) -> None:
    strategy = trainer.strategy
    if is_whole or not isinstance(strategy, DDPStrategy):
        refuse_strategy(strategy)
    if isinstance(strategy, DDPStrategy) and is_whole:
        _check_ddp(strategy)
    if isinstance(strategy, ModelParallelStrategy):
        check_shards(trainer.lightning_module)
    if (base := supported_base(type(strategy))) is None:
        raise UnsupportedError(
            f"`{type(strategy).__qualname__}` has the name of a supported strategy, but is none of"
            " `lightning.pytorch`.",
            "Use Lightning's own.",
        )
    if is_whole:
        check_replicas(strategy)
    for name in _STEP_METHODS:
        ours = type(getattr(strategy, name)) is MethodPatch
        if ours or not is_overridden(name, strategy, base):
            continue
        raise UnsupportedError(
            f"{described_hook(strategy, name)} is not Lightning's own; it takes part in steps, and what"
            " it reads from the strategy is not guarded.",
            f"Move it to the module, or pass Lightning's `{base.__qualname__}`.",
        )


def check_replicas(strategy: Strategy) -> None:
    """Refuse a `DistributedDataParallel` around the module that graphs cannot hold."""
    if not isinstance(strategy.model, DistributedDataParallel):
        return
    known_hooks = 0
    if isinstance(strategy, DDPStrategy) and strategy.root_device.type == "cuda":
        # The strategy has registered its own hook, perhaps wrapped. There is no other.
        known_hooks = int(strategy._ddp_comm_hook is not None)
    check_wrapper("The strategy's `DistributedDataParallel`", strategy.model, True, known_hooks)


def _check_ddp(strategy: DDPStrategy) -> None:
    arguments: dict[str, Any] = strategy._ddp_kwargs
    if unknown := sorted(arguments.keys() - _DDP_ARGUMENTS):
        raise UnsupportedError(
            f"`DDPStrategy({unknown[0]}=...)` is not known to come out the same from a graph; known are"
            f" {', '.join(sorted(_DDP_ARGUMENTS))}.",
            "Leave it out.",
        )
    hook, wrapper = strategy._ddp_comm_hook, strategy._ddp_comm_wrapper
    if hook is not None:
        check_comm_hook("`DDPStrategy(ddp_comm_hook=...)` is", hook)
    is_known = is_stateless(hook) and wrapper in _COMM_WRAPPERS
    if hook is not None and wrapper is not None and not is_known:
        raise UnsupportedError(
            f"`DDPStrategy(ddp_comm_wrapper={getattr(wrapper, '__qualname__', wrapper)})` hides what its"
            " hook reads and keeps.",
            "Leave it out, and cast in the hook; or pass a hook of"
            " `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.",
        )
    # Read from the group itself, because it may be older than the strategy.
    backend = dist.get_backend_config() if dist.is_initialized() else "cuda:nccl"
    if strategy.root_device.type == "cuda" and "cuda:nccl" not in backend:
        raise UnsupportedError(
            f"The process group uses {backend}, which averages gradients on the host.",
            'Leave out `DDPStrategy(process_group_backend=...)`: it is "nccl" on GPUs. A group that was'
            ' made before the trainer needs `init_process_group("nccl")`.',
        )


def _check_precision(trainer: pl.Trainer) -> None:
    plugin = trainer.precision_plugin
    scaler = scaler_of(trainer)
    if scaler is not None and type(scaler) not in (GradScaler, CudaGradScaler):
        raise UnsupportedError(
            f"The gradient scaler is a `{type(scaler).__module__}.{type(scaler).__qualname__}`; expected"
            " torch's `torch.amp.GradScaler`.",
            "Use that one, or `precision='bf16-mixed'`, which needs no scaler.",
        )
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision, DoublePrecision):
        raise UnsupportedError(
            f"The precision plugin is `{type(plugin).__qualname__}` (precision {plugin.precision!r});"
            " captured are 32-true, 64-true, 16-true, bf16-true, 16-mixed and bf16-mixed.",
            "Use one of these.",
        )


def scaler_of(trainer: pl.Trainer) -> GradScaler | None:
    """Return the gradient scaler of a run in fp16, or None."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _check_loop(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    name = type(module).__qualname__
    # Lightning uses this class if there is no optimizer.
    if any(isinstance(optimizer, _MockOptimizer) for optimizer in trainer.optimizers):
        raise UnsupportedError(
            f"`{name}.configure_optimizers` gives no optimizer, so that a step trains nothing.",
            "Return one; or run this without the callback.",
        )
    if trainer._detect_anomaly:
        raise UnsupportedError(
            "`Trainer(detect_anomaly=True)` reads values back to the host in every backward pass.",
            "Leave `detect_anomaly` out." + see("nan_checks"),
        )
    if module.automatic_optimization:
        check_closures(trainer, module, trainer.optimizers[0])
    _check_batches(module, "training_step")


def check_closures(trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Refuse compiled code around the closure of a step: Dynamo would compile this package too."""
    compiled = None
    if is_compiled(module.optimizer_step):
        compiled = described_hook(module, "optimizer_step")
    # With a gradient scaler, Lightning calls the closure by itself (plugins/precision/amp.py).
    elif is_compiled(optimizer.step) and scaler_of(trainer) is None:
        compiled = f"`step` of the `{type(optimizer).__qualname__}`"
    if compiled is not None:
        raise UnsupportedError(
            f"{compiled} is compiled, and Lightning calls forward and backward pass in it, through a"
            " closure: all of Lightning's loop is compiled with it.",
            "Leave out `torch.compile` there: the graph holds the optimizer's step as it is. Or have it"
            " compiled after a graph of forward and backward: make `self.fast ="
            " torch.compile(optimizer.step)` in `configure_optimizers`, and in the module's"
            " `optimizer_step` call `optimizer_closure()` and then `self.fast()`.",
        )


def _check_batches(module: pl.LightningModule, step: str) -> None:
    if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
        raise UnsupportedError(
            f"`{type(module).__qualname__}.{step}` takes `dataloader_iter`, and fetches batches inside"
            " the step.",
            "Take `batch` instead.",
        )


def check_optimizer_part(trainer: pl.Trainer) -> None:
    """Refuse hooks that keep the part after the backward pass out of a graph (`in_optimizer`)."""
    for callback in callbacks_of(trainer):
        for hook in _CALLBACK_HOOKS_BEHIND:
            if is_overridden(hook, callback, Callback):
                raise UnsupportedError(
                    f"{described_hook(callback, hook)} runs on the host, between the backward pass and"
                    " the optimizer's step.",
                    "Move it to `on_train_batch_end` to have the optimizer's step in the graph too.",
                    in_optimizer=True,
                )


def _check_modules(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    refuse_rebound_methods()
    refuse_unsupported_modules(module, sharded=isinstance(trainer.strategy, ModelParallelStrategy))
