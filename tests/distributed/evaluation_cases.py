"""Cases of evaluation graphs in several processes: each has its own.

All processes call each case at once. Without the callback all these runs succeed.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_cudagraph import CUDAGraphCallback
from tests.distributed.cases import Here
from tests.harness import Net, assert_same, loader

_BROADCAST = "buffers are broadcast in the first batch of an evaluation"


class SharedLogs(Net):
    """Logs values of all processes in a validation, in each step and at the end, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("val_shared", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.right(logits, batch[1])
        self.log("val_right", self.right, on_step=False, on_epoch=True)


class Gathers(Net):
    """Has a collective in each of its validation steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        total = batch[0].sum()
        dist.all_reduce(total)
        self.log("total", total)


class NoBuffers(Net):
    """Nothing is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.features[1] = nn.Identity()


def _same(here: Here, build: Any, batches: int, **kwargs: Any) -> Any:
    """The counts of the validations of a run that trains as without the callback."""
    callback = CUDAGraphCallback(evaluation=True, **kwargs)
    runs = [
        here.train(name, each, build, max_epochs=5, val_loader=loader(seed=1, batches=batches))
        for name, each in (("plain", None), ("graph", callback))
    ]
    assert_same(*runs, ignore=("_ms/",))
    assert runs[1].counts.replayed >= 10, runs[1].counts
    return callback.summary


def other_numbers_of_batches(here: Here) -> None:
    """The wrapper broadcasts in the first batch of each evaluation."""
    validate = _same(here, Net, 8 + 4 * here.rank).validate
    assert validate.replayed >= 12, validate
    assert validate.eager == {_BROADCAST: 5}, validate


def shared_logs(here: Here) -> None:
    """Values of all processes are averaged on the host, between two replays."""
    assert _same(here, SharedLogs, 8).validate.replayed >= 12


def no_buffers(here: Here) -> None:
    """All batches after the warm-up are replayed."""
    validate = _same(here, NoBuffers, 8).validate
    assert validate.replayed >= 15, validate
    assert not validate.eager, validate


def a_collective_in_the_step(here: Here) -> None:
    """Each process would replay it by itself."""
    summary = _same(here, Gathers, 8, on_unsupported="eager")
    assert summary.validate.replayed == 0
    report = str(summary)
    assert "a collective (`c10d::allreduce_`) in an evaluation step" in report, report


def without_a_fit(here: Here) -> None:
    """`trainer.validate` has no wrapper."""

    def validate(trainer: pl.Trainer, module: Any, _: Any, batches: Any, **kwargs: Any) -> None:
        module.told = trainer.validate(module, batches, verbose=False)

    callback = CUDAGraphCallback(evaluation=True)
    told = []
    for name, each in (("plain", None), ("graph", callback)):
        trace = here.train(
            name,
            each,
            SharedLogs,
            fit=validate,
            val_loader=loader(seed=1 + here.rank, batches=10),
            use_distributed_sampler=False,
        )
        told.append(trace.module.told)  # type: ignore[union-attr]
    assert told[0] == told[1] != []
    assert callback.summary.validate.replayed >= 5, callback.summary
