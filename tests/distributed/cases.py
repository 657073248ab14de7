"""What processes do together, in both or one of them. Each case is called in all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from tests.harness import BATCH_SIZE, Net, Trace, assert_same, loader, make, train

# Iterations that DistributedDataParallel needs before a capture.
WARM_UP = 11


@dataclass
class Here:
    """Where a case runs.

    Attributes:
        folder: of the case.
        rank: of this process.
        accelerator: ``"cpu"`` or ``"gpu"``.
    """

    folder: Path
    rank: int
    accelerator: str

    def train(
        self,
        name: str,
        callback: CUDAGraphCallback | None,
        build: Callable[[], pl.LightningModule] = Net,
        wrapper: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Trace:
        """One run of all processes.

        Args:
            name: of its folder.
            callback: the callback, or None.
            build: makes the module.
            wrapper: arguments of `DistributedDataParallel`.
            kwargs: of `tests.harness.train`.
        """
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        arguments: dict[str, Any] = {"max_epochs": 3, "train_loader": loader(batches=14), **kwargs}
        strategy = DDPStrategy(**(wrapper or {}))
        return train(
            make(build),
            folder,
            callback,
            accelerator=self.accelerator,
            strategy=strategy,
            devices=2,
            **arguments,
        )

    def assert_same_runs(
        self, callback: CUDAGraphCallback | None = None, **kwargs: Any
    ) -> tuple[Trace, Trace]:
        """Train without the callback and with it, and compare; returns both."""
        plain = self.train("plain", None, **kwargs)
        graph = self.train("graph", callback or CUDAGraphCallback(), **kwargs)
        assert_same(plain, graph, ignore=("_ms/",))
        return plain, graph


def same_numbers(here: Here) -> None:
    """Dropout, batch norm whose buffers are broadcast, logs, a validation after each epoch."""
    _, graph = here.assert_same_runs(max_epochs=4)
    assert graph.counts.captures == 1, graph.counts
    # One of the iterations that the wrapper needs is the first of the second epoch.
    assert graph.counts.warmed_up >= WARM_UP - 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
    reasons = "; ".join(graph.counts.eager)
    assert "not broadcast in the step after a validation" in reasons
    assert "verified against eager steps" in str(graph.callback and graph.callback.report)


def same_numbers_with_sampled_times(here: Here) -> None:
    """Some steps replay a graph with events; and an eager run with the same marks."""
    timings = LayerTimings(every_n_steps=3)
    plain, graph = here.assert_same_runs(CUDAGraphCallback(timings=timings), max_epochs=4)
    assert graph.counts.captures == 1, graph.counts
    eager = here.train("eager", None, callbacks=(timings,), max_epochs=4)
    assert_same(plain, eager)
    assert "features.0" in (timings.report or "")


def same_numbers_accumulated(here: Here) -> None:
    """Gradients of four batches: three graphs, of which one averages."""
    _, graph = here.assert_same_runs(
        max_epochs=4, accumulate_grad_batches=4, train_loader=loader(batches=40)
    )
    assert graph.counts.captures == 3, graph.counts
    assert graph.counts.replayed >= 16, graph.counts


def same_numbers_in_buckets(here: Here) -> None:
    """Gradients that are views of several buckets; on a GPU, with a graph that is always the same."""
    static = here.accelerator == "gpu"  # its table of parameters is on the host
    wrapper = {"gradient_as_bucket_view": True, "static_graph": static, "bucket_cap_mb": 0.0005}
    _, graph = here.assert_same_runs(CUDAGraphCallback(timings=None), wrapper=wrapper, max_epochs=4)
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_with_the_optimizer_behind(here: Here) -> None:
    """The optimizer steps eagerly; gradients of some batches are averaged, and of others not."""
    _, graph = here.assert_same_runs(
        CUDAGraphCallback(scope="forward_backward"), accumulate_grad_batches=2, max_epochs=8
    )
    assert graph.counts.replayed >= 10, graph.counts


class OddBatch(Net):
    """On one process, one batch in the middle is smaller."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        odd = self.trainer.global_rank == 1 and self.trainer.global_step == 16
        return tuple(x[: BATCH_SIZE // 2] for x in batch) if odd else batch


def another_shape(here: Here) -> None:
    """One process has a batch of another shape: all take that step eagerly, and keep their graphs."""
    _, graph = here.assert_same_runs(
        build=OddBatch, max_epochs=4, train_loader=loader(False, batches=14)
    )
    assert graph.counts.captures == 1, graph.counts
    reasons = " ".join(graph.counts.eager)
    expected = "another batch signature" if here.rank == 1 else "not all processes could take this step"
    assert expected in reasons, reasons


class OtherDropout(Callback):
    """On one process, dropout becomes another in the middle."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 16:
            pl_module.features[3].p = 0.5


def a_guard_in_one_process(here: Here) -> None:
    """What a graph has baked in changes in one process: all capture anew."""
    _, graph = here.assert_same_runs(callbacks=(OtherDropout(),), max_epochs=5)
    assert graph.counts.captures == 2, graph.counts
    assert "(rank 1)" in graph.counts.recaptures[0] or here.rank == 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
