"""The `DistributedDataParallel`s that a captured function works on, and what they keep on the host.

What a forward pass does depends on two switches of the wrapper, whether gradients are averaged
(`no_sync`) and whether the pass before has left buffers to be broadcast, and on communication hooks.
Calls that find others are calls in another mode, with graphs of their own; and after a replay they are
left as an eager call leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.errors import ConfigurationError, UnsupportedError
from lightning_cudagraph.processes.ddp import DDPState, check_wrapper, hooks_of

__all__ = ["OWN_ATTRIBUTES", "StepReplicas", "Switches"]

# Attributes of a wrapper: the switches, which are part of a call's mode; what the first iterations make;
# and lists of the module's buffers, which are made for each broadcast.
OWN_ATTRIBUTES = frozenset(
    {
        *("require_forward_param_sync", "require_backward_grad_sync"),
        *("_has_rebuilt_buckets", "_lazy_init_ran", "modules_buffers", "named_module_buffers"),
    }
)
Switches = tuple[tuple[bool, bool, tuple[str, ...]], ...]


class StepReplicas(DDPState):
    """The wrappers of a step.

    Args:
        model: all modules that the step works on.

    Raises:
        UnsupportedError: if one of them does in a step what no graph can hold.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {
            f"`{name}`" if name else "the step's": module
            for name, module in model.named_modules()
            if isinstance(module, DistributedDataParallel)
        }

        def check() -> None:
            for whose, ddp in named.items():
                check_wrapper(f"{whose} `DistributedDataParallel`", ddp)

        super().__init__(named.values(), check)
        check()
        self.record_times(False)

    def own_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Tell if the gradients of all these are parts of the wrappers' buckets.

        An eager call writes where the call before has left them, and so does a graph: who keeps one
        finds the next one in it. Where some are, and others are not, copies of these alone would have to
        be given out.

        Raises:
            UnsupportedError: if some are, and others are not.
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
        return bool(self.wrappers)

    def switches(self) -> Switches:
        """The switches that a forward pass would find now.

        Raises:
            ConfigurationError: inside of `join()`, where processes call the step as often as they like.
        """
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

    def close(self) -> None:
        """Let the reducers take times of their own again."""
        self.record_times(True)
