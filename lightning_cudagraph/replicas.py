"""The `DistributedDataParallel` around a module, and what it keeps on the host from step to step.

A replay does not run its Python. What an eager step would leave there is noted here, and what is not
the same in every step of a kind keeps such a step out of the graph: buffers are broadcast in the step
after one that has averaged gradients, and so not in the step that follows a validation.

Or the weights that are sharded (`shards.py`) in place of a wrapper.

Its gradients lie in buckets that are allocated once, in the second step; the graph writes into them, or
into its own gradients beside them, as an eager step does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.capture.processes.wrappers import hooks_of, is_unfinished, take_times
from lightning_cudagraph.capture.steps import Place
from lightning_cudagraph.shards import Shards, sharded_modules
from lightning_cudagraph.support import check_replicas

__all__ = ["Replicas", "has_replicas"]

# One more than the reducer takes times of by events, which no capture can hold. By then it has also
# sorted its buckets anew, which it does in the second one, after a broadcast on the host.
_SETTLED_AFTER = 11
_SORTED_AFTER = 2


def has_replicas(strategy: Strategy) -> bool:
    """Whether there are collectives in steps: of a wrapper, or of sharded weights."""
    model = strategy.model
    return isinstance(model, DistributedDataParallel) or bool(sharded_modules(model))


class Replicas:
    """The replicas of a module in the processes of a run; one, if it is not distributed.

    Args:
        strategy: the strategy of the run.
    """

    def __init__(self, strategy: Strategy) -> None:
        model = strategy.model
        self._strategy = strategy
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self.shards = Shards(model)
        self._averaged = 0
        self._broken = False

    @property
    def are_averaged(self) -> bool:
        """Whether there is a wrapper, which averages gradients in the last step of each window."""
        return self._ddp is not None

    @property
    def syncs(self) -> bool:
        """Whether gradients are averaged in the step that is about to run."""
        return self._ddp is not None and self._ddp.require_backward_grad_sync

    def described(self) -> dict[str, Any]:
        """What the collectives of a step go by, by name."""
        hooks = {} if self._ddp is None else {"the communication hooks": hooks_of(self._ddp)}
        return {**hooks, **self.shards.described()}

    def settings(self) -> tuple[Any, ...]:
        """The same in a form that is quick to compare."""
        hooks = () if self._ddp is None else (len(self._ddp._comm_hooks),)
        return (*hooks, *self.shards.settings())

    def ran(self, place: Place) -> None:
        """An eager step went through."""
        self._averaged += place.syncs
        self.shards.ran()

    def is_settled(self) -> bool:
        """Whether the reducer has had the iterations that no capture can hold."""
        return self._ddp is None or self._averaged >= _SETTLED_AFTER

    def unlike_others(self, place: Place) -> str:
        """Why the step that is about to run does not do what others in its place do, or nothing."""
        ddp = self._ddp
        if ddp is None:
            return self.shards.unlike_others()
        if not ddp.modules_buffers:
            return ""
        if ddp.will_sync_module_buffers() == (place.drops and self._broadcasts(ddp)):
            return ""
        return "buffers are not broadcast in the step after a validation"

    @staticmethod
    def _broadcasts(ddp: DistributedDataParallel) -> bool:
        # Another name since torch 2.13.
        name = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
        return bool(getattr(ddp, name))

    def replayed(self, place: Place) -> None:
        """Leave what an eager step would have left."""
        if self._ddp is not None:
            self._ddp.require_forward_param_sync = place.syncs

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a step does on the host to the wrapper, or to sharded modules.

        Raises:
            UnsupportedError: if the wrapper does by now what no graph can hold.
        """
        ddp = self._ddp
        if ddp is None:
            with self.shards.undone():
                yield
            return
        check_replicas(self._strategy)  # hooks may have been added since
        before = ddp.require_forward_param_sync
        try:
            yield
        except BaseException:
            self._broken = is_unfinished(ddp)
            raise
        finally:
            ddp.require_forward_param_sync = before

    def is_broken(self) -> bool:
        """Whether a step was left in the middle of its backward pass: gradients are waited for."""
        return self._broken

    def mend(self) -> None:
        """Wait for none any more. In all processes at once: the next step sorts buckets anew."""
        self._broken = False
        if self._ddp is not None:
            self._ddp.reducer._reset_state()
            self._averaged = min(self._averaged, _SETTLED_AFTER - _SORTED_AFTER)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, it takes no times of its own after the first ten iterations."""
        if self._ddp is None:
            yield
            return
        take_times(self._ddp, False)
        try:
            yield
        finally:
            take_times(self._ddp, True)
