"""Closures of Lightning's automatic optimization that can be captured or replayed."""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.compat.names.lightning_names import _AutomaticOptimization, _TrainingEpochLoop
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


class GraphedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, with a `GraphClosure` for each batch."""

    call: Call
    skipped: Callable[[str], None]

    def __init__(self) -> None:
        """Do nothing yet: `install` takes over the attributes of the loop's own object."""

    def install(
        self, loop: _TrainingEpochLoop, call: Call, skipped: Callable[[str], None], patches: ExitStack
    ) -> None:
        """Replace the loop's own object, with its attributes, until `patches` is closed."""
        original = loop.automatic_optimization
        self.__dict__.update(original.__dict__)
        self.call = call
        self.skipped = skipped

        def give_back() -> None:
            del self.call, self.skipped
            original.__dict__.update(self.__dict__)
            loop.automatic_optimization = original

        loop.automatic_optimization = self
        patches.callback(give_back)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as Lightning's own class, without the references to this run."""
        state = {name: value for name, value in vars(self).items() if name not in ("call", "skipped")}
        return copyreg._reconstructor, (_AutomaticOptimization, object, None), state  # type: ignore[attr-defined]

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Closure:
        if self._skip_backward:
            self.skipped("`StochasticWeightAveraging` updates batch norm, without training")
            return super()._make_closure(kwargs, optimizer, batch_idx)
        return self.closure_for_capture(kwargs, optimizer, batch_idx, self.call)

    def closure_for_capture(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int, call: Call
    ) -> GraphClosure:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return GraphClosure(closure, kwargs, batch_idx, call)

    def count_zero_grads(self, number: int) -> None:
        """Count the `zero_grad` calls inside a replay, as Lightning counts its own."""
        zero_grad: Any = self.optim_progress.optimizer.zero_grad
        for counts in (zero_grad.total, zero_grad.current):
            counts.ready += number
            counts.started += number
            counts.completed += number
