"""Models of the benchmarks, trained by several processes: GPT, ResNet-18, BERT-base.

Each with gradients of one batch and of four, over sixty optimizer steps, with validations in the middle
of the epoch and at its end. The final state is the same with the callback and without it, bit for bit.
Both runs average gradients in the same buckets, because others would sum them in another order.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from benchmarks.models import MODELS, Workload
from lightning_cudagraph import CUDAGraphCallback
from tests.distributed.cases import Here
from tests.harness import assert_same

STEPS = 60
VALIDATED = 2
# More would only take memory of the host.
DIFFERENT_BATCHES = 48
TOLD_OF_BUCKETS = (
    *("has_rebuilt_buckets", "rebuilt_bucket_sizes"),
    "rebuilt_per_bucket_param_indices",
)


class Buckets(Callback):
    """Records at the end the buckets in which gradients were averaged."""

    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        told = trainer.strategy.model._get_ddp_logging_data()
        self.sizes = {
            name: told.get(name)
            for name in (
                "has_rebuilt_buckets",
                "rebuilt_bucket_sizes",
                "rebuilt_per_bucket_param_indices",
            )
        }


def _module(workload: Workload, tiny: bool) -> pl.LightningModule:
    """A model that also logs its loss in validation."""
    pl.seed_everything(3, verbose=False)
    module = workload.make(tiny)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        self.log("val_size", outputs.float().square().mean())

    if type(module).validation_step is pl.LightningModule.validation_step:
        module.__class__ = type("Validated", (type(module),), {"validation_step": validation_step})
    return module


def _batches(workload: Workload, batches: int, tiny: bool) -> DataLoader[Any]:
    torch.manual_seed(5)
    different = [workload.batch(tiny) for _ in range(min(batches, DIFFERENT_BATCHES))]
    every: Any = [different[index % len(different)] for index in range(batches)]
    return DataLoader(every, batch_size=None)


def train_model(here: Here, name: str, accumulated: int) -> str:
    """Train a model without and with the callback; returns a summary in words.

    Args:
        here: the process and its folder.
        name: of the model.
        accumulated: number of batches in an accumulation window.
    """
    workload = next(workload for workload in MODELS if workload.name == name)
    tiny = here.accelerator == "cpu"
    batches = STEPS * accumulated
    runs, buckets = [], []
    for folder, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        buckets.append(Buckets())
        runs.append(
            here.train(
                f"{folder}-{accumulated}",
                callback,
                build=lambda: _module(workload, tiny),
                max_epochs=1,
                # Each process takes its share of them.
                train_loader=_batches(workload, batches * here.size, tiny),
                val_loader=_batches(workload, 2 * here.size, tiny),
                val_check_interval=batches // VALIDATED,
                accumulate_grad_batches=accumulated,
                precision=workload.precision,
                gradient_clip_val=workload.clip,
                watched=False,
                checkpoint_every=0,
                enable_checkpointing=False,
                callbacks=(buckets[-1],),
            )
        )
    plain, graph = runs
    assert plain.final["global_step"] == STEPS
    assert buckets[0].sizes == buckets[1].sizes, buckets
    assert_same(plain, graph, ignore=("_ms/",))
    counts = graph.counts
    graphs = 1 if accumulated == 1 else 3
    assert counts.captures == graphs, counts
    assert counts.replayed > batches / 2, counts
    sizes = buckets[0].sizes["rebuilt_bucket_sizes"] or "none"
    return f"{counts.replayed} of {batches} batches replayed; bytes of its buckets: {sizes}"


def _of_model(name: str, accumulated: int) -> Any:
    def case(here: Here) -> None:
        print(f"{name}, gradients of {accumulated}: {train_model(here, name, accumulated)}", flush=True)

    return case


UNDER_DDP = {workload.name: workload for workload in MODELS if workload.name != "MLP"}
CASES = {
    f"{name}-{accumulated}": _of_model(name, accumulated) for name in UNDER_DDP for accumulated in (1, 4)
}
