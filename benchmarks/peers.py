"""The peers of the comparison: ways to run the same training step.

All but the hand-written loops train in a Trainer, with `self.log` and TensorBoardLogger on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from benchmarks.by_hand import GraphedByHand
from benchmarks.fits import BlockedBatches
from benchmarks.models import Workload
from benchmarks.trainers import trainer_for
from lightning_cudagraph import CUDAGraphCallback

__all__ = [
    "BY_HAND",
    "COMPILED",
    "DATA_FLOW",
    "DEFAULTS",
    "EAGER",
    "GRAPHED_CALLABLES",
    "ONE_STREAM",
    "PEERS",
    "REDUCE_OVERHEAD",
    "REPLAYS",
    "TORCH_COMPILE",
    "Outcome",
    "Peer",
]

EAGER = "eager Lightning"
TORCH_COMPILE = "torch.compile"
REDUCE_OVERHEAD = "torch.compile, reduce-overhead"
GRAPHED_CALLABLES = "make_graphed_callables"
BY_HAND = "hand-written graph loop"
ONE_STREAM = "callback, one stream"
DATA_FLOW = "callback, data flow"
COMPILED = "callback, compiled"
DEFAULTS = "callback, as it comes"
REPLAYS = "replays alone"


@dataclass
class Outcome:
    """The result of a fit besides its times.

    Attributes:
        weights: parameters and buffers at its end; empty if they are not to be compared.
        report: of the callback, if there was one.
        memory_bytes: device memory that its graphs took, if known.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    report: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Peer:
    """One way to run a step.

    Attributes:
        name: in tables.
        fit: trains a model, tiny or not, on batches to their end.
        same_numbers: it must end with the weights of eager Lightning, bit for bit.
        needs_gpu: it does not run on a CPU.
        in_main_thread: it must run in the main thread.
        needs: a module that must have been imported in the main thread.
    """

    name: str
    fit: Callable[[Workload, bool, BlockedBatches], Outcome]
    same_numbers: bool = False
    needs_gpu: bool = False
    in_main_thread: bool = False
    needs: str | None = None


def _weights(module: nn.Module) -> dict[str, Tensor]:
    # The Trainer leaves them in host memory.
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _in_trainer(mode: str | None = None) -> Any:
    """A fit in a Trainer; with a mode, the loss is compiled as a whole, without the logging."""

    def fit(workload: Workload, tiny: bool, batches: BlockedBatches) -> Outcome:
        module: Any = workload.make(tiny)
        if mode is not None:
            module._loss = torch.compile(module._loss, mode=mode)
        with trainer_for(workload, []) as trainer:
            trainer.fit(module, batches)
        return Outcome(_weights(module))

    return fit


def _with_callback(**arguments: Any) -> Any:
    """A fit with the callback, with some of its arguments."""

    def fit(workload: Workload, tiny: bool, batches: BlockedBatches) -> Outcome:
        callback = CUDAGraphCallback(**arguments)
        module = workload.make(tiny)
        with trainer_for(workload, [callback]) as trainer:
            trainer.fit(module, batches)
        counts = callback.summary.fit
        if not counts.captures or counts.replayed + counts.warmed_up != len(batches):
            raise RuntimeError(f"Not all steps were replayed:\n{callback.summary}")
        return Outcome(_weights(module), str(callback.summary), counts.memory_bytes)

    return fit


def _by_hand(alone: bool) -> Any:
    def fit(workload: Workload, tiny: bool, batches: BlockedBatches) -> Outcome:
        loop = GraphedByHand(workload, tiny)
        loop.train(batches, alone)
        # Replays alone train on one batch, over and over.
        return Outcome({} if alone else _weights(loop.module))

    return fit


class _GraphedCallables(Callback):
    """Replaces forward and backward pass of the module by a pair of graphs."""

    def __init__(self, workload: Workload, tiny: bool) -> None:
        self._workload = workload
        self._tiny = tiny

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        inputs, _ = tree_map(
            lambda tensor: tensor.to(pl_module.device), self._workload.batch(self._tiny)
        )
        amp = self._workload.precision == "bf16-mixed"
        with torch.autocast("cuda", torch.bfloat16, enabled=amp, cache_enabled=False):
            torch.cuda.make_graphed_callables(pl_module, (inputs,), allow_unused_input=True)


def _with_graphed_callables(workload: Workload, tiny: bool, batches: BlockedBatches) -> Outcome:
    module = workload.make(tiny)
    with trainer_for(workload, [_GraphedCallables(workload, tiny)]) as trainer:
        trainer.fit(module, batches)
    return Outcome(_weights(module))


# The first is what the others are held against; the last of all are the limits.
PEERS = (
    Peer(EAGER, _in_trainer()),
    Peer(TORCH_COMPILE, _in_trainer("default")),
    # What it keeps of its graphs belongs to the main thread.
    Peer(
        REDUCE_OVERHEAD,
        _in_trainer("reduce-overhead"),
        in_main_thread=True,
        needs="torch._inductor.cudagraph_trees",
    ),
    Peer(GRAPHED_CALLABLES, _with_graphed_callables, needs_gpu=True),
    Peer(BY_HAND, _by_hand(alone=False), same_numbers=True, needs_gpu=True),
    Peer(ONE_STREAM, _with_callback(timings=None, streams=1), same_numbers=True),
    Peer(DATA_FLOW, _with_callback(timings=None, streams="auto"), same_numbers=True),
    Peer(COMPILED, _with_callback(timings=None, compile=True)),
    Peer(DEFAULTS, _with_callback(), same_numbers=True),
    Peer(REPLAYS, _by_hand(alone=True), needs_gpu=True),
)
