"""Private names of torch."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from lightning_cudagraph.compat.features import (
    CAPTURABLE_ON_CPU,
    CAPTURED_MODULES,
    CAPTURES,
    COLLECTIVES,
    CUDA,
    FP16,
    HELD_GRADIENTS,
    METRICS,
    REPLICAS,
    SEGMENTS,
    SHARDS,
    TIMES,
)
from lightning_cudagraph.compat.probes import (
    PrivateName,
    accepts,
    imported,
    members,
    named,
)

if TYPE_CHECKING:
    from torch._dynamo import eval_frame
    from torch._dynamo.backends import cudagraphs, debugging
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.amp.grad_scaler import _refresh_per_optimizer_state
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        is_traceable_wrapper_subclass,
    )
    from torch.utils._pytree import (
        TreeSpec,
        tree_flatten,
        tree_iter,
        tree_leaves,
        tree_map,
        tree_map_only,
    )
    from torch.utils.data.dataloader import _BaseDataLoaderIter
else:

    def __getattr__(name: str) -> Any:
        return imported(TORCH, name)


_DYNAMO = "torch._dynamo.eval_frame"
_DISPATCH = "torch.utils._python_dispatch"
_TREES = "torch.utils._pytree"
_COMPILED_CALLS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable"


def _counts_writes(version: Any) -> bool:
    import torch

    tensor = torch.zeros((), device="cpu")
    before = version.__get__(tensor)
    tensor.add_(1)
    return bool(version.__get__(tensor) == before + 1)


def _counts_users(count: Any) -> bool:
    import torch

    tensor = torch.zeros(2, device="cpu")
    number = tensor.untyped_storage()._cdata
    before = count(number)
    view = tensor[:1]
    return bool(before >= 1 and count(number) > before and view is not None)


def _negates(view: Any) -> bool:
    import torch

    return bool(view(torch.ones(1, device="cpu")).is_neg())


def _counts_nodes(number: Any) -> bool:
    import torch

    before = number()
    node = torch.zeros((), requires_grad=True, device="cpu").clone().grad_fn
    return bool(number() == before + 1 and node._sequence_nr() == before)  # type: ignore[union-attr]


def _has_hook_tables(handle: Any) -> bool:
    made = handle(OrderedDict())
    return all(hasattr(made, name) for name in ("hooks_dict_ref", "extra_dict_ref", "id"))


_AUTOGRAD = (
    PrivateName("torch.autograd._get_sequence_nr", (TIMES,), _counts_nodes),
    # Read from nodes by the probe above; older versions do not declare it here.
    PrivateName("torch.autograd.graph.Node._sequence_nr", (CAPTURED_MODULES,)),
    PrivateName("torch.autograd.Variable._execution_engine", (TIMES, REPLICAS)),
    PrivateName(
        "torch._C._current_graph_task_id", (TIMES, CAPTURED_MODULES), lambda number: number() == -1
    ),
    PrivateName(
        "torch._C._are_functorch_transforms_active",
        (CAPTURED_MODULES,),
        lambda active: active() is False,
    ),
    PrivateName(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        (CAPTURES, CAPTURED_MODULES),
        lambda top: top(True) is None,
    ),
    PrivateName("torch._C._len_torch_function_stack", (CAPTURES,), lambda length: length() >= 0),
    PrivateName("torch._C._len_torch_dispatch_stack", (CAPTURES,), lambda length: length() >= 0),
    *named("torch._C", "_get_function_stack_at _get_dispatch_stack_at", CAPTURES),
    *named("torch._C", "_get_cudnn_enabled _get_cudnn_benchmark _get_cudnn_deterministic", CAPTURES),
    *named("torch._C", "_get_cublas_allow_fp16_accumulation", CAPTURES),
    PrivateName(
        "torch._C._get_fp32_precision_getter", (CAPTURES,), lambda read: bool(read("cuda", "conv"))
    ),
    PrivateName(
        "torch._C._dynamo.guards.GlobalStateGuard", (CAPTURES,), lambda guard: guard().check() is True
    ),
    PrivateName(
        "torch.autograd.forward_ad._current_level", (CAPTURED_MODULES,), lambda level: level == -1
    ),
    PrivateName(
        "torch.nn.utils.parametrize._cache_enabled", (CAPTURED_MODULES,), lambda depth: depth == 0
    ),
    # Entered around a checkpointed function, and around its recomputation.
    *named("torch.utils.checkpoint", "_checkpoint_hook _recomputation_hook", TIMES),
    PrivateName("torch.utils.hooks.RemovableHandle", (TIMES,), _has_hook_tables),
    members("torch.nn.Module", "_compiled_call_impl", TIMES),
    members(f"{_DYNAMO}.OptimizedModule", "_orig_mod", TIMES),
)
_MODULES = (
    members(
        "torch.nn.Module",
        "_parameters _buffers _modules _forward_pre_hooks _forward_hooks _backward_pre_hooks"
        " _backward_hooks",
        CAPTURABLE_ON_CPU,
        CAPTURES,
        TIMES,
    ),
    members("torch.nn.utils.prune.BasePruningMethod", "_tensor_name", CAPTURES),
)
_TENSORS = (
    PrivateName("torch.Tensor._version", (CAPTURES,), _counts_writes),
    *named("torch.Tensor", "_backward_hooks _post_accumulate_grad_hooks", CAPTURES),
    *named("torch.Tensor", "_indices _values", CAPTURES),
    PrivateName("torch.Tensor._make_subclass", (METRICS,)),
    *named("torch.UntypedStorage", "_cdata", CAPTURES),
    *named("torch.Generator", "_cdata", CAPTURES),
    # References to a tensor from C++; only some versions have it.
    PrivateName("torch.Tensor._use_count"),
    PrivateName("torch._C._storage_Use_Count", (HELD_GRADIENTS,), _counts_users),
    PrivateName("torch._neg_view", (CAPTURES,), _negates),
    *named("torch", "_foreach_add_ _foreach_copy_ _foreach_div _foreach_div_ _foreach_mul", CAPTURES),
    *named("torch", "_foreach_mul_ _foreach_sub _fused_sgd_", CAPTURES),
)
_OPS = (
    *named("torch._ops", "OpOverload.__call__ OpOverloadPacket.__call__", CAPTURES),
    PrivateName(
        "torch.ops.aten.add.Tensor._schema", (CAPTURES,), lambda schema: schema.name == "aten::add"
    ),
    PrivateName("torch.ops.aten.add._qualified_op_name", (CAPTURES,), lambda name: name == "aten::add"),
    *named(_DISPATCH, "TorchDispatchMode", CAPTURES),
    *named(_DISPATCH, "_disable_current_modes", CAPTURES, probe=accepts()),
    *named(_DISPATCH, "is_traceable_wrapper_subclass", CAPTURES, probe=lambda f: f(None) is False),
    *named(_TREES, "TreeSpec", CAPTURES),
    *named(_TREES, "tree_flatten", CAPTURES, probe=lambda f: f([1, (2,)])[0] == [1, 2]),
    *named(_TREES, "tree_iter", CAPTURES, probe=lambda f: [*f([1, (2,)])] == [1, 2]),
    *named(_TREES, "tree_leaves", CAPTURES, probe=lambda f: f([1, (2,)]) == [1, 2]),
    *named(_TREES, "tree_map", CAPTURES, probe=lambda f: f(str, [1, (2,)]) == ["1", ("2",)]),
    *named(_TREES, "tree_map_only", CAPTURES, probe=lambda f: f(int, str, [1, "a"]) == ["1", "a"]),
    PrivateName("torch._C._RestorePythonTLSSnapshot", (CAPTURES,)),
    PrivateName("torch._C._AutoDispatchBelowAutograd", (CAPTURES,)),
    PrivateName(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        (CAPTURES,),
        lambda known: known("aten::mm", "AutocastCPU"),
    ),
    PrivateName("torch._C._nn.cross_entropy_loss", (CAPTURES,)),
    PrivateName("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", (CAPTURES,)),
    *named(
        "torch.overrides",
        "_get_current_function_mode_stack",
        CAPTURABLE_ON_CPU,
        CAPTURES,
        probe=lambda stack: isinstance(stack(), list),
    ),
    *named("torch.overrides", "_pop_mode _push_mode", CAPTURES),
)
_COMPILER = (
    PrivateName("torch._TorchCompileInductorWrapper", (CAPTURES,)),
    *named(_DYNAMO, "FrameAction FrameExecStrategy set_code_exec_strategy", CAPTURES),
    PrivateName(f"{_DYNAMO}._stance", (CAPTURES,), lambda stance: isinstance(stance.stance, str)),
    members(f"{_DYNAMO}.OptimizeContext", "enter_exit_hooks callback", CAPTURES),
    members("torch._dynamo.convert_frame.CatchErrorsWrapper", "_torchdynamo_orig_backend", CAPTURES),
    PrivateName(f"{_COMPILED_CALLS}._get_handlers", (CAPTURES,), accepts()),
    PrivateName(
        "torch._dynamo.utils.counters", (CAPTURES,), lambda counters: counters["stats"] is not None
    ),
    PrivateName(
        "torch._dynamo.config.disable", (CAPTURES,), lambda flag: isinstance(flag, bool) or True
    ),
    PrivateName("torch._dynamo.backends.cudagraphs.CudagraphsBackend", (CAPTURES,)),
    PrivateName("torch._dynamo.backends.debugging.aot_eager", (CAPTURES,), accepts("model", "inputs")),
    # Set on what `torch.compile` and `torch.compiler.disable` return.
    PrivateName("torch._dynamo.eval_frame._TorchDynamoContext.__call__._torchdynamo_orig_callable"),
    PrivateName("torch._dynamo.eval_frame.DisableContext.__call__._torchdynamo_disable"),
    PrivateName(
        "torch._inductor.config.triton.cudagraphs",
        (CAPTURES,),
        lambda flag: isinstance(flag, bool),
        if_imported="torch._inductor.config",
    ),
    PrivateName(
        "torch._inductor.output_code.CompiledFxGraph.__call__",
        (CAPTURES,),
        if_imported="torch._inductor.output_code",
    ),
)
_OPTIMIZERS = (
    members("torch.optim.Optimizer", "_optimizer_step_pre_hooks _optimizer_step_post_hooks", CAPTURES),
    *named(
        "torch.optim.optimizer", "_global_optimizer_pre_hooks _global_optimizer_post_hooks", CAPTURES
    ),
    PrivateName("torch.optim.SGD._init_group", (CAPTURES,)),
    PrivateName("torch.optim.adam._get_capturable_supported_devices", (CAPTURABLE_ON_CPU,), accepts()),
    members(
        "torch.amp.GradScaler",
        "_maybe_opt_step _per_optimizer_states _scale _growth_tracker _growth_factor _backoff_factor"
        " _growth_interval",
        FP16,
    ),
    PrivateName(
        "torch.amp.grad_scaler._refresh_per_optimizer_state",
        (FP16,),
        lambda make: {"stage", "found_inf_per_device"} <= make().keys(),
    ),
)
_DDP = "torch.nn.parallel.DistributedDataParallel"
_C10D = "torch._C._distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"
_DISTRIBUTED = (
    members(
        _DDP,
        "_get_ddp_logging_data _set_ddp_runtime_logging_sample_rate _comm_hooks _join_config reducer",
        REPLICAS,
    ),
    # Attributes that the first iterations set, and an argument of some versions.
    *(
        PrivateName(f"{_DDP}.{name}")
        for name in ("_has_rebuilt_buckets", "_lazy_init_ran", "_delay_all_reduce_params")
    ),
    *named(f"{_C10D}.Reducer", "_check_reducer_finalized _reset_state _get_local_used_map", REPLICAS),
    *named(_C10D, "_create_work_from_future Work.unbox ProcessGroup.unbox", COLLECTIVES),
    *named("torch.distributed.distributed_c10d", "_get_default_store PrefixStore", COLLECTIVES),
    *named("torch.distributed.distributed_c10d", "_world", COLLECTIVES),
    *named("torch.library.Library", "_destroy", TIMES),
    PrivateName("torch.ops._c10d_functional.wait_tensor", (COLLECTIVES,)),
    *(
        PrivateName(f"{module}.{name}", (SHARDS,), fields=fields, if_imported="torch.distributed.fsdp")
        for module, name, fields in (
            (f"{_FSDP}._fully_shard", "FSDPModule", ("_get_fsdp_state",)),
            (f"{_FSDP}._fsdp_state", "FSDPState", ("_state_ctx",)),
            (
                f"{_FSDP}._fsdp_param_group",
                "FSDPParamGroup",
                (
                    *("_all_gather_result", "_training_state", "_post_reduce_event"),
                    *("_partial_reduce_output", "is_sharded", "fsdp_params", "reshard"),
                ),
            ),
            (
                f"{_FSDP}._fsdp_param",
                "FSDPParam",
                ("_unsharded_param", "unsharded_accumulated_grad", "all_gather_outputs"),
            ),
        )
    ),
    # One name of each pair, depending on the version of torch.
    *(
        PrivateName(f"{_FSDP}._fsdp_state.FSDPState.{name}")
        for name in ("_fsdp_param_group", "_fsdp_param_groups", "_comm_ctx", "comm_ctx")
    ),
    # Custom ways to gather weights and to reduce gradients; torch's own if they are unset.
    *(
        PrivateName(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.{name}")
        for name in ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
    ),
    *named(
        "torch.distributed.tensor.DTensor",
        "_local_tensor",
        SHARDS,
        if_imported="torch.distributed.tensor",
    ),
)
_OF_CUDA = (
    PrivateName("torch._C._cuda_clearCublasWorkspaces", (CUDA,)),
    # Looked for where they are used. Without the first, each replay asks for the whole stream; without
    # the others, memory may stay reserved after a capture that CUDA broke off.
    *named("torch._C", "_cuda_getCurrentRawStream _cuda_endAllocateToPool _cuda_releasePool"),
    PrivateName("torch.cuda.memory._snapshot", (SEGMENTS,)),
)

TORCH = (*_AUTOGRAD, *_MODULES, *_TENSORS, *_OPS, *_COMPILER, *_OPTIMIZERS, *_DISTRIBUTED, *_OF_CUDA)
