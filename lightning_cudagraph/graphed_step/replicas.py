"""The `DistributedDataParallel`s and sharded weights of a captured function, and their host state.

A forward pass depends on two switches of the wrapper, the averaging of gradients (`no_sync`) and the
broadcast of buffers, and on communication hooks. These are part of the specialization of a call. After a
replay, the switches are set as an eager call sets them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.errors import ConfigurationError, UnsupportedError
from lightning_cudagraph.processes.collective_state import CollectiveState
from lightning_cudagraph.processes.ddp import check_wrapper, hooks_of
from lightning_cudagraph.processes.shards import check_shards

# Attributes of a wrapper that are not guarded: the switches, which are part of the specialization, state
# of the first iterations, and lists of buffers that each broadcast makes.
OWN_ATTRIBUTES = frozenset(
    {
        *("require_forward_param_sync", "require_backward_grad_sync"),
        *("_has_rebuilt_buckets", "_lazy_init_ran", "modules_buffers", "named_module_buffers"),
    }
)
Switches = tuple[tuple[bool, bool, tuple[str, ...]], ...]


class StepReplicas(CollectiveState):
    """The `DistributedDataParallel`s and shards of a step; those that no graph can hold are refused."""

    def __init__(self, model: nn.Module) -> None:
        named = {
            f"`{name}`" if name else "the step's": module
            for name, module in model.named_modules()
            if isinstance(module, DistributedDataParallel)
        }

        def check() -> None:
            for owner, ddp in named.items():
                check_wrapper(f"{owner} `DistributedDataParallel`", ddp)

        super().__init__(named.values(), check, model)
        check()
        check_shards(model)
        self.record_times(False)

    def own_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """True if the gradients of all these parameters are views of DDP buckets.

        Eager calls and replays then both overwrite the gradients of the call before, so external
        references need no copies.
        """
        views = [ddp for ddp in self.wrappers if ddp.gradient_as_bucket_view]
        inside = {id(p) for ddp in views for p in ddp.parameters() if p.requires_grad}
        ignored = any(getattr(ddp, "parameters_to_ignore", None) for ddp in views)
        outside = any(p.requires_grad and id(p) not in inside for p in parameters)
        if views and (outside or ignored):
            raise UnsupportedError(
                "Of the parameters that the step works on, some have gradients in the buckets of a"
                " `DistributedDataParallel(gradient_as_bucket_view=True)`, and others do not.",
                "Leave `gradient_as_bucket_view` out.",
            )
        return bool(views)

    def __bool__(self) -> bool:
        return bool(self.wrappers or self.shards)

    def switches(self) -> Switches:
        """Return the present switches of all wrappers; refuse `join()`, where calls are unequal."""
        if any(ddp._join_config.enable for ddp in self.wrappers):
            raise ConfigurationError(
                "The step is called inside of `DistributedDataParallel.join()`, where some processes"
                " call it less often than others; all decide together what becomes of each call. Give"
                " all of them the same number of batches (a `DistributedSampler` does)."
            )
        return tuple(
            (ddp.require_backward_grad_sync, ddp.will_sync_module_buffers(), hooks_of(ddp))
            for ddp in self.wrappers
        )

    def eager_reason(self, evaluates: bool) -> str:
        """Return the reason why the next call differs from others of its kind; empty if it does not."""
        if evaluates:
            # The call may have a backward pass of its own.
            return self.shards.reason_in_evaluation() or self.shards.reason_in_backward()
        averages = all(ddp.require_backward_grad_sync for ddp in self.wrappers)
        return self.is_marked(averages) or self.shards.eager_reason()

    def close(self) -> None:
        """Let the reducers record their own times again."""
        self.record_times(True)
