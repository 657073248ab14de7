"""The `DistributedDataParallel` around a module, or the sharded weights in it, in a `fit`.

The steps of a kind are alike but for one: buffers are broadcast in the step after one that has averaged
gradients, and so not in the step that follows a validation. Such a step is not in the graph.

The wrapper's gradients lie in buckets that are allocated once, in the second step; the graph writes into
them, or into gradients of its own, as an eager step does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.processes.ddp import DDPState, hooks_of
from lightning_cudagraph.processes.shards import Shards, sharded_modules
from lightning_cudagraph.trainer.config.support import check_replicas

__all__ = ["Replicas", "has_replicas"]


def has_replicas(strategy: Strategy) -> bool:
    """Tell if there are collectives in steps: of a wrapper, or of sharded weights."""
    model = strategy.model
    return isinstance(model, DistributedDataParallel) or bool(sharded_modules(model))


class Replicas(DDPState):
    """The replicas of a module in the processes of a run; one, if it is not distributed.

    Args:
        strategy: the strategy of the run.
    """

    def __init__(self, strategy: Strategy) -> None:
        model = strategy.model
        wrappers = [model] if isinstance(model, DistributedDataParallel) else []
        super().__init__(wrappers, lambda: check_replicas(strategy))
        self.shards = Shards(model)

    @property
    def syncs(self) -> bool:
        """Tell if gradients are averaged in the step that is about to run."""
        return any(ddp.require_backward_grad_sync for ddp in self.wrappers)

    def described(self) -> dict[str, Any]:
        """The settings that the collectives of a step depend on, by name."""
        hooks = [("the communication hooks", hooks_of(ddp)) for ddp in self.wrappers]
        return {**dict(hooks), **self.shards.described()}

    def settings(self) -> tuple[Any, ...]:
        """The same in a form that is quick to compare."""
        return (*(len(ddp._comm_hooks) for ddp in self.wrappers), *self.shards.settings())

    def ran(self) -> None:
        """An eager step went through."""
        super().ran()
        self.shards.ran()

    def unlike_others(self, place: Place) -> str:
        """Return why the step that is about to run is not like others of its kind, or nothing."""
        for ddp in self.wrappers:
            # Another name since torch 2.13.
            name = (
                "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
            )
            broadcasts = place.drops and bool(getattr(ddp, name))
            if ddp.modules_buffers and ddp.will_sync_module_buffers() != broadcasts:
                return "buffers are not broadcast in the step after a validation"
        return self.shards.unlike_others()

    def replayed(self, place: Place) -> None:
        """Leave what an eager step would have left."""
        for ddp in self.wrappers:
            ddp.require_forward_param_sync = place.syncs

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a step does on the host to the wrapper, or to sharded modules.

        Raises:
            UnsupportedError: if the wrapper does by now what no graph can hold.
        """
        with super().undone(), self.shards.undone():
            yield

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, the wrapper takes no times of its own after the first ten iterations."""
        self.record_times(False)
        try:
            yield
        finally:
            self.record_times(True)
