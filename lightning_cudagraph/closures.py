"""Lightning's automatic optimization, with closures that can be captured instead of called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["GraphClosure", "GraphedOptimization"]


class GraphClosure(Closure):
    """A closure that remembers its batch, so that it can be captured or replayed instead of called."""

    def __init__(
        self,
        closure: Closure,
        kwargs: OrderedDict[str, Any],
        batch_idx: int,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self.kwargs = kwargs
        self.batch_idx = batch_idx
        self._around = around  # what the optimizer's arithmetic must not show to the user's code

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        with self._around():
            return super().__call__(*args, **kwargs)

    @property
    def batch(self) -> Any:
        return next(iter(self.kwargs.values()))


class GraphedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, with closures that can be captured."""

    around_eager: Callable[[], AbstractContextManager[None]]

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Closure:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        if self._skip_backward or self.trainer.accumulate_grad_batches != 1:
            return closure  # StochasticWeightAveraging, updating batch norm in its last epoch
        return GraphClosure(closure, kwargs, batch_idx, self.around_eager)

    def closure_for_capture(
        self,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
        around: Callable[[], AbstractContextManager[None]],
    ) -> GraphClosure:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return GraphClosure(closure, kwargs, batch_idx, around)
