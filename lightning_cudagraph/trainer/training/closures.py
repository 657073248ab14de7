"""Closures of Lightning's automatic optimization that can be captured or replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor

from lightning_cudagraph.errors import CUDAGraphError

Call = Callable[["GraphClosure", Callable[[], Tensor | None]], Tensor | None]


class GraphClosure(Closure):
    """A closure that holds its batch, so that it can be captured or replayed instead of called."""

    def __init__(
        self, closure: Closure, kwargs: OrderedDict[str, Any], batch_idx: int, call: Call
    ) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self.kwargs = kwargs
        self.batch_idx = batch_idx
        # Raised in its step: user code around the step may have caught it with exceptions of its own.
        self.failure: CUDAGraphError | None = None
        self._call = call

    def consume_result(self) -> ClosureResult:
        if self.failure is not None:
            raise self.failure
        return super().consume_result()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._call(self, lambda: super(GraphClosure, self).__call__(*args, **kwargs))

    @property
    def drops_gradients(self) -> bool:
        """True for the first batch of an accumulation window."""
        return self._zero_grad_fn is not None

    @property
    def batch(self) -> Any:
        return next(iter(self.kwargs.values()))
