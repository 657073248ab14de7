"""The `DistributedDataParallel` wrapper or the sharded weights of the module in a `fit`.

Steps of one accumulation phase are alike, with one exception: the wrapper broadcasts buffers in the step
after one that has averaged gradients, and so not in the step after a validation. That step runs eagerly.

DDP allocates its buckets of gradients once, in the second step. As an eager step does, a graph writes
gradients into the buckets or into tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.processes.collective_state import CollectiveState
from lightning_cudagraph.processes.ddp import hooks_of
from lightning_cudagraph.processes.shards import sharded_modules
from lightning_cudagraph.trainer.config.support import check_replicas


def has_replicas(strategy: Strategy) -> bool:
    """True if steps have collectives: of a wrapper, or of sharded weights."""
    model = strategy.model
    return isinstance(model, DistributedDataParallel) or bool(sharded_modules(model))


class Replicas(CollectiveState):
    """The replicas of a module in the processes of a run; one, if it is not distributed."""

    def __init__(self, strategy: Strategy) -> None:
        model = strategy.model
        wrappers = [model] if isinstance(model, DistributedDataParallel) else []
        super().__init__(wrappers, lambda: check_replicas(strategy), model)

    @property
    def syncs(self) -> bool:
        return any(ddp.require_backward_grad_sync for ddp in self.wrappers)

    def described(self) -> dict[str, Any]:
        """Return the settings that the collectives of a step depend on, by name."""
        hooks = [("the communication hooks", hooks_of(ddp)) for ddp in self.wrappers]
        return {**dict(hooks), **self.shards.described()}

    def settings(self) -> tuple[Any, ...]:
        """Return these settings in a form that is quick to compare."""
        return (*[len(ddp._comm_hooks) for ddp in self.wrappers], *self.shards.settings())

    def eager_reason(self, accumulation: AccumulationPhase) -> str:
        """Return the reason why the next step differs from others of its phase; empty if it does not."""
        for ddp in self.wrappers:
            # Renamed in torch 2.13.
            name = (
                "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
            )
            expected = accumulation.drops and bool(getattr(ddp, name))
            if ddp.modules_buffers and ddp.will_sync_module_buffers() != expected:
                return "buffers are not broadcast in the step after a validation"
        return self.is_marked(accumulation.syncs) or self.shards.eager_reason()

    def reason_in_evaluation(self) -> str:
        """Return the reason why the next batch of an evaluation must run eagerly; or an empty text."""
        if any(ddp.modules_buffers and ddp.will_sync_module_buffers() for ddp in self.wrappers):
            return "buffers are broadcast in the first batch of an evaluation"
        return self.shards.reason_in_evaluation()

    def evaluated(self) -> None:
        """Set the state on the host that an eager batch of an evaluation leaves."""
        self.leave((False,) * len(self.wrappers))

    def replayed(self, accumulation: AccumulationPhase) -> None:
        """Set the state on the host that an eager step leaves."""
        for ddp in self.wrappers:
            ddp.require_forward_param_sync = accumulation.syncs

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Keep the wrapper from recording its own times after the first ten iterations."""
        self.record_times(False)
        try:
            yield
        finally:
            self.record_times(True)
