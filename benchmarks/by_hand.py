"""A hand-written training loop, with the step in one `torch.cuda.graph`.

It does the same arithmetic as the Trainer does with the module: autocast around the forward pass,
clipping, the optimizer and its schedule. It has no logs, no hooks and no checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_

from benchmarks.models import Workload

__all__ = ["GraphedByHand"]

_WARM_UP_STEPS = 3


class GraphedByHand:
    """A model, its optimizer, and a graph of their step.

    Args:
        workload: the model.
        tiny: the model in its tiny size.

    Attributes:
        module: the model, on the device.
    """

    def __init__(self, workload: Workload, tiny: bool) -> None:
        self.module = workload.make(tiny).cuda().train()
        # Its step logs, and there is no Trainer.
        self.module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        self._workload = workload
        self._static: Any = None
        # The loss of a batch.
        self.loss: Callable[[Any], Any] = lambda batch: self.module.training_step(batch, 0)
        self._optimizer, self._schedule = _configured(self.module)
        self._stream = torch.cuda.Stream()
        # Of its own, as in torch's own examples: cuBLAS then takes its workspaces inside the capture,
        # from memory of the graph's. Those of warm-up are freed when a Trainer begins or ends anywhere
        # in the process, and a graph that used them ended in illegal memory accesses (H200).
        self._capture_stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()

    def step(self) -> None:
        """The training step, for warm-up and capture."""
        amp = self._workload.precision == "bf16-mixed"
        with torch.autocast("cuda", torch.bfloat16, enabled=amp, cache_enabled=False):
            loss = self.loss(self._static)
        assert isinstance(loss, Tensor)
        self._optimizer.zero_grad()
        loss.backward()
        if self._workload.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._workload.clip)
        self._optimizer.step()

    def warm_up(self, batch: Any) -> None:
        """An ordinary step on a batch, on a side stream."""
        self._take(batch)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.step()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._move_rate()

    def capture(self, step: Callable[[], None] | None = None) -> None:
        """Capture the step.

        Args:
            step: runs in the capture; by default `self.step`.
        """
        self._optimizer.zero_grad()
        # Other threads may make CUDA calls, such as NCCL's watchdog.
        mode: Any = "thread_local"
        with torch.cuda.graph(self._graph, stream=self._capture_stream, capture_error_mode=mode):
            (step or self.step)()

    def replay(self) -> None:
        """Launch the graph on the current static batch."""
        self._graph.replay()

    def train(self, batches: Iterable[Any], alone: bool = False) -> None:
        """Train on all batches.

        Args:
            batches: in host memory.
            alone: replay only, on one batch and at one learning rate.
        """
        for index, batch in enumerate(batches):
            if index < _WARM_UP_STEPS:
                self.warm_up(batch)
                continue
            if index == _WARM_UP_STEPS:
                self.capture()
            if alone:
                self.replay()
                continue
            self.train_step(batch)

    def train_step(self, batch: Any) -> None:
        """Copy a batch into the static one and launch the graph."""
        self._take(batch)
        self.replay()
        self._move_rate()

    def _take(self, batch: Any) -> None:
        if self._static is None:
            self._static = tree_map(lambda tensor: torch.empty_like(tensor, device="cuda"), batch)
        tree_map_(lambda static, new: static.copy_(new, non_blocking=True), self._static, batch)

    def _move_rate(self) -> None:
        if self._schedule is not None:
            self._schedule.step()


def _configured(module: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of a module, made capturable, and its schedule or None."""
    configured = module.configure_optimizers()
    schedule = None
    if isinstance(configured, dict):
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    else:
        optimizer = configured
    for group in optimizer.param_groups:
        group["capturable"] = True
        if schedule is not None:
            group["lr"] = torch.tensor(group["lr"], device="cuda")
    return optimizer, schedule
